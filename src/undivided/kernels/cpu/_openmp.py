"""Shows PyTorch's OpenMP runtime to the native library, which finds it by the names of its functions."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
from pathlib import Path

_RUNTIME = re.compile(r"/lib(gomp|iomp5|omp)\b[^/]*\.so[^/]*$")


def share_runtime() -> None:
    """Make the runtime that PyTorch has loaded visible to libraries that are loaded from now on.

    PyTorch loads the dependencies of libtorch_global_deps for all libraries of the process. In its x86 wheels the
    runtime is one of them; in those for 64-bit ARM (torch 2.13) it is not, and our threads would compete with
    PyTorch's. A library that is loaded already can be made visible: dlopen(3), RTLD_NOLOAD with RTLD_GLOBAL.
    """
    if sys.platform != "linux" or _is_visible():
        return
    for path in _loaded_runtimes():
        with contextlib.suppress(OSError):
            ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_GLOBAL)
        if _is_visible():
            return


def _is_visible() -> bool:
    return hasattr(ctypes.CDLL(None), "GOMP_parallel")


def _loaded_runtimes() -> list[str]:
    """The paths of the OpenMP runtimes in this process: first PyTorch's own copy, then the system's, then those of
    other packages, whose names have a hash."""
    try:
        maps = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    mapped = {line.split(maxsplit=5)[-1] for line in maps if ".so" in line}
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    own = () if torch is None else (f"{Path(torch).parent}{os.sep}", f"{Path(torch).parent}.libs{os.sep}")

    def order(path: str) -> tuple[bool, bool, str]:
        return not path.startswith(own), "-" in Path(path).name, path

    return sorted((path for path in mapped if _RUNTIME.search(path)), key=order)

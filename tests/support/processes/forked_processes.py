"""New processes that are forked from one which has imported the slow packages, and has done nothing else.

Importing torch takes seconds, and hundreds of tests start a process. A test of what happens at the start of Python, at
the first import or at a fork starts an interpreter of its own instead.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import quick_spawn

IMPORTED = ["torch.distributed.tensor.parallel", "torch._inductor.compile_fx", "transformers.generation.utils"]
"""Imported once by the process that is forked; those that are not installed are left out."""


def context() -> Any:
    """Starts such processes as `multiprocessing` does; on systems without fork they import everything themselves."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(IMPORTED)
    return server


def run(
    program: str | Path,
    *arguments: str,
    folder: Path | None = None,
    warnings_are_errors: bool = False,
    environment: dict[str, str] | None = None,
    timeout: float = 300.0,
) -> subprocess.CompletedProcess[str]:
    """What ``python FILE`` or ``python -c PROGRAM`` does with these arguments, in this folder, without input.

    The process is killed after `timeout` seconds, and its output has what it printed until then. PYTHONIOENCODING in
    `environment` names the encoding of its streams, as at the start of an interpreter.
    """
    with tempfile.TemporaryDirectory() as output:
        variables = os.environ | (environment or {})
        call = (program, arguments, folder or Path.cwd(), warnings_are_errors, variables, output)
        process = context().Process(target=_run, args=call)
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            process.join()
        texts = [Path(output, name) for name in ("stdout", "stderr")]
        printed = [text.read_text(encoding="utf-8") if text.exists() else "" for text in texts]
    return subprocess.CompletedProcess([str(program), *arguments], process.exitcode or 0, *printed)


def _run(
    program: str | Path,
    arguments: Sequence[str],
    folder: Path,
    warnings_are_errors: bool,
    environment: dict[str, str],
    output: str,
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(Path(output, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(encoding=environment.get("PYTHONIOENCODING") or "utf-8")
    if warnings_are_errors:
        _make_errors()
    quick_spawn.install()
    sys.argv = [str(program) if isinstance(program, Path) else "-c", *arguments]
    if isinstance(program, Path):
        sys.path.insert(0, str(program.resolve().parent))
        runpy.run_path(str(program), run_name="__main__")
    else:
        exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})


def _make_errors() -> None:
    """Does what the option ``-W error`` does, here and in processes that this one starts. It comes after the filters of
    packages that are imported, and before those of Python itself."""
    filters = warnings.filters
    assert isinstance(filters, list)
    of_python = ("default", None, DeprecationWarning, "__main__", 0)
    place = filters.index(of_python) if of_python in filters else len(filters)
    filters.insert(place, ("error", None, Warning, None, 0))
    sys.warnoptions.append("error")

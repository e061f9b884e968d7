"""The native CPU library: loading it, and the record that its C ABI takes.

The library holds no torch and no Python, so one build serves every version of both. It is loaded when first needed;
where the package was installed without a C++ compiler it is absent, and `load` says so.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import struct
import sys
from pathlib import Path

from undivided.errors import InputError
from undivided.kernels.cpu import _install

LEVELS = ("generic", "avx2", "avx512", "avx512_bf16", "amx_bf16", "amx")
"""What UNDIVIDED_ISA may name, the lowest first; "amx" has fp16 tiles too."""

# struct Attention in attention.h: all fields 8 bytes wide, in the same order. d marks doubles, the rest are integers.
FIELDS = (
    "size dtype batch heads kv_heads q_len kv_len qk_dim v_dim threads scale softcap "
    "q q_b q_h q_s k k_b k_h k_s v v_b v_h v_s out out_b out_h out_s lse lse_b lse_h "
    "ranges ranges_b columns band first last pages pages_b page_size page_count sinks "
    "bias bias_dtype bias_b bias_h bias_q bias_k dense dense_b dense_h dense_q dense_k "
    "slopes slopes_b slopes_h slopes_q row_position row_position_b key_position key_position_b "
    "dropout seed survivors drop_row drop_row_b drop_sequence drop_sequence_b drop_head"
).split()
RECORD = struct.Struct("".join("d" if name in ("scale", "softcap", "survivors") else "q" for name in FIELDS))
# struct Gradients, all integers
GRADIENT_FIELDS = (
    "size type accumulate attempt grad_out grad_out_b grad_out_h grad_out_s grad_lse grad_lse_b grad_lse_h "
    "dq dq_b dq_h dq_s dk dk_b dk_h dk_s dv dv_b dv_h dv_s sinks slopes rows_b rows_h "
    "bias bias_b bias_h bias_q bias_k"
).split()
GRADIENT_RECORD = struct.Struct("q" * len(GRADIENT_FIELDS))
_EXCEEDED, _MIXED = 3, 4
_PAIRS = 3
"""The attempt at gradients that takes each row with its own keys alone."""
STATUS = {1: "the library belongs to another version of the package", 2: "not enough memory for its tiles"}


def _load_before_a_fork() -> None:
    """The library must see the fork: a child that waits for its parent's OpenMP threads, PyTorch's included, never
    returns."""
    with contextlib.suppress(OSError):
        ctypes.CDLL(str(path()))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_load_before_a_fork)


class Library:
    """The loaded library."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self._forward = library.undivided_forward
        self._forward.argtypes, self._forward.restype = [ctypes.c_char_p], ctypes.c_int
        self._backward = library.undivided_backward
        self._backward.argtypes, self._backward.restype = [ctypes.c_char_p, ctypes.c_char_p], ctypes.c_int
        self._peak = library.undivided_peak
        self._peak.argtypes, self._peak.restype = [ctypes.c_int64, ctypes.c_int64], ctypes.c_double
        library.undivided_level.restype = ctypes.c_char_p
        self.level: str = library.undivided_level().decode()
        """The instruction set in use, one of `LEVELS`."""
        library.undivided_level_name.restype = ctypes.c_char_p
        names = map(library.undivided_level_name, range(len(LEVELS)))
        self.levels = tuple(name.decode() for name in names if name is not None)
        """Those that this processor and this build have, the lowest first."""
        self._is_forked = library.undivided_is_forked

    def forward(self, record: bytes) -> None:
        """Run one problem.

        Raises:
            RuntimeError: it could not.
        """
        _check(self._forward(record))

    def backward(self, record: bytes, gradients: bytes, attempt: int) -> int | None:
        """The next attempt at the gradients of one problem, in fresh buffers; None if they are done.

        An attempt that finds numbers it has no range for is followed by one that has more. One that finds gradients
        that are not finite, in a problem of several documents, is followed by one that keeps the documents apart.

        Raises:
            RuntimeError: it could not.
        """
        status = self._backward(record, gradients)
        if status in (_EXCEEDED, _MIXED):
            return _PAIRS if status == _MIXED else attempt + 1
        _check(status)
        return None

    def is_forked(self) -> bool:
        """Whether this process was forked from one that had imported the package; its team of threads is not PyTorch's
        then."""
        return bool(self._is_forked())

    def peak(self, dtype: int, repeats: int) -> float:
        """Run independent multiply-adds on one core; how many operations it were, for the caller to time."""
        return float(self._peak(dtype, repeats))


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"the native kernel failed: {STATUS.get(status, status)}")


def path() -> Path:
    """Where the library lies: beside this file."""
    return Path(__file__).with_name("libundivided_cpu" + (".dll" if sys.platform == "win32" else ".so"))


@functools.cache
def load() -> Library | str:
    """The library, or why there is none.

    Raises:
        InputError: UNDIVIDED_ISA is not the name of a level.
    """
    wanted = os.environ.get("UNDIVIDED_ISA")
    if wanted and wanted not in LEVELS:
        raise InputError("UNDIVIDED_ISA", f"be one of {', '.join(LEVELS)}", repr(wanted), "unset it for the highest")
    found = path()
    if not found.exists():
        return _install.not_built()
    try:
        library = Library(found)
    except (OSError, AttributeError) as error:
        return f"the native kernel does not load ({error}); build it again: {_install.command()}"
    if wanted and wanted not in library.levels:
        return f"UNDIVIDED_ISA={wanted} (this processor and this build have {', '.join(library.levels)})"
    return library

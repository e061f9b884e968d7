"""The native CPU library: loading it, and the record that its C ABI takes.

The library holds no torch and no Python, so one build serves every version of both. It is loaded when first needed; where
the package was installed without a C++ compiler it is absent, and `load` says so.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import sys
from pathlib import Path

NOT_BUILT = "the native kernel is not built (needs a C++ compiler at install)"
HOW_TO_GET = "install a C++ compiler (g++ or clang), then: pip install --force-reinstall --no-deps undivided"

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
_EXCEEDED = 3
ATTEMPTS = range(3)
"""Of gradients: one that finds numbers it has no range for is followed by one that has more."""
STATUS = {1: "the library belongs to another version of the package", 2: "not enough memory for its tiles"}

_forked = False
"""A team of threads does not survive a fork: waiting for it would never end, so a child works alone."""


def _after_fork() -> None:
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


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
        """The instruction set in use: generic, avx2, avx512, avx512_bf16, amx_bf16 or amx (with fp16)."""

    def forward(self, record: bytes) -> None:
        """Run one problem.

        Raises:
            RuntimeError: it could not.
        """
        _check(self._forward(record))

    def backward(self, record: bytes, gradients: bytes) -> bool:
        """The gradients of one problem; False where they have to be computed again, by the next attempt and in fresh buffers.

        Raises:
            RuntimeError: it could not.
        """
        status = self._backward(record, gradients)
        if status == _EXCEEDED:
            return False
        _check(status)
        return True

    def peak(self, dtype: int, repeats: int) -> float:
        """Run independent multiply-adds on one core; how many operations it were, for the caller to time."""
        return float(self._peak(dtype, repeats))


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"the native kernel failed: {STATUS.get(status, status)}")


def threads(wanted: int) -> int:
    """How many threads may work here."""
    return 1 if _forked else wanted


def path() -> Path:
    """Where the library lies: beside this file."""
    return Path(__file__).with_name("libundivided_cpu" + (".dll" if sys.platform == "win32" else ".so"))


@functools.cache
def load() -> Library | str:
    """The library, or why there is none."""
    found = path()
    if not found.exists():
        return NOT_BUILT
    try:
        return Library(found)
    except (OSError, AttributeError) as error:
        return f"the native kernel does not load ({error})"

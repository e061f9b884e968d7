"""The native CPU library: how it is loaded, and the records that its C ABI takes.

The library contains no torch and no Python, so one build serves every version of both. It is loaded when it is first
needed. If the package was installed without a C++ compiler, the library is missing, and `load` returns why.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import struct
import sys
import warnings
from pathlib import Path

import torch

from undivided.errors import InputError
from undivided.kernels.cpu import _install
from undivided.kernels.cpu._openmp import share_runtime

LEVELS = ("generic", "avx2", "avx512", "avx512_bf16", "amx_bf16", "amx", "neon", "neon_bf16")
"""The levels that UNDIVIDED_ISA can name: x86's, the lowest first ("amx" has fp16 tiles too), then ARM's."""

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The number of each dtype in the records; those of quantised formats are `quantization.FORMAT_CODES`."""

# struct Attention in abi/attention.h: the same fields in the same order, each 8 bytes wide
FIELDS = (
    "size dtype batch heads kv_heads q_len kv_len qk_dim v_dim threads scale softcap "
    "q q_b q_h q_s k k_b k_h k_s v v_b v_h v_s out out_b out_h out_s lse lse_b lse_h "
    "ranges ranges_b columns band band_start band_stop pages pages_b page_size page_count sinks "
    "bias bias_dtype bias_b bias_h bias_q bias_k dense dense_b dense_h dense_q dense_k "
    "dense_from dense_from_b dense_keys dense_origin "
    "slopes slopes_b slopes_h slopes_q row_position row_position_b key_position key_position_b "
    "dropout seed survivor_scale dropout_row dropout_row_b dropout_sequence dropout_sequence_b dropout_head "
    "batch_invariant first_key first_key_b "
    "format k_scale k_scale_b k_scale_h k_scale_s v_scale v_scale_b v_scale_h v_scale_s"
).split()
DOUBLES = ("scale", "softcap", "survivor_scale")
"""The fields that are doubles; the others are integers and pointers."""
RECORD = struct.Struct("".join("d" if name in DOUBLES else "q" for name in FIELDS))
# struct Gradients in abi/attention.h: integers and pointers
GRADIENT_FIELDS = (
    "size type accumulate attempt grad_out grad_out_b grad_out_h grad_out_s grad_lse grad_lse_b grad_lse_h "
    "dq dq_b dq_h dq_s dk dk_b dk_h dk_s dv dv_b dv_h dv_s sinks slopes rows_b rows_h "
    "bias bias_b bias_h bias_q bias_k"
).split()
GRADIENT_RECORD = struct.Struct("q" * len(GRADIENT_FIELDS))
# struct Append in abi/attention.h: integers and pointers
APPEND_FIELDS = (
    "size dtype format threads batch length kv_heads k_dim v_dim rows first_row page_rows row_count "
    "k k_b k_h k_s v v_b v_h v_s k_pool v_pool k_scale v_scale"
).split()
APPEND_RECORD = struct.Struct("q" * len(APPEND_FIELDS))
_OUT_OF_RANGE, _NON_FINITE = 3, 4  # of enum Status in abi/attention.h
_PAIRWISE = 3
"""The attempt at gradients that computes each row with its own keys only."""
STATUS = {
    1: "an argument is out of range, or the library belongs to another version of the package",
    2: "not enough memory for its scratch buffers",
}


def _load_before_a_fork() -> None:
    """Load the library, which then registers a fork handler. Without the handler, a child would wait forever for the
    OpenMP threads of its parent, PyTorch's included."""
    with contextlib.suppress(OSError):
        share_runtime()
        ctypes.CDLL(str(path()))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_load_before_a_fork)


class Library:
    """The loaded library."""

    def __init__(self, path: Path) -> None:
        share_runtime()
        library = ctypes.CDLL(str(path))
        self._forward = library.undivided_forward
        self._forward.argtypes, self._forward.restype = [ctypes.c_char_p], ctypes.c_int
        self._backward = library.undivided_backward
        self._backward.argtypes, self._backward.restype = [ctypes.c_char_p, ctypes.c_char_p], ctypes.c_int
        self._append = library.undivided_append
        self._append.argtypes, self._append.restype = [ctypes.c_char_p], ctypes.c_int
        self._peak = library.undivided_peak
        self._peak.argtypes, self._peak.restype = [ctypes.c_int64, ctypes.c_int64], ctypes.c_double
        self._shared_keys = library.undivided_shared_keys
        self._shared_keys.argtypes = [ctypes.c_char_p, ctypes.POINTER(ctypes.c_int64), ctypes.c_int64]
        self._shared_keys.restype = ctypes.c_int64
        library.undivided_level.restype = ctypes.c_char_p
        self.level: str = library.undivided_level().decode()
        """The instruction set in use, one of `LEVELS`."""
        library.undivided_level_name.restype = ctypes.c_char_p
        names = map(library.undivided_level_name, range(len(LEVELS)))
        self.levels = tuple(name.decode() for name in names if name is not None)
        """The levels that this processor and this build have, the lowest first."""
        library.undivided_lost_level.restype = ctypes.c_char_p
        lost = library.undivided_lost_level()
        self.lost_level: str | None = None if lost is None else lost.decode()
        """Why a higher level of this processor cannot be used; None if the highest can."""
        self.has_openmp = bool(library.undivided_has_openmp())
        """Whether its threads are those of PyTorch's OpenMP runtime; otherwise they are its own."""
        self._is_forked = library.undivided_is_forked

    def forward(self, record: bytes) -> None:
        """Run one problem.

        Raises:
            RuntimeError: the kernel failed, for example because there was not enough memory.
        """
        if status := self._forward(record):
            _check(status)

    def backward(self, record: bytes, gradients: bytes, attempt: int) -> int | None:
        """Run one attempt at the gradients of one problem. Returns the number of the attempt to make next, into fresh
        buffers if gradients accumulate, or None if the gradients are valid.

        If numbers do not fit the range of this attempt, the next one has a wider range. If gradients are NaN, perhaps
        because of pairs that the mask hides, the next attempt computes each row with its own keys only.

        Raises:
            RuntimeError: the kernel failed, for example because there was not enough memory.
        """
        status = self._backward(record, gradients)
        if status in (_OUT_OF_RANGE, _NON_FINITE):
            return _PAIRWISE if status == _NON_FINITE else attempt + 1
        _check(status)
        return None

    def append(self, record: bytes) -> None:
        """Write the new tokens of one `APPEND_RECORD` to a cache.

        Raises:
            RuntimeError: the kernel failed, and wrote nothing.
        """
        if status := self._append(record):
            _check(status)

    def shared_keys(self, record: bytes | None) -> list[tuple[int, int, int]]:
        """(sequences, first key, keys) of the keys that a forward reads once for several sequences, the first 16; None:
        those of this thread's last forward."""
        limit = 16
        found = (ctypes.c_int64 * (3 * limit))()
        count = min(self._shared_keys(record, found, limit), limit)
        return [(found[3 * i], found[3 * i + 1], found[3 * i + 2]) for i in range(count)]

    def is_forked(self) -> bool:
        """Whether this process was forked from one that had imported the package: its threads are not PyTorch's."""
        return bool(self._is_forked())

    def peak(self, dtype: int, repeats: int) -> float:
        """The number of operations of independent multiply-adds on one core, for the caller to time."""
        return float(self._peak(dtype, repeats))


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"the native kernel failed: {STATUS.get(status, status)}")


def path() -> Path:
    """The path of the library, which is beside this file."""
    return Path(__file__).with_name("libundivided_cpu" + (".dll" if sys.platform == "win32" else ".so"))


@functools.cache
def load() -> Library | str:
    """The library, or the reason why it is missing.

    Raises:
        InputError: UNDIVIDED_ISA does not name a level.
    """
    requested = os.environ.get("UNDIVIDED_ISA")
    if requested and requested not in LEVELS:
        raise InputError("UNDIVIDED_ISA", f"be one of {', '.join(LEVELS)}", repr(requested), "unset it for the fastest")
    file = path()
    if not file.exists():
        return _install.not_built()
    try:
        library = Library(file)
    except (OSError, AttributeError) as error:
        return f"the native kernel does not load ({error}); build it again: {_install.command()}"
    if requested and requested not in library.levels:
        return f"UNDIVIDED_ISA={requested} (this processor and this build have {', '.join(library.levels)})"
    return library


@functools.cache
def warn_if_slower() -> None:
    """Warn, once per process, if calls run slower than this processor allows: without the library, or because the build
    or the system denies a level. A lower level that UNDIVIDED_ISA names, and has, is no reason to warn."""
    library = load()
    if isinstance(library, str):
        lost = f"calls on the CPU run on PyTorch's kernels, which are slower: {library}"
    elif library.lost_level and not os.environ.get("UNDIVIDED_ISA"):
        lost = f"the native kernel runs at level {library.level}, slower than it could: {library.lost_level}"
    else:
        return
    warnings.warn(lost, RuntimeWarning, stacklevel=2)

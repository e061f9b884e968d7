"""The default order of the backends: one table of ranks, used if nothing was measured (`undivided.selection.measured`).

Lower is first. A backend that is not in the table, such as one of another package, has a rank of its own
(`Backend.rank`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from undivided.backends._base import Backend
from undivided.backends.shared.kernel_inputs import MAY_HOLD_GARBAGE
from undivided.machine import Machine, Version
from undivided.request.problem import Problem


class _Ranks(NamedTuple):
    """The ranks of a backend where flash comes before cuDNN, and where cuDNN comes first."""

    flash_first: float
    cudnn_first: float


# Sources:
# - sm90 and sm10x: PyTorch puts cuDNN before flash if cuDNN is later than 9.15.0 (aten, cuda/sdp_utils.cpp,
#   check_prefer_cudnn_attention), and TransformerEngine drops flash if cuDNN can run (get_attention_backend).
# - elsewhere flash first: PyTorch's default order, and TransformerEngine's below sm90.
# - the flash-attn package before PyTorch's copy of the same kernel, which is older; efficient after flash, which is
#   "universally faster" (sdp_utils.cpp).
# - flex after the other kernels, because it is the most general; the reference last.
_RANKS = {
    "native": _Ranks(10, 10),
    "flash_attn": _Ranks(10, 14),
    "torch_flash": _Ranks(12, 16),
    "torch_cudnn": _Ranks(16, 12),
    "cudnn": _Ranks(18, 10),
    "torch_efficient": _Ranks(40, 40),
    "triton": _Ranks(50, 50),
    "flex": _Ranks(60, 60),
    "reference": _Ranks(100, 100),
}
_CUDNN_FIRST_AFTER: Version = (9, 15, 0)

_TORCH_FLASH_ON_CPU = 20
_NATIVE_TINY = 25
"""After `torch_flash`: for problems so small that calling PyTorch's operator costs less (`_is_tiny`)."""
_TORCH_CUDNN_SMALL = 9
"""For small problems where cuDNN is first: PyTorch's operator calls the kernels that `cudnn` calls
from Python. A causal call of 128 tokens took the host 67 us, through `cudnn` 116, and 613 and 1089 with its gradient
(H200)."""
_TORCH_CUDNN_DOCUMENTS = 55
"""For packed documents: with 3 of them it takes the host 48 ms per call, torch_flash 0.17 ms (H200, PyTorch 2.11)."""
_TRITON_PADDED = 8
"""On sm90, if tokens may lie outside all sequences: it neither copies inputs to clear them, as for cuDNN,
nor clears rows of the output. Measured on an H100, 16 causal documents of 1024 tokens, 16 heads of 128: 0.21 ms, with
cuDNN 0.77 ms (its kernel alone 0.17), with torch_flash 0.44 ms (0.33)."""


def default_rank(backend: Backend, problem: Problem, machine: Machine) -> float:
    """The default rank of a backend for a problem on a machine: backends are tried from the lowest to the highest."""
    name = backend.name
    if name not in _RANKS:
        return backend.rank(problem, machine)
    is_cudnn_first = _is_cudnn_first(machine)
    if name == "native" and _is_tiny(problem):
        return _NATIVE_TINY
    if name == "torch_flash" and problem.device != "cuda":
        return _TORCH_FLASH_ON_CPU
    if name == "torch_cudnn" and problem.documents is not None:
        return _TORCH_CUDNN_DOCUMENTS
    if name == "torch_cudnn" and is_cudnn_first and _is_small(problem):
        return _TORCH_CUDNN_SMALL
    if name == "triton" and _is_padded_on_hopper(problem, machine):
        return _TRITON_PADDED
    return _RANKS[name].cudnn_first if is_cudnn_first else _RANKS[name].flash_first


def _is_cudnn_first(machine: Machine) -> bool:
    capability, cudnn = machine.compute_capability, machine.version("cudnn")
    return capability is not None and capability[0] in (9, 10) and cudnn is not None and cudnn > _CUDNN_FIRST_AFTER


def _is_padded_on_hopper(problem: Problem, machine: Machine) -> bool:
    is_hopper = machine.compute_capability is not None and machine.compute_capability[0] == 9
    return is_hopper and problem.q_len > 1 and bool(problem.mask.kinds & MAY_HOLD_GARBAGE)


_SMALL = 2e10
"""Floating-point operations of a forward, without a mask, that takes the GPU less time than the host takes to call it:
about 40 us."""


def _is_small(problem: Problem) -> bool:
    """Whether the host's time decides: few pairs of queries and keys, not decoded."""
    pairs = problem.batch * problem.heads << _bits(problem.q_len) << _bits(problem.kv_len)
    return problem.q_len > 1 and 2 * pairs * (problem.qk_dim + problem.v_dim) < _SMALL


_TINY_RECORDED, _FEW_HEADS = 1 << 19, 32
"""torch_flash runs plain fp32 problems with gradients of at most so many multiply-adds, and heads of all sequences:
PyTorch's autograd records its own operator in C++, which saves about 25 us per call.

Time of forward and backward divided by PyTorch's, Granite Rapids, one thread, by batch x heads x tokens x D:
1x1x16x64 (2^15) 1.4, 1x8x16x32 (2^17) 1.1, 1x8x32x64 (2^20) 0.95, 8x32x1x64 (2^15) 0.8."""

_TINY_RECORDED_16, _FEW_ROWS = 1 << 13, 8
"""The same for 16-bit types, in multiply-adds and in rows of all heads and sequences; PyTorch's gradients of these are
slow. Times as above: bf16 1x1x1x64 1.3, 1x1x8x64 (2^13) 1.1, 1x1x8x128 (2^14) 0.5, 1x8x1x64 1.2, 1x8x2x64 0.9,
1x32x1x64 1.05, 8x32x1x64 0.6; fp16 the same except 1x32x1x64 0.7."""


def _is_tiny(problem: Problem) -> bool:
    """Whether PyTorch's recorded operator runs, and takes less time than our kernel and the Python of its gradients."""
    if problem.features != {"backward"} or problem.heads != problem.kv_heads:
        return False
    if problem.mask.kinds and (problem.mask.kinds != {"causal"} or problem.align != "both"):
        return False
    heads = problem.batch * problem.heads
    q_bits, kv_bits = _bits(problem.q_len), _bits(problem.kv_len)
    work = (heads << q_bits << kv_bits) * (problem.qk_dim + problem.v_dim)
    if problem.dtype != torch.float32:
        return heads << max(q_bits, kv_bits) <= _FEW_ROWS and work <= _TINY_RECORDED_16
    return heads <= _FEW_HEADS and work <= _TINY_RECORDED


def _bits(length: int) -> int:
    """The exponent of a length rounded up to a power of two: no rank may read more of a length (`Backend.reasons`)."""
    return (length - 1).bit_length()

"""The CUDA half of `torch_flash`: PyTorch's copy of FlashAttention-2, called below SDPA.

SDPA refuses its causal flag for unequal lengths because the kernel is bottom-right; called directly, bottom-right is what
one gets. Also reached here and not through SDPA: windows, packed documents, ALiBi, the log-sum-exp.

Source of the limits: PyTorch, aten/src/ATen/native/transformers/cuda (sdp_utils.cpp, attention_backward.cu) and
flash_attn/flash_api.cpp; torch/nn/attention/varlen.py for packed tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from undivided import _layout
from undivided._machine import Machine
from undivided._problem import Operands, Problem
from undivided._result import Result
from undivided.backends import _gpu
from undivided.backends._base import Gradients, Limits, limit_reasons

OPS = torch.ops.aten

LIMITS = Limits(
    devices=frozenset({"cuda"}),
    dtypes=_gpu.HALF,
    max_head_dim=256,
    head_dim_multiple=8,
    masks=frozenset({"causal", "window", "documents"}),
    alignments=frozenset({"bottom_right"}),
    features=frozenset({"backward", "gqa", "lse", "alibi"}),
    compute_capability=((8, 0), (12, 1)),
    packages=(("torch", (2, 6), None),),
    notes={
        "dropout": "it draws its own pattern",
        "softcap": "PyTorch's operator has no argument for it",
        "lse_grad": "PyTorch's operator returns lse as a constant",
        "lengths": "PyTorch's operator takes lengths of packed tokens only",
    },
)


def reasons(problem: Problem, machine: Machine) -> list[str]:
    """Every reason why PyTorch's flash kernel cannot run this on CUDA."""
    found = (
        limit_reasons(LIMITS, problem, machine)
        + _gpu.hip_reasons(problem, machine)
        + _gpu.size_reasons(problem)
    )
    if {"alibi", "backward"} <= problem.features:
        found.append("gradients with ALiBi slopes (PyTorch's backward operator has no argument for them)")
    return found + _gpu.large_head_reasons(problem, machine)


def rank(problem: Problem, machine: Machine) -> float:
    """Where it stands in the order to try."""
    return _gpu.rank("torch_flash", machine)


def forward(problem: Problem, operands: Operands) -> Result:
    """Attention by ``aten::_flash_attention_forward``."""
    causal, left, right = _gpu.flash_band(operands)
    slopes = operands.alibi_slopes
    form = operands.normal_form(problem) if _gpu.has_rows_without_keys(problem) else None
    q, k, v = _gpu.views(problem, operands)
    packing = _pack(problem, operands)
    out, lse, *_ = OPS._flash_attention_forward(
        q, k, v, *packing, 0.0, causal, False, scale=operands.scale, window_size_left=left, window_size_right=right,
        alibi_slopes=None if slopes is None else slopes.float().contiguous(),
    )  # fmt: skip
    if packing[0] is not None:
        out, lse = out.unsqueeze(0), lse.unsqueeze(0)
    return Result(*_gpu.settle(out, lse, form))


def backward(
    problem: Problem, operands: Operands, result: Result, grad_out: Tensor, grad_lse: Tensor | None
) -> Gradients:
    """Gradients by ``aten::_flash_attention_backward``."""
    causal, left, right = _gpu.flash_band(operands)
    q, k, v = _gpu.views(problem, operands)
    packing = _pack(problem, operands)
    out, grad, lse = result.out, _layout.canonical(grad_out, problem.layout), _gpu.for_kernel(result.lse)
    packed = packing[0] is not None
    if packed:
        out, grad, lse = out[0], grad[0], lse[0]
    # without dropout the random state is not read, but the schema wants two tensors
    unused = (
        torch.zeros(2, dtype=torch.uint64, device=q.device),
        torch.zeros(0, dtype=torch.uint64, device=q.device),
    )
    with _gpu.deterministic(problem):
        grads = OPS._flash_attention_backward(
            grad.contiguous(), q, k, v, out.contiguous(), lse, *packing, 0.0, causal, *unused,
            scale=operands.scale, window_size_left=left, window_size_right=right,
        )  # fmt: skip
    if packed:
        grads = [
            _clear_tail(g, cu).unsqueeze(0)
            for g, cu in zip(grads, (packing[0], *[packing[1]] * 2), strict=True)
        ]
    dq, dk, dv = (_layout.restore(g, problem.layout) for g in grads)
    return dq, dk, dv, None, None, None


_Packing = tuple[Tensor | None, Tensor | None, int, int]


def _pack(problem: Problem, operands: Operands) -> _Packing:
    """(cu_q, cu_k, max_q, max_k); no cumulative lengths for dense sequences."""
    found = _gpu.packing(problem, operands)
    if not found:
        return None, None, problem.q_len, problem.kv_len
    return found["cu_seqlens_q"], found["cu_seqlens_k"], found["max_seqlen_q"], found["max_seqlen_k"]


def _clear_tail(grad_THD: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Tokens after the last document: the kernel leaves their gradient unwritten."""
    assert cu_seqlens is not None
    tail = torch.arange(grad_THD.shape[0], device=grad_THD.device) >= cu_seqlens[-1]
    return grad_THD.masked_fill_(tail[:, None, None], 0.0)

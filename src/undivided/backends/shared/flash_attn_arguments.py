"""Arguments and results in the convention of flash-attn, which PyTorch's operators follow.

Legend: B batch, S sequence, H heads, D head size, T tokens of packed documents.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from undivided.arguments import layout
from undivided.backends.shared.documents import as_offsets, packed_documents
from undivided.backends.shared.empty_rows import fix_empty_rows
from undivided.backends.shared.kernel_inputs import clean_gradient
from undivided.backends.shared.log_sum_exp import lse_for_backward
from undivided.request.call import Call
from undivided.request.request import Tensors
from undivided.request.result import Result


def flash_attn_band(call: Call) -> tuple[bool, int, int]:
    """(causal, left, right) in the convention of flash-attn: -1 is unbounded, causal is the window (-1, 0)."""
    left, right = call.mask.band
    return (left is None and right == 0), -1 if left is None else left, -1 if right is None else right


def score_arguments(call: Call, causal_name: str = "causal") -> dict[str, Any]:
    """The scale, the band and the softcap, as flash-attn 2 and 3 name them; causal_name: of the causal flag."""
    causal, left, right = flash_attn_band(call)
    return {
        "softmax_scale": call.scale,
        causal_name: causal,
        "window_size_left": left,
        "window_size_right": right,
        "softcap": call.softcap or 0.0,
    }


def packing_arguments(call: Call, tensors: Tensors) -> dict[str, Any]:
    """Cumulative and longest lengths of packed documents, as flash-attn names them; empty for dense sequences."""
    problem = call.problem
    packed = packed_documents(call)
    if packed is None:
        return {}
    max_q, max_k = problem.longest_lengths
    cu_q, cu_k = as_offsets(packed.cu_seqlens_q, tensors.q), as_offsets(packed.cu_seqlens_kv, tensors.q)
    return {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": max_q, "max_seqlen_k": max_k}


def kernel_result(call: Call, tensors: Tensors, out: Tensor, lse: Tensor) -> Result:
    """The result of a forward kernel, from out [B, S, H, D] and lse [B, H, S], or of packed documents [T, H, D] and
    [H, T]."""
    if "documents" in call.problem.mask.kinds:
        out, lse = out.unsqueeze(0), lse.unsqueeze(0)
    return fix_empty_rows(call, tensors, out, lse).in_layout(call.problem.layout)


def for_backward(
    call: Call, tensors: Tensors, result: Result, grad_out: Tensor, *, own_tokens: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """(grad_out, out, lse) for a backward kernel: shapes as in `kernel_result`, lse as in `lse_for_backward`, grad_out
    as in `clean_gradient`."""
    views = (
        clean_gradient(call, tensors, layout.canonical(grad_out, call.problem.layout), own_tokens=own_tokens),
        layout.canonical(result.out, call.problem.layout),
        lse_for_backward(result.lse),
    )
    if "documents" not in call.problem.mask.kinds:
        return views
    grad, out, lse = views
    return grad[0], out[0], lse[0]


def in_callers_layout(call: Call, gradients: Iterable[Tensor]) -> list[Tensor]:
    """The gradients of q, k and v in the problem's layout, from a kernel's [B, S, H, D] or [T, H, D]."""
    if "documents" in call.problem.mask.kinds:
        gradients = [gradient.unsqueeze(0) for gradient in gradients]
    return [layout.from_canonical(gradient, call.problem.layout) for gradient in gradients]

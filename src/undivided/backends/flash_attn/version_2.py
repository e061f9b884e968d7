"""Calls of flash-attn 2. The package's own autograd is not used: forward and backward are called one by one."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from undivided.arguments import layout
from undivided.backends._base import Gradients
from undivided.backends.shared.documents import as_offsets, sequence_lengths
from undivided.backends.shared.empty_rows import fix_empty_rows, has_rows_without_keys
from undivided.backends.shared.flash_attn_arguments import flash_attn_band, packing_arguments
from undivided.backends.shared.kernel_inputs import aligned_views
from undivided.backends.shared.log_sum_exp import lse_for_backward
from undivided.request.call import Call
from undivided.request.request import Tensors
from undivided.request.result import Result


def _package() -> Any:
    return importlib.import_module("flash_attn.flash_attn_interface")


def forward(call: Call, tensors: Tensors) -> Result:
    """Dense, packed, or on a cache with lengths and pages."""
    problem = call.problem
    if call.pages is not None or problem.mask.kinds & {"lengths"}:
        return _with_cache(call, tensors)
    settings, cu = _settings(call, tensors), packing_arguments(call, tensors)
    form = call.normal_form(tensors.q) if has_rows_without_keys(problem) else None
    q, k, v = aligned_views(call, tensors)
    if cu:
        out, lse, *_ = _package()._flash_attn_varlen_forward(q, k, v, **cu, **settings, return_softmax=False)
        out, lse = out.unsqueeze(0), lse.unsqueeze(0)
    else:
        out, lse, *_ = _package()._flash_attn_forward(q, k, v, **settings, return_softmax=False)
    return Result(*fix_empty_rows(problem, out, lse, form)).in_layout(call.problem.layout)


def backward(call: Call, tensors: Tensors, result: Result, grad_out: Tensor, grad_lse: Tensor | None) -> Gradients:
    """Gradients of q, k and v. The buffers start at zero because the kernel never writes tokens outside documents."""
    problem = call.problem
    settings, cu = _settings(call, tensors), packing_arguments(call, tensors)
    settings |= {"deterministic": problem.deterministic, "rng_state": None}
    q, k, v = aligned_views(call, tensors)
    grad, out, lse = (
        layout.canonical(grad_out, problem.layout),
        layout.canonical(result.out, problem.layout),
        lse_for_backward(result.lse),
    )
    if cu:
        grad, out, lse = grad[0], out[0], lse[0]
    grads = [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (q, k, v)]
    run = _package()._flash_attn_varlen_backward if cu else _package()._flash_attn_backward
    run(grad.contiguous(), q, k, v, out, lse, *grads, **cu, **settings)
    dq, dk, dv = (layout.restore(g.unsqueeze(0) if cu else g, problem.layout) for g in grads)
    return dq, dk, dv, None, None, None


def _with_cache(call: Call, tensors: Tensors) -> Result:
    """Attention to a key/value cache with lengths, a block table, or both; no gradients."""
    problem = call.problem
    causal, left, right = flash_attn_band(call)
    lengths = sequence_lengths(call)
    assert lengths is not None, "a paged problem carries the lengths"
    paged = call.pages is not None
    q = layout.canonical(tensors.q, problem.layout)
    k, v = (t if paged else layout.canonical(t, problem.layout) for t in (tensors.k, tensors.v))
    out, lse = _package().flash_attn_with_kvcache(
        q,
        k,
        v,
        cache_seqlens=as_offsets(lengths.kv, q),
        block_table=call.pages,
        softmax_scale=call.scale,
        causal=causal,
        window_size=(left, right),
        softcap=call.softcap or 0.0,
        alibi_slopes=_slopes(tensors),
        return_softmax_lse=True,
    )
    fixed = fix_empty_rows(call.problem, out, lse, call.normal_form(tensors.q))
    return Result(*fixed).in_layout(call.problem.layout)


def _settings(call: Call, tensors: Tensors) -> dict[str, Any]:
    causal, left, right = flash_attn_band(call)
    return {
        "dropout_p": 0.0,
        "softmax_scale": call.scale,
        "causal": causal,
        "window_size_left": left,
        "window_size_right": right,
        "softcap": call.softcap or 0.0,
        "alibi_slopes": _slopes(tensors),
    }


def _slopes(tensors: Tensors) -> Tensor | None:
    return None if tensors.alibi_slopes is None else tensors.alibi_slopes.float().contiguous()

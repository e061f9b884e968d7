"""Calls of flash-attn 2. The package's own autograd is not used: forward and backward are called one by one."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from undivided.arguments import layout
from undivided.backends._base import Gradients
from undivided.backends.shared.documents import as_offsets, sequence_lengths
from undivided.backends.shared.flash_attn_arguments import (
    flash_attn_band,
    for_backward,
    in_callers_layout,
    kernel_result,
    packing_arguments,
    score_arguments,
)
from undivided.backends.shared.kernel_inputs import clean_views
from undivided.request.call import Call
from undivided.request.request import Tensors
from undivided.request.result import Result


def _package() -> Any:
    return importlib.import_module("flash_attn.flash_attn_interface")


def forward(call: Call, tensors: Tensors) -> Result:
    """Dense, packed, or on a cache with lengths and pages."""
    if call.pages is not None or "lengths" in call.problem.mask.kinds:
        return _with_cache(call, tensors)
    cu = packing_arguments(call, tensors)
    run = _package()._flash_attn_varlen_forward if cu else _package()._flash_attn_forward
    settings = cu | _settings(call, tensors)
    out, lse, *_ = run(*clean_views(call, tensors, own_tokens=True), **settings, return_softmax=False)
    return kernel_result(call, tensors, out, lse)


def backward(call: Call, tensors: Tensors, result: Result, grad_out: Tensor, grad_lse: Tensor | None) -> Gradients:
    """Gradients of q, k and v. The buffers start at zero because the kernel never writes tokens outside documents."""
    settings, cu = _settings(call, tensors), packing_arguments(call, tensors)
    settings |= {"deterministic": call.problem.deterministic, "rng_state": None}
    q, k, v = clean_views(call, tensors, own_tokens=True)
    grad, out, lse = for_backward(call, tensors, result, grad_out, own_tokens=True)
    grads = [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (q, k, v)]
    run = _package()._flash_attn_varlen_backward if cu else _package()._flash_attn_backward
    run(grad.contiguous(), q, k, v, out, lse, *grads, **cu, **settings)
    return [*in_callers_layout(call, grads), None, None, None]


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
    return kernel_result(call, tensors, out, lse)


def _settings(call: Call, tensors: Tensors) -> dict[str, Any]:
    return {"dropout_p": 0.0, **score_arguments(call), "alibi_slopes": _slopes(tensors)}


def _slopes(tensors: Tensors) -> Tensor | None:
    return None if tensors.alibi_slopes is None else tensors.alibi_slopes.float().contiguous()

"""Calls of flash-attn 3 (Hopper). Its tile loads (TMA) cross document ends, so garbage after them is cleared first."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from undivided.arguments import layout
from undivided.backends._base import Gradients
from undivided.backends.shared.empty_rows import fix_empty_rows, has_rows_without_keys
from undivided.backends.shared.flash_attn_arguments import flash_attn_band, packing_arguments
from undivided.backends.shared.kernel_inputs import clean_views
from undivided.backends.shared.log_sum_exp import lse_for_backward
from undivided.request.call import Call
from undivided.request.request import Tensors
from undivided.request.result import Result


def _package() -> Any:
    """The interface: a module of the package, or a top-level module in older builds."""
    try:
        return importlib.import_module("flash_attn_3.flash_attn_interface")
    except ImportError:
        return importlib.import_module("flash_attn_interface")


def forward(call: Call, tensors: Tensors) -> Result:
    """Dense or packed."""
    problem = call.problem
    form = call.normal_form(tensors.q) if has_rows_without_keys(problem) else None
    q, k, v = clean_views(call, tensors)
    cu = packing_arguments(call, tensors)
    out, lse, *_ = _package()._flash_attn_forward(q, k, v, **cu, **_settings(call, "causal"))
    if cu:
        out, lse = out.unsqueeze(0), lse.unsqueeze(0)
    return Result(*fix_empty_rows(problem, out, lse, form)).in_layout(call.problem.layout)


def backward(call: Call, tensors: Tensors, result: Result, grad_out: Tensor, grad_lse: Tensor | None) -> Gradients:
    """Gradients of q, k and v, into buffers that start at zero."""
    problem = call.problem
    q, k, v = clean_views(call, tensors)
    cu = packing_arguments(call, tensors)
    grad, out, lse = (
        layout.canonical(grad_out, problem.layout),
        layout.canonical(result.out, problem.layout),
        lse_for_backward(result.lse),
    )
    if cu:
        grad, out, lse = grad[0], out[0], lse[0]
    grads = {
        name: torch.zeros_like(t, memory_format=torch.contiguous_format)
        for name, t in (("dq", q), ("dk", k), ("dv", v))
    }
    _package()._flash_attn_backward(
        grad.contiguous(),
        q,
        k,
        v,
        out,
        lse,
        **cu,
        **grads,
        **_settings(call, "is_causal"),
        deterministic=problem.deterministic,
    )
    dq, dk, dv = (layout.restore(g.unsqueeze(0) if cu else g, problem.layout) for g in grads.values())
    return dq, dk, dv, None, None, None


def _settings(call: Call, causal_name: str) -> dict[str, Any]:
    causal, left, right = flash_attn_band(call)
    return {
        "softmax_scale": call.scale,
        causal_name: causal,
        "window_size_left": left,
        "window_size_right": right,
        "softcap": call.softcap or 0.0,
    }

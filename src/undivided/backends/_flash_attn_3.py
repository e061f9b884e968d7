"""Calls of flash-attn 3 (Hopper). Its tensor-memory loads cross document ends, so garbage after them is cleared
first."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from undivided import _layout
from undivided._problem import Operands, Problem
from undivided._result import Result
from undivided.backends import _gpu
from undivided.backends._base import Gradients


def _package() -> Any:
    """The interface lies inside the package, or beside it in older builds."""
    try:
        return importlib.import_module("flash_attn_3.flash_attn_interface")
    except ImportError:
        return importlib.import_module("flash_attn_interface")


def forward(problem: Problem, operands: Operands) -> Result:
    """Dense or packed."""
    form = operands.normal_form(problem) if _gpu.has_rows_without_keys(problem) else None
    q, k, v = _gpu.cleaned_views(problem, operands)
    cu = _gpu.packing(problem, operands)
    out, lse, *_ = _package()._flash_attn_forward(q, k, v, **cu, **_settings(operands, "causal"))
    if cu:
        out, lse = out.unsqueeze(0), lse.unsqueeze(0)
    return Result(*_gpu.settle(out, lse, form))


def backward(
    problem: Problem, operands: Operands, result: Result, grad_out: Tensor, grad_lse: Tensor | None
) -> Gradients:
    """Gradients of q, k and v, into buffers that start at zero."""
    q, k, v = _gpu.cleaned_views(problem, operands)
    cu = _gpu.packing(problem, operands)
    grad, out, lse = _layout.canonical(grad_out, problem.layout), result.out, _gpu.for_kernel(result.lse)
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
        **_settings(operands, "is_causal"),
        deterministic=problem.deterministic,
    )
    dq, dk, dv = (_layout.restore(g.unsqueeze(0) if cu else g, problem.layout) for g in grads.values())
    return dq, dk, dv, None, None, None


def _settings(operands: Operands, causal_name: str) -> dict[str, Any]:
    causal, left, right = _gpu.flash_band(operands)
    return {
        "softmax_scale": operands.scale,
        causal_name: causal,
        "window_size_left": left,
        "window_size_right": right,
        "softcap": operands.softcap or 0.0,
    }

"""Calls of flash-attn 3 (Hopper). Its tile loads (TMA) cross document ends, so garbage after them is cleared first."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from undivided.backends._base import Gradients
from undivided.backends.shared.flash_attn_arguments import (
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
    """The interface: a module of the package, or a top-level module in older builds."""
    try:
        return importlib.import_module("flash_attn_3.flash_attn_interface")
    except ImportError:
        return importlib.import_module("flash_attn_interface")


def forward(call: Call, tensors: Tensors) -> Result:
    """Dense or packed."""
    q, k, v = clean_views(call, tensors)
    cu = packing_arguments(call, tensors)
    out, lse, *_ = _package()._flash_attn_forward(q, k, v, **cu, **score_arguments(call))
    return kernel_result(call, tensors, out, lse)


def backward(call: Call, tensors: Tensors, result: Result, grad_out: Tensor, grad_lse: Tensor | None) -> Gradients:
    """Gradients of q, k and v, into buffers that start at zero."""
    q, k, v = clean_views(call, tensors)
    cu = packing_arguments(call, tensors)
    grad, out, lse = for_backward(call, tensors, result, grad_out)
    inputs = {"dq": q, "dk": k, "dv": v}
    grads = {name: torch.zeros_like(t, memory_format=torch.contiguous_format) for name, t in inputs.items()}
    _package()._flash_attn_backward(
        grad.contiguous(),
        q,
        k,
        v,
        out,
        lse,
        **cu,
        **grads,
        **score_arguments(call, "is_causal"),
        deterministic=call.problem.deterministic,
    )
    return [*in_callers_layout(call, grads.values()), None, None, None]

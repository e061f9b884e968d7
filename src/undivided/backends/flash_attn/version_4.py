"""Calls of flash-attn 4 (CuTe). Unbounded sides of a window are None; its lse contains the sinks.

`Result.lse` leaves sinks out: `without_sinks` converts after the forward, `with_sinks` before the backward.
"""

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
)
from undivided.backends.shared.kernel_inputs import clean_views
from undivided.backends.shared.log_sum_exp import with_sinks, without_sinks
from undivided.request.call import Call
from undivided.request.request import Tensors
from undivided.request.result import Result


def _package() -> Any:
    return importlib.import_module("flash_attn.cute.interface")


def forward(call: Call, tensors: Tensors) -> Result:
    """Dense or packed, with sinks."""
    q, k, v = clean_views(call, tensors)
    cu = packing_arguments(call, tensors)
    out, lse, *_ = _package()._flash_attn_fwd(
        q, k, v, **cu, **_settings(call), softcap=call.softcap, learnable_sink=tensors.sinks, return_lse=True
    )
    if tensors.sinks is not None:
        lse = without_sinks(lse, tensors.sinks)
    return kernel_result(call, tensors, out, lse)


def backward(call: Call, tensors: Tensors, result: Result, grad_out: Tensor, grad_lse: Tensor | None) -> Gradients:
    """Gradients of q, k, v and the sinks, through the output and the log-sum-exp."""
    problem = call.problem
    q, k, v = clean_views(call, tensors)
    cu = packing_arguments(call, tensors)
    if tensors.sinks is not None:
        result = Result(result.out, with_sinks(result.lse, tensors.sinks))
    grad, out, lse = for_backward(call, tensors, result, grad_out)
    if cu and grad_lse is not None:
        grad_lse = grad_lse[0]
    dq, dk, dv, *rest = _package()._flash_attn_bwd(
        q,
        k,
        v,
        out,
        grad.contiguous(),
        lse,
        **cu,
        **_settings(call),
        softcap=call.softcap or 0.0,
        deterministic=problem.deterministic,
        learnable_sink=tensors.sinks,
        dq=torch.zeros_like(q, memory_format=torch.contiguous_format),
        dk=torch.zeros_like(k, memory_format=torch.contiguous_format),
        dv=torch.zeros_like(v, memory_format=torch.contiguous_format),
        dlse=None if grad_lse is None else grad_lse.contiguous(),
    )
    dsinks = rest[0] if "sinks_grad" in problem.features else None
    return [*in_callers_layout(call, (dq, dk, dv)), None, dsinks, None]


def _settings(call: Call) -> dict[str, Any]:
    left, right = call.mask.band
    causal = left is None and right == 0
    return {
        "softmax_scale": call.scale,
        "causal": causal,
        "window_size_left": left,
        "window_size_right": None if causal else right,
    }

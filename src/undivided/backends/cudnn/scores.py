"""What is added to cuDNN's scores: a bias, a sink for each head, ALiBi.

The bias is added after the scale, as in the reference. cuDNN never gets a bias of -inf (PyTorch avoided that up to
2.10: aten, transformers/attention.cpp, `convert_boolean_attn_mask_cudnn`). Entries of -inf become `_LOWEST`, or the
lowest number of the dtype if that is higher; all others are clamped to at least half of it, so that even a row of very
low finite entries gives no weight to the keys at -inf. Rows with nothing but -inf are set afterwards.

The statistics contain the sink (softmax.h: ``log(sum + exp(sink - max)) + max``), so the backward does not need it. The
sink's gradient is computed here and not by cuDNN: before 9.26 cuDNN's reads beyond packed documents, it is not
bit-reproducible (test/python/sdpa/fp16.py), and the frontend's graph lacks the minus sign that its test expects.

cuDNN computes ALiBi with the slopes of Press et al. as ``slope * (j - i)``, which equals the reference under a top-left
causal mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from undivided.backends.shared.empty_rows import blank_rows, closed_rows, fix_empty_rows
from undivided.backends.shared.log_sum_exp import lse_for_backward, with_sinks, without_sinks
from undivided.request.call import Call
from undivided.request.request import Tensors
from undivided.request.result import Result, lse_dtype

_LOWEST = -(2.0**126)
"""Stays finite in fp32 if a kernel multiplies it by log2(e) to use powers of 2; the lowest number of bf16 does not."""


def extra(call: Call, tensors: Tensors) -> dict[str, Tensor]:
    """The graph's inputs besides q, k and v: bias and sink."""
    problem = call.problem
    inputs: dict[str, Tensor] = {}
    if tensors.bias is not None:
        inputs["bias"] = _finite(tensors.bias)
    if tensors.sinks is not None:
        inputs["sink"] = tensors.sinks.to(lse_dtype(problem.dtype)).contiguous().view(1, -1, 1, 1)
    return inputs


def _finite(bias: Tensor) -> Tensor:
    """The bias without -inf, contiguous: [1|B, 1|H, Sq, Sk]."""
    lowest = max(_LOWEST, torch.finfo(bias.dtype).min)
    finite = torch.where(bias == -torch.inf, lowest, bias.clamp(min=lowest / 2))
    return finite.contiguous()


def correct_output(call: Call, tensors: Tensors, out_BSHD: Tensor, stats_BHS: Tensor) -> Result:
    """The result with sinks left out of lse. Rows without keys, by the mask or by a bias of -inf, get 0 and -inf."""
    lse = stats_BHS if tensors.sinks is None else without_sinks(stats_BHS, tensors.sinks)
    result = fix_empty_rows(call, tensors, out_BSHD, lse)
    return result if tensors.bias is None else blank_rows(*result, closed_rows(call, tensors))


def statistics(tensors: Tensors, result: Result) -> Tensor:
    """The statistics as cuDNN's backward reads them, [B, H, Sq]: sinks included, +inf in rows without keys."""
    lse = result.lse if tensors.sinks is None else with_sinks(result.lse, tensors.sinks)
    return lse_for_backward(lse)


def sink_gradient(tensors: Tensors, result: Result, grad_BSHD: Tensor) -> Tensor:
    """``-sum(p * (grad . out))`` over batch and rows, where p is the sink's share of a row: [H], summed in the dtype of
    lse."""
    assert tensors.sinks is not None
    lse = result.lse
    share = torch.sigmoid(tensors.sinks.to(lse.dtype).unsqueeze(-1) - lse)
    change = (grad_BSHD.to(lse.dtype) * result.out).sum(-1).transpose(1, 2)
    total = torch.where(lse == -torch.inf, 0.0, share * change).sum((0, 2))
    return -total.to(tensors.sinks.dtype)

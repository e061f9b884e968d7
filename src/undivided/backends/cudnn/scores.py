"""What is added to cuDNN's scores: a bias, a sink for each head, ALiBi.

The bias is added after the scale, as ours is. cuDNN is not given -inf in it (PyTorch kept it from cuDNN up to 2.10:
aten, transformers/attention.cpp, `convert_boolean_attn_mask_cudnn`): it becomes `_LOWEST` or what the dtype has above
that, anything else at most half as low, so that a row of a program's own lowest numbers does not attend to the keys at
-inf. Rows with nothing but -inf are settled afterwards.

The statistics contain the sink (softmax.h: ``log(sum + exp(sink - max)) + max``), so the backward needs nothing else of
it, and cuDNN is not asked for the sink's gradient: before 9.26 that reads beyond packed documents, it does not repeat
bit for bit (test/python/sdpa/fp16.py), and the frontend's graph of it lacks the minus sign that its test expects.

ALiBi is computed by cuDNN from the slopes of Press et al. as ``slope * (j - i)``, which is ours under a top-left causal
mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from undivided.backends.shared import gpu
from undivided.request.call import Call
from undivided.request.request import Tensors
from undivided.request.result import Result, lse_dtype

_LOWEST = -(2.0**126)
"""Times log2(e), for kernels that take powers of 2, this is still finite in fp32; the lowest number of bf16 is not."""


def extra(call: Call, tensors: Tensors) -> dict[str, Tensor]:
    """The graph's further inputs."""
    problem = call.problem
    found: dict[str, Tensor] = {}
    if tensors.bias is not None:
        found["bias"] = _finite(tensors.bias)
    if tensors.sinks is not None:
        found["sink"] = tensors.sinks.to(lse_dtype(problem.dtype)).contiguous().view(1, -1, 1, 1)
    return found


def _finite(bias: Tensor) -> Tensor:
    """The bias without -inf, contiguous: [1|B, 1|H, Sq, Sk]."""
    lowest = max(_LOWEST, torch.finfo(bias.dtype).min)
    finite = torch.where(bias == -torch.inf, lowest, bias.clamp(min=lowest / 2))
    return finite.contiguous()


def settle(call: Call, tensors: Tensors, out_BSHD: Tensor, stats_BHS: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp without sinks. Rows without keys, by the mask or by a bias of -inf, get output 0 and
    -inf."""
    problem = call.problem
    lse = stats_BHS if tensors.sinks is None else gpu.without_sinks(stats_BHS, tensors.sinks)
    form = call.normal_form(tensors.q) if gpu.has_rows_without_keys(problem) else None
    out, lse = gpu.settle(out_BSHD, lse, form)
    if tensors.bias is not None:
        return gpu.blank(out, lse, gpu.closed_rows(call, tensors))
    return out, lse


def statistics(call: Call, tensors: Tensors, result: Result) -> Tensor:
    """What cuDNN wrote in the forward, [B, H, Sq]: with the sinks in it, +inf in rows without keys."""
    lse = result.lse if tensors.sinks is None else gpu.with_sinks(result.lse, tensors.sinks)
    return gpu.for_kernel(lse)


def sink_gradient(call: Call, tensors: Tensors, result: Result, grad_BSHD: Tensor) -> Tensor:
    """``-sum(p * (grad . out))`` over batch and rows, p what the sink takes of a row; in fp32 or fp64, as sinks [H]."""
    assert tensors.sinks is not None
    lse = result.lse
    taken = torch.sigmoid(tensors.sinks.to(lse.dtype).unsqueeze(-1) - lse)
    change = (grad_BSHD.to(lse.dtype) * result.out).sum(-1).transpose(1, 2)
    total = torch.where(lse == -torch.inf, 0.0, taken * change).sum((0, 2))
    return -total.to(tensors.sinks.dtype)

"""What is added to cuDNN's scores: a bias, and a sink for each head.

The bias is added after the scale, as ours is. cuDNN does not handle -inf in it (PyTorch's SDPA fills another number for
cuDNN: aten, transformers/attention.cpp, `convert_boolean_attn_mask_cudnn`), so -inf becomes the lowest number of the dtype
and anything else at most half as low; rows with nothing else are settled afterwards.
"""

from __future__ import annotations

import torch
from torch import Tensor

from undivided._problem import Operands, Problem
from undivided.backends import _gpu


def extra(problem: Problem, operands: Operands) -> dict[str, Tensor]:
    """The graph's further inputs."""
    found: dict[str, Tensor] = {}
    if operands.bias is not None:
        found["bias"] = _finite(operands.bias)
    return found


def _finite(bias: Tensor) -> Tensor:
    """The bias without -inf, contiguous: [1|B, 1|H, Sq, Sk]."""
    lowest = torch.finfo(bias.dtype).min
    finite = torch.where(bias == -torch.inf, lowest, bias.clamp(min=lowest / 2))
    return finite.contiguous()


def settle(problem: Problem, operands: Operands, out_BSHD: Tensor, lse_BHS: Tensor) -> tuple[Tensor, Tensor]:
    """Rows without keys get output 0 and lse = -inf: those of the mask, and those whose bias is -inf throughout."""
    form = operands.normal_form(problem) if _gpu.has_rows_without_keys(problem) else None
    out, lse = _gpu.settle(out_BSHD, lse_BHS, form)
    if operands.bias is not None:
        return _gpu.blank(out, lse, _closed_rows(problem, operands))
    return out, lse


def _closed_rows(problem: Problem, operands: Operands) -> Tensor:
    """Rows whose bias is -inf for every key that the mask allows, bool [1|B, 1|H, Sq]: no mask, or one from key 0 on."""
    assert operands.bias is not None
    is_open = operands.bias > -torch.inf
    first = torch.where(is_open.any(-1), is_open.to(torch.uint8).argmax(-1), problem.kv_len)
    if not problem.mask.kinds:
        return first == problem.kv_len
    return first >= operands.normal_form(problem).ranges[..., 1].unsqueeze(1)

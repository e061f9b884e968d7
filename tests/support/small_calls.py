"""Calls of `attention` with random tensors of 4 tokens and 2 heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import undivided
from undivided import masks

SHAPE = (1, 4, 2, 8)
FULL = masks.causal() & masks.lengths(torch.tensor([3]), torch.tensor([3]))


def x(gradient: bool = False) -> Tensor:
    return torch.randn(SHAPE, requires_grad=gradient)


def att(q: Any, k: Any = None, v: Any = None, **options: Any) -> Any:
    return undivided.attention(q, q if k is None else k, q if v is None else v, layout="bshd", **options)

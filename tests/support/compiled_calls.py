"""Tensors of calls that the tests of torch.compile make, and how many graphs it has compiled."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._dynamo.utils import counters


def compiled_graphs() -> int:
    return counters["stats"]["unique_graphs"]


def qkv(length: int, kv_length: int | None = None, grad: bool = True) -> list[Tensor]:
    q = torch.randn(2, length, 4, 16)
    k, v = (torch.randn(2, kv_length or length, 2, 16) for _ in range(2))
    return [t.requires_grad_(grad) for t in (q, k, v)]

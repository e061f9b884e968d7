"""Calls of scaled_dot_product_attention that several tests make."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import undivided

ours = undivided.scaled_dot_product_attention


HALF, BFLOAT, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64


def math(query: Tensor, *args: Any, **options: Any) -> Tensor:
    """PyTorch's own definition. Up to 2.11 it divides by the number of heads if heads are grouped, which ends the
    process if there are none."""
    if query.dim() > 2 and query.shape[-3] == 0:
        options = {**options, "enable_gqa": False}
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(query, *args, **options)


@dataclass(frozen=True)
class Case:
    """Shapes and arguments of one call; `mask` is a shape, with its kind."""

    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    dtype: torch.dtype = DOUBLE
    mask: tuple[int, ...] | None = None
    mask_kind: str = "bool"
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def options(self) -> dict[str, Any]:
        return {"is_causal": self.is_causal, "scale": self.scale, "enable_gqa": self.enable_gqa}

    def inputs(self) -> list[Tensor]:
        """query, key, value and, if there is one, the mask."""
        generator = torch.Generator().manual_seed(hash((self.query, self.key, self.value)) % 1000)
        shapes = (self.query, self.key, self.value)
        found = [torch.randn(shape, generator=generator, dtype=DOUBLE).to(self.dtype) for shape in shapes]
        if self.mask is None:
            return found
        allowed = torch.rand(self.mask, generator=generator) < 0.6
        if self.mask_kind == "bool":
            return [*found, allowed]
        added = torch.randn(self.mask, generator=generator, dtype=DOUBLE)
        if self.mask_kind == "with -inf":
            added = added.masked_fill(~allowed, -torch.inf)
        return [*found, added.to(torch.float32 if self.mask_kind == "float32" else self.dtype)]


SHAPES: dict[str, Case] = {
    "2d": Case((3, 4), (5, 4), (5, 6)),
    "3d": Case((2, 3, 4), (2, 5, 4), (2, 5, 4)),
    "4d": Case((2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 4)),
    "5d": Case((2, 3, 2, 3, 4), (2, 3, 2, 5, 4), (2, 3, 2, 5, 6)),
    "6d": Case((2, 1, 3, 2, 3, 4), (2, 1, 3, 2, 5, 4), (2, 1, 3, 2, 5, 4)),
    "query-4d-key-3d": Case((2, 3, 3, 4), (3, 5, 4), (3, 5, 4)),
    "query-2d-key-4d": Case((3, 4), (2, 3, 5, 4), (2, 3, 5, 4)),
    "key-batch-1": Case((2, 3, 3, 4), (1, 3, 5, 4), (1, 3, 5, 4)),
    "query-batch-1": Case((1, 3, 3, 4), (2, 3, 5, 4), (2, 3, 5, 4)),
    "one-key-head": Case((2, 3, 3, 4), (2, 1, 5, 4), (2, 1, 5, 4)),
    "one-query-head": Case((2, 1, 3, 4), (2, 3, 5, 4), (2, 3, 5, 4)),
    "key-and-value-broadcast-apart": Case((1, 3, 3, 4), (2, 1, 5, 4), (3, 1, 3, 5, 4)),
    "5d-broadcast-in-the-middle": Case((2, 3, 2, 3, 4), (2, 1, 2, 5, 4), (1, 3, 1, 5, 4)),
    "gqa": Case((2, 6, 3, 4), (2, 2, 5, 4), (2, 2, 5, 4), enable_gqa=True),
    "gqa-3d": Case((6, 3, 4), (2, 5, 4), (2, 5, 4), enable_gqa=True),
    "gqa-5d-broadcast": Case((2, 2, 6, 3, 4), (2, 1, 2, 5, 4), (2, 2, 5, 6), enable_gqa=True),
    "gqa-key-and-value-heads-differ": Case((2, 6, 3, 4), (2, 2, 5, 4), (2, 3, 5, 4), enable_gqa=True),
    "gqa-of-as-many-heads": Case((2, 3, 3, 4), (2, 3, 5, 4), (2, 3, 5, 4), enable_gqa=True),
    "no-keys": Case((2, 3, 3, 4), (2, 3, 0, 4), (2, 3, 0, 4)),
    "no-queries": Case((2, 3, 0, 4), (2, 3, 5, 4), (2, 3, 5, 4)),
    "no-batch": Case((0, 3, 3, 4), (0, 3, 5, 4), (0, 3, 5, 4)),
    "no-heads": Case((2, 0, 3, 4), (2, 0, 5, 4), (2, 0, 5, 4)),
    "no-values": Case((2, 3, 3, 4), (2, 3, 5, 4), (2, 3, 5, 0)),
    "no-head-size": Case((2, 3, 3, 0), (2, 3, 5, 0), (2, 3, 5, 4)),
    "no-head-size-2d": Case((3, 0), (5, 0), (5, 4)),
    "no-heads-gqa": Case((2, 0, 3, 4), (2, 0, 5, 4), (2, 0, 5, 4), enable_gqa=True),
}


def qkv(grad: bool = False, dtype: torch.dtype = SINGLE) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (2, 4, 3, 8), (2, 4, 5, 8), (2, 4, 5, 8)
    return [torch.randn(shape, dtype=dtype, requires_grad=grad) for shape in shapes]

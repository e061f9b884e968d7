"""Layout names, and the views between layouts. Nothing here copies: layouts differ in strides only.

Legend: B batch, S sequence, H heads, D head size, T total tokens of all packed documents.

    bshd  [B, S, H, D]   the canonical order inside the library
    sbhd  [S, B, H, D]   TransformerEngine's and Megatron's default
    bhsd  [B, H, S, D]   torch.nn.functional.scaled_dot_product_attention
    thd   [T, H, D]      packed documents: a batch of 1 with a document mask
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

Layout = Literal["bshd", "sbhd", "bhsd", "thd"]
LAYOUTS: tuple[Layout, ...] = ("bshd", "sbhd", "bhsd", "thd")


class Axes(NamedTuple):
    """The axes of a tensor in a layout. batch is None if it has no such axis."""

    batch: int | None
    sequence: int
    heads: int


AXES: Mapping[str, Axes] = {
    "bshd": Axes(batch=0, sequence=1, heads=2),
    "sbhd": Axes(batch=1, sequence=0, heads=2),
    "bhsd": Axes(batch=0, sequence=2, heads=1),
    "thd": Axes(batch=None, sequence=0, heads=1),
}
SEQUENCE_AXIS: Mapping[str, int] = {name: axes.sequence for name, axes in AXES.items()}

STRIDE_GETTERS: Mapping[str, Callable[[tuple[int, ...]], tuple[int, int, int]]] = {
    # without a batch axis any stride does for its one element
    name: operator.itemgetter(axes.batch or 0, axes.heads, axes.sequence)
    for name, axes in AXES.items()
}
"""Strides of batch, head and token from those of a tensor in this layout. Views would give the same, but take a
microsecond each."""


class Strides:
    """The strides of batch, head and token of q, k and v.

    Repeated calls share this object, so that backends keep in it what they derive from it: `record_parts` holds the
    sizes and strides of the native kernel's record as bytes (None before its first call), `derived` the launches of
    `triton` of calls without a mask.
    """

    __slots__ = ("derived", "k", "q", "record_parts", "v")

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, paged: bool) -> None:
        # pages are [.., page_size, N, D]
        select, select_kv = STRIDE_GETTERS[layout], STRIDE_GETTERS["bshd" if paged else layout]
        self.q, self.k, self.v = select(q.stride()), select_kv(k.stride()), select_kv(v.stride())
        self.record_parts: tuple[bytes, ...] | None = None
        self.derived: dict[Hashable, Any] = {}


def axis_count(layout: Layout) -> int:
    """Number of axes of a tensor in this layout."""
    return 3 if layout == "thd" else 4


def sizes(shape: torch.Size, layout: Layout) -> tuple[int, int, int, int]:
    """(B, S, H, D) of a tensor of this shape."""
    if layout == "bshd":
        return shape[0], shape[1], shape[2], shape[3]
    if layout == "bhsd":
        return shape[0], shape[2], shape[1], shape[3]
    if layout == "sbhd":
        return shape[1], shape[0], shape[2], shape[3]
    return 1, shape[0], shape[1], shape[2]


def canonical(tensor: Tensor, layout: Layout) -> Tensor:
    """The tensor seen as [B, S, H, D]."""
    if layout == "bshd":
        return tensor
    if layout == "bhsd":
        return tensor.transpose(1, 2)
    if layout == "sbhd":
        return tensor.transpose(0, 1)
    return tensor.unsqueeze(0)


def from_canonical(tensor_BSHD: Tensor, layout: Layout) -> Tensor:
    """The inverse of `canonical`."""
    return tensor_BSHD.squeeze(0) if layout == "thd" else canonical(tensor_BSHD, layout)


def heads_first(tensor: Tensor, layout: Layout) -> Tensor:
    """The tensor seen as [B, H, S, D], the order that most kernels take."""
    if layout == "bhsd":
        return tensor
    if layout == "bshd":
        return tensor.transpose(1, 2)
    if layout == "sbhd":
        return tensor.permute(1, 2, 0, 3)
    return tensor.transpose(0, 1).unsqueeze(0)


def from_heads_first(tensor_BHSD: Tensor, layout: Layout) -> Tensor:
    """The inverse of `heads_first`."""
    if layout == "bhsd":
        return tensor_BHSD
    if layout == "bshd":
        return tensor_BHSD.transpose(1, 2)
    if layout == "sbhd":
        return tensor_BHSD.permute(2, 0, 1, 3)
    return from_canonical(tensor_BHSD.transpose(1, 2), layout)


def empty(layout: Layout, shape_BSHD: tuple[int, int, int, int], like: Tensor, zero: bool = False) -> Tensor:
    """A new [B, S, H, D] view that is contiguous in `layout`, so that `from_canonical` gives a contiguous tensor."""
    b, s, h, d = shape_BSHD
    native = {"bshd": (b, s, h, d), "bhsd": (b, h, s, d), "sbhd": (s, b, h, d), "thd": (s, h, d)}[layout]
    make = torch.zeros if zero else torch.empty
    return canonical(make(native, dtype=like.dtype, device=like.device), layout)

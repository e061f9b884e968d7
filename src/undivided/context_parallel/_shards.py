"""Tensors of the whole as parts of the ranks, and back: along which axis, and how the parts come together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from undivided._layout import Layout
from undivided._validation import check_layout
from undivided.context_parallel.exchange.collectives import Communicator, gather_rows
from undivided.context_parallel.sharding import Side
from undivided.errors import InputError

SEQUENCE_AXIS = {"bshd": 1, "sbhd": 0, "bhsd": 2, "thd": 0}


class Gathered(torch.autograd.Function):
    """Every rank's part of a tensor; in the backward, this rank's part of the gradient."""

    @staticmethod
    def forward(
        ctx: Any, axes: Sequence[Communicator], rank: int, counts: Sequence[int], axis: int, mine: Tensor
    ) -> tuple[Tensor, ...]:
        """counts: tokens of every rank along the axis."""
        if mine.shape[axis] != counts[rank]:
            raise InputError("shards", f"have rank {rank}'s {counts[rank]} tokens", list(mine.shape))
        ctx.rank, ctx.axis = rank, axis
        parts = gather_rows(axes, mine.movedim(axis, 0).contiguous(), counts)
        return tuple(part.movedim(0, axis) for part in parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Nothing is sent: the loss is computed alike on every rank."""
        return None, None, None, None, grads[ctx.rank]


def axis_of(tensor: Tensor, layout: Layout | None, dim: int | None) -> int:
    if (layout is None) == (dim is None):
        raise InputError("layout", "be given, or dim in its place", f"layout={layout!r}, dim={dim!r}")
    if dim is not None:
        return dim % tensor.dim()
    check_layout(layout)
    return SEQUENCE_AXIS[str(layout)]


def side_of(of: Side) -> Side:
    if of not in ("q", "kv"):
        raise InputError("of", "be 'q' or 'kv'", repr(of))
    return of

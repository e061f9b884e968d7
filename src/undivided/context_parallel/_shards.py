"""Splitting tensors of the whole into the parts of the ranks and joining them again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from undivided.arguments.checks import as_integer, check_tensor, checked_choice
from undivided.arguments.layout import SEQUENCE_AXIS, Layout
from undivided.context_parallel.exchange.collectives import Communicator, gather_rows
from undivided.context_parallel.sharding import Side
from undivided.errors import InputError
from undivided.request.checks import check_layout


class GatherShards(torch.autograd.Function):
    """The parts of all ranks of a tensor; the gradient of this rank's part is its part of the gradient."""

    @staticmethod
    def forward(
        ctx: Any, axes: Sequence[Communicator], rank: int, counts: Sequence[int], axis: int, own: Tensor
    ) -> tuple[Tensor, ...]:
        """counts: tokens of every rank along the axis."""
        ctx.rank, ctx.axis = rank, axis
        gathered = gather_rows(axes, own.movedim(axis, 0).contiguous(), counts)
        return tuple(rows.movedim(0, axis) for rows in gathered)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Nothing is sent: every rank computes the same loss."""
        return None, None, None, None, grads[ctx.rank]


def sequence_axis(argument: str, tensor: Tensor, layout: Layout | None, dim: int | None) -> int:
    """The axis of the tokens, from the layout or from `dim`; raises InputError unless exactly one is given, and unless
    the tensor, which errors call `argument`, has that axis."""
    if (layout is None) == (dim is None):
        raise InputError("layout", "be given, or dim instead of it", f"layout={layout!r}, dim={dim!r}")
    check_tensor(argument, tensor)
    if dim is not None:
        axis, rank = as_integer("dim", dim), tensor.dim()
        if not -rank <= axis < rank:
            raise InputError("dim", f"be an axis of the tensor, {-rank} to {rank - 1}", axis)
        return axis % rank
    check_layout(layout)
    axis = SEQUENCE_AXIS[str(layout)]
    if axis >= tensor.dim():
        must = f"have an axis {axis}, that of the tokens in layout {layout!r}"
        raise InputError(argument, must, list(tensor.shape))
    return axis


def checked_side(of: Side) -> Side:
    """`of`, if it is "q" or "kv"; raises InputError otherwise."""
    checked_choice("of", of, ("q", "kv"))
    return of

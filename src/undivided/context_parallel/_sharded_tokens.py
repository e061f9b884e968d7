"""`ShardedTokens`: which tokens each rank holds, and tensors that are split and joined accordingly."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from undivided import masks
from undivided.arguments.checks import as_integer, check_tensor, check_type, checked_choice, checked_flag
from undivided.arguments.graphs import outside_of_graphs
from undivided.arguments.layout import SEQUENCE_AXIS, Layout
from undivided.arguments.modes import hidden_from_checkpoints
from undivided.arguments.tensors import after_collective
from undivided.context_parallel._schedule import Mesh
from undivided.context_parallel.exchange.collectives import Communicator, CountingCommunicator, gather_rows
from undivided.context_parallel.exchange.handshake import CALL, SharedArguments, prepare_on_all_ranks
from undivided.context_parallel.exchange.values import check_not_recorded
from undivided.context_parallel.sharding import (
    SIDES,
    Placement,
    PlacementName,
    Side,
    check_length,
    document_edges,
    mask_sizes,
)
from undivided.errors import InputError
from undivided.masks import Mask
from undivided.masks._parts import Documents
from undivided.request.checks import check_layout, checked_mask

_MAX_PLACEMENTS = 64
"""Unbound placements that one object caches."""


class ShardedTokens:
    """The ranks of a mesh and the tokens that each of them holds; the part of `ContextParallel` that needs no group."""

    check = True

    def __init__(
        self, mesh: Mesh, placement: PlacementName, axes: tuple[CountingCommunicator, CountingCommunicator] | None
    ) -> None:
        self.mesh = mesh
        self.rank, self.world = mesh.rank, mesh.world
        self.placement: PlacementName = placement
        self.bound: Placement | None = None
        self._axes = axes
        self._documents: Mask | None = None
        self._placements: dict[object, Placement] = {}

    def bind(self, q_len: int, kv_len: int | None = None, mask: Mask | None = None) -> Self:
        """A copy of this object with one placement of tokens for every layer, whatever mask a layer uses.

        Args:
            q_len: number of tokens of the whole sequence; if documents are packed, of all documents together, padding
                included.
            kv_len: number of keys; None if keys and queries are the same tokens.
            mask: "balanced" distributes the work of this mask evenly, "zigzag" cuts each of its documents. `attention`
                is correct with any other mask too, but its work may be less even. A predicate counts by its pairs of
                the first batch element and head.

        Returns:
            A new object that is bound to the placement; this one is unchanged.

        Raises:
            InputError: a length is not a number of tokens, or the mask does not fit the lengths.

        >>> import undivided
        >>> from undivided import masks
        >>> cp = undivided.ContextParallel(rank=0, world=2, placement="balanced")
        >>> cp.bind(8, mask=masks.causal()).positions().tolist()
        [0, 1, 6, 7]
        """
        check_length("q_len", q_len)
        if kv_len is not None:
            check_length("kv_len", kv_len)
        mask, form = checked_mask(mask), None
        keys = q_len if kv_len is None else kv_len
        batch, heads = mask_sizes(mask)
        mask.check(batch, heads, q_len, keys, packed=False, device=torch.device("cpu"))
        if self.placement == "balanced":
            form = mask.normal_form(batch, heads, q_len, keys, "cpu")
        bound = copy.copy(self)
        bound.bound = Placement.of(self.placement, self.world, q_len, kv_len, mask, form)
        bound._documents = mask
        return bound

    def positions(self, of: Side = "q", *, within_documents: bool = True) -> Tensor:
        """The positions of this rank's tokens in the sequence, int64 [local length].

        Rotary embeddings, labels and everything else that depends on the position of a token needs them.

        Args:
            of: "q" or "kv".
            within_documents: count from the start of each document, if the bound mask has documents.

        Returns:
            int64 [local length].

        Raises:
            InputError: the object is not bound, or `of` is neither "q" nor "kv".

        >>> import torch, undivided
        >>> from undivided import masks
        >>> packed = masks.documents(torch.tensor([0, 4, 8]))
        >>> cp = undivided.ContextParallel(rank=1, world=2).bind(8, mask=packed)
        >>> cp.positions().tolist(), cp.positions(within_documents=False).tolist()
        ([1, 2, 1, 2], [1, 2, 5, 6])
        """
        checked_flag("within_documents", within_documents)
        rows = self._bound_placement().rows(_checked_side(of))[self.rank]
        documents = None if self._documents is None else self._documents.take("documents")[0]
        if not within_documents or not isinstance(documents, Documents):
            return rows
        starts = torch.tensor(document_edges(self._documents, of, self._bound_placement().length(of)), device="cpu")
        return rows - starts[torch.searchsorted(starts, rows, right=True) - 1]

    def placed(self, q_len: int, kv_len: int, mask: Mask = masks.FULL) -> Placement:
        """The bound placement; if there is none, that of equally many tokens on every rank.

        Args:
            q_len, kv_len: number of queries and of keys that this rank holds.
            mask: its documents are what "zigzag" cuts.

        Returns:
            The owner of every token.

        Raises:
            InputError: a length is not a number of tokens, or the object is not bound and its placement is "balanced".

        >>> import undivided
        >>> [rows.tolist() for rows in undivided.ContextParallel(rank=0, world=2).placed(4, 4).q]
        [[0, 1, 6, 7], [2, 3, 4, 5]]
        """
        check_length("q_len", q_len)
        check_length("kv_len", kv_len)
        check_type("mask", mask, Mask, "an undivided.masks.Mask")
        return self.bound or self._unbound_placement(self.world * q_len, self.world * kv_len, mask)

    def shard(self, tensor: Tensor, layout: Layout | None = None, *, of: Side = "q", dim: int | None = None) -> Tensor:
        """This rank's tokens of a tensor of the whole. Differentiable.

        Args:
            tensor: has all tokens of the sequence along one axis; any dtype.
            layout: the layout of q, k or v, from which the axis follows.
            of: "kv" for keys and values.
            dim: the axis itself, for token ids, hidden states or labels.

        Returns:
            A tensor of the same dtype and device, with this rank's tokens along that axis, in ascending order.

        Raises:
            InputError: neither or both of layout and dim are given, the tensor lacks the axis, or the length is not the
                bound one.

        >>> import torch, undivided
        >>> cp = undivided.ContextParallel(rank=0, world=2)
        >>> cp.shard(torch.arange(8), dim=0).tolist()
        [0, 1, 6, 7]
        """
        axis = _sequence_axis("tensor", tensor, layout, dim)
        placement = self._placement_for_length(tensor.shape[axis], of, layout)
        return tensor.index_select(axis, placement.rows(_checked_side(of))[self.rank].to(tensor.device))

    def unshard(
        self, shards: Tensor | Sequence[Tensor], layout: Layout | None = None, *, of: Side = "q", dim: int | None = None
    ) -> Tensor:
        """The tensor of the whole, on every rank: the exact inverse of `shard`. Differentiable.

        In the backward pass each rank takes its own part of the gradient, assuming that every rank computes the same
        loss.

        Args:
            shards: this rank's part, which is gathered with those of the other ranks; or the parts of all ranks, for
                which no group is needed.
            layout, of, dim: as for `shard`.

        Returns:
            A tensor of the same dtype and device, with all tokens along the axis, in the order of the sequence.

        Raises:
            InputError: neither or both of layout and dim are given, a part lacks the axis, the number of parts or a
                length does not fit the placement, the parts of two ranks differ otherwise, or there is no group to
                gather from.
            RankError: another rank refused its part, or failed.

        >>> import torch, undivided
        >>> ranks = [undivided.ContextParallel(rank=r, world=3).bind(7) for r in range(3)]
        >>> ranks[0].unshard([cp.shard(torch.arange(7), dim=0) for cp in ranks], dim=0).tolist()
        [0, 1, 2, 3, 4, 5, 6]
        """
        if isinstance(shards, Tensor):
            axis, placement, parts = self._gathered(shards, layout, of, dim)
        else:
            axis, placement, parts = self._checked_parts(shards, layout, of, dim)
        return torch.cat(parts, axis).index_select(axis, placement.order[of].to(parts[0].device))

    @outside_of_graphs
    @hidden_from_checkpoints
    def _gathered(
        self, own: Tensor, layout: Layout | None, of: Side, dim: int | None
    ) -> tuple[int, Placement, list[Tensor]]:
        """The axis of the tokens, their placement, and the parts of all ranks, of which this rank has its own."""
        if self._axes is None:
            raise InputError("shards", "be the parts of all ranks if there is no group", "one tensor")
        check_not_recorded((own,))
        own = after_collective(own)

        def prepare() -> tuple[tuple[int, Placement, list[int]], SharedArguments]:
            axis = _sequence_axis("shards", own, layout, dim)
            placement = self.bound or self._placement_for_length(self.world * own.shape[axis], of, layout)
            counts = [rows.numel() for rows in placement.rows(_checked_side(of))]
            if own.shape[axis] != counts[self.rank]:
                raise InputError("shards", f"have rank {self.rank}'s {counts[self.rank]} tokens", list(own.shape))
            sizes = [*own.shape[:axis], sum(counts), *own.shape[axis + 1 :]]
            shared = {"shards": f"{sizes} in all, {own.dtype}", "placement": f"{placement.digest:x}", "of": of}
            return (axis, placement, counts), {CALL: "ContextParallel.unshard()", **shared}

        axis, placement, counts = prepare_on_all_ranks(self._axes, self.check, prepare)
        parts = _GatherShards.apply(self._axes, self.rank, counts, axis, own)  # type: ignore[no-untyped-call]
        return axis, placement, list(parts)

    def _checked_parts(
        self, shards: Sequence[Tensor], layout: Layout | None, of: Side, dim: int | None
    ) -> tuple[int, Placement, list[Tensor]]:
        """The axis of the tokens, their placement, and the parts of all ranks; raises InputError if they do not fit."""
        if not isinstance(shards, Sequence) or len(shards) != self.world:
            got = f"{len(shards)} parts" if isinstance(shards, Sequence) else type(shards).__name__
            raise InputError("shards", f"be a tensor, or the parts of all {self.world} ranks", got)
        for number, shard in enumerate(shards):
            axis, first, shape = _sequence_axis(f"shards[{number}]", shard, layout, dim), shards[0], list(shard.shape)
            shape[axis : axis + 1] = first.shape[axis : axis + 1]
            if shape != list(first.shape) or (shard.dtype, shard.device) != (first.dtype, first.device):
                like = f"{list(first.shape)} {first.dtype} on {first.device}"
                got = f"{list(shard.shape)} {shard.dtype} on {shard.device}"
                raise InputError(f"shards[{number}]", f"be like shards[0] except along axis {axis}, {like}", got)
        length = sum(shard.shape[axis] for shard in shards)
        placement = self.bound or self._placement_for_length(length, of, layout)
        for rank, rows in enumerate(placement.rows(_checked_side(of))):
            if shards[rank].shape[axis] != rows.numel():
                must = f"have rank {rank}'s {rows.numel()} tokens"
                raise InputError(f"shards[{rank}]", must, list(shards[rank].shape))
        return axis, placement, list(shards)

    def _bound_placement(self) -> Placement:
        if self.bound is None:
            raise InputError("context_parallel", "be bound", repr(self), hint="cp = cp.bind(q_len, kv_len, mask)")
        return self.bound

    def _placement_for_length(self, length: int, of: Side, layout: Layout | None) -> Placement:
        """The bound placement, or one of this many tokens; raises InputError if the length does not fit it."""
        if self.bound is not None:
            if length != self.bound.length(_checked_side(of)):
                raise InputError("tensor", f"have the {self.bound.length(of)} tokens that were bound", length)
            return self.bound
        if length % self.world or layout == "thd":
            raise InputError(
                "context_parallel",
                f"be bound: {length} tokens are not a multiple of {self.world} ranks, or are packed",
                repr(self),
                hint="cp = cp.bind(q_len, kv_len, mask)",
            )
        return self._unbound_placement(length, length, masks.FULL)

    def _unbound_placement(self, q_len: int, kv_len: int, mask: Mask) -> Placement:
        """The placement of so many tokens; cached."""
        if self.placement == "balanced":
            raise InputError(
                "context_parallel",
                "be bound for placement='balanced'",
                repr(self),
                hint="cp = cp.bind(q_len, kv_len, mask)",
            )
        edges = document_edges(mask, "q", q_len), document_edges(mask, "kv", kv_len)
        key = (q_len, kv_len, *edges)
        if key not in self._placements:
            if len(self._placements) >= _MAX_PLACEMENTS:
                self._placements.clear()
            same = (q_len, edges[0]) == (kv_len, edges[1])
            self._placements[key] = Placement.of(self.placement, self.world, q_len, None if same else kv_len, mask)
        return self._placements[key]


class _GatherShards(torch.autograd.Function):
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


def _sequence_axis(argument: str, tensor: Tensor, layout: Layout | None, dim: int | None) -> int:
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


def _checked_side(of: Side) -> Side:
    checked_choice("of", of, SIDES)
    return of

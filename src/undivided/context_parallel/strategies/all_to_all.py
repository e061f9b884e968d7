"""All-to-all: each rank exchanges rows for heads. Between the two exchanges it has whole sequences of some heads.

The usual form needs numbers of query and key heads that are multiples of the number of ranks. Here rank r of W computes
heads [r * H / W, (r + 1) * H / W) of H query heads, fractions included: a head that two ranks share is split between
them by rows, at the row that splits its allowed pairs in that proportion. 18 heads on 4 ranks are 4.5 heads per rank,
and 2 heads on 4 ranks are half a head per rank. A key head goes, whole, to every rank that has one of its query heads.
A head group (the query heads of one key head) that is split gets a share of its own, so that all key heads of a share
serve equally many query heads.

Source: Jacobs et al. 2023, DeepSpeed Ulysses (arXiv:2309.14509).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from undivided.arguments import layout as _layout
from undivided.arguments.layout import Layout
from undivided.context_parallel._index import (
    Index,
    add,
    as_index,
    count,
    join,
    merged_slots,
    put,
    take,
    take_unless_broadcast,
)
from undivided.context_parallel.exchange.collectives import Communicator


class ShareRange(NamedTuple):
    """One share: its query heads, its key heads, and rows [start, stop), numbered within the rows of the group."""

    heads: slice
    kv_heads: slice
    start: int
    stop: int


def share_ranges(work: Tensor, rank: int, world: int, heads: int, kv_heads: int, rows: int) -> tuple[ShareRange, ...]:
    """The shares that a rank of a group computes.

    Args:
        work: the `cumulative_work` of the group's rows, float64 [rows].
        rank, world: of the group.
        heads, kv_heads: query heads and key heads of the call.
        rows: the number of rows of the group.
    """
    if world == 1:
        return (ShareRange(slice(0, heads), slice(0, kv_heads), 0, rows),)
    group = heads // kv_heads
    shares = []
    for first, last, start, stop in _split_heads(rank * heads, (rank + 1) * heads, world, group):
        kv_span = slice(first // group, (last - 1) // group + 1)
        first_row, last_row = (_row_at_fraction(work, place, world) for place in (start, stop))
        if last_row > first_row:
            shares.append(ShareRange(slice(first, last), kv_span, first_row, last_row))
    return tuple(shares)


def cumulative_work(pairs: Tensor, rows: Tensor) -> Tensor:
    """The allowed pairs of these rows, summed up to and including each of them; float64, exact.

    pairs: of every row of the whole, int64 [Sq]. rows: global positions, int64 [R].
    """
    return pairs.index_select(0, rows).to(torch.float64).cumsum(0)


def _split_heads(unit: int, end: int, world: int, group: int) -> list[tuple[int, int, int, int]]:
    """(first head, last head + 1, start, stop) for units [unit, end), where a head has ``world`` units.

    start and stop are units within the head. Whole heads are joined if they belong to one head group or are whole head
    groups.

    >>> _split_heads(9, 18, 4, 2)        # the third quarter of 18 / 2 heads: 1/4 .. 1 of head 2, head 3, half of head 4
    [(2, 3, 1, 4), (3, 4, 0, 4), (4, 5, 0, 2)]
    """
    ranges = []
    while unit < end:
        head, within = divmod(unit, world)
        if within or unit + world > end:
            stop = min(end, (head + 1) * world)
            ranges.append((head, head + 1, within, stop - head * world))
        else:
            last = _end_of_whole_heads(head, end // world, group)
            stop = last * world
            ranges.append((head, last, 0, world))
        unit = stop
    return ranges


def _end_of_whole_heads(head: int, end: int, group: int) -> int:
    """The end of the whole heads that are joined from `head` on, at most `end`.

    These are whole head groups if `head` begins one that ends before `end`, and otherwise the rest of its group.
    """
    if head % group == 0 and end - head >= group:
        return end - end % group
    return min(end, head - head % group + group)


def _row_at_fraction(work: Tensor, numerator: int, denominator: int) -> int:
    """The number of rows that do numerator / denominator of the work; ``work`` is a cumulative sum."""
    rows = work.numel()
    if numerator in (0, denominator) or not rows or not float(work[-1]):
        return rows * numerator // denominator
    return min(int(torch.searchsorted(work, work[-1] * numerator / denominator)) + 1, rows)


def kv_span(rank: int, world: int, heads: int, kv_heads: int) -> slice:
    """The key heads that serve a rank's query heads, which are consecutive.

    >>> [kv_span(rank, 4, 6, 3) for rank in range(4)]
    [slice(0, 1, None), slice(0, 2, None), slice(1, 3, None), slice(2, 3, None)]
    """
    group = heads // kv_heads
    return slice(rank * heads // world // group, ((rank + 1) * heads - 1) // world // group + 1)


@dataclass(frozen=True, eq=False)
class _Contribution:
    """What one rank contributes to one share: indices into its rows, and the heads."""

    index: Index
    heads: slice


class TensorSpec(NamedTuple):
    """A tensor to allocate: its sizes [B, S, H, X] (B and H may be 1), and the layout in which it is contiguous."""

    shape: tuple[int, int, int, int]
    dtype: torch.dtype
    device: torch.device
    layout: Layout = "bshd"

    def buffer(self, part: _Contribution) -> Tensor:
        """An empty buffer for some of its rows and heads."""
        batch, _, heads, size = self.shape
        own_heads = 1 if heads == 1 else count(part.heads)
        return torch.empty((batch, count(part.index), own_heads, size), dtype=self.dtype, device=self.device)

    def zeros(self, dtype: torch.dtype) -> Tensor:
        """The tensor, filled with zeros, in another dtype."""
        return _layout.empty(self.layout, self.shape, torch.empty(0, dtype=dtype, device=self.device), zero=True)


@dataclass(frozen=True, eq=False)
class HeadExchange:
    """The exchange of rows for heads, and back. Tensors are [B, S, H, X]; B and H may be broadcast (1).

    member: this rank's number in the group.
    sends: for every member of the group and each of its shares, the rows that this rank contributes.
    slots: for each share of this rank and every member, where the member's rows land among the rows of the share.
    heads: the number of heads of all shares together.
    disjoint: no row of a head is in two shares, so nothing is added up on the way back.
    """

    member: int
    sends: tuple[tuple[_Contribution, ...], ...]
    slots: tuple[tuple[Index, ...], ...]
    heads: int
    disjoint: bool

    @staticmethod
    def build(
        rank: int, rows: Sequence[Tensor], targets: Sequence[Sequence[tuple[Tensor, slice]]], heads: int
    ) -> HeadExchange:
        """The exchange of one member.

        rank: its number in the group. rows: the rows of every member. targets: for every member, (rows, heads) of each
        of its shares. All positions are global. heads: as in the class.
        """
        sends = tuple(
            tuple(_Contribution(as_index(_indices_in(rows[rank], share)), share_heads) for share, share_heads in member)
            for member in targets
        )
        slots = tuple(
            merged_slots([member_rows[_indices_in(member_rows, share)] for member_rows in rows])
            for share, _ in targets[rank]
        )
        entries = sum(share.numel() * count(share_heads) for member in targets for share, share_heads in member)
        disjoint = entries == heads * sum(member_rows.numel() for member_rows in rows)
        return HeadExchange(rank, sends, slots, heads, disjoint)

    def to_shares(self, comm: Communicator, tensors: Sequence[Tensor]) -> Callable[[], list[list[Tensor]]]:
        """Post the exchange of some tensors; the result waits and returns, for every share, its part of each tensor."""
        if len(self.sends) == 1:
            return lambda: [list(tensors)]
        received = {
            peer: [
                [_share_buffer(t, contribution, count(slots[peer])) for t in tensors]
                for contribution, slots in zip(self.sends[self.member], self.slots, strict=True)
            ]
            for peer in self._peers
        }
        wait = comm.exchange(
            {
                peer: [_select(t, contribution).contiguous() for contribution in self.sends[peer] for t in tensors]
                for peer in self._peers
            },
            {peer: [t for share in buffers for t in share] for peer, buffers in received.items()},
            "the exchange of rows for heads",
        )

        def joined(number: int) -> list[Tensor]:
            share = []
            for tensor in tensors:
                chunks = [
                    received[peer][number].pop(0) if peer in received else _select(tensor, self.sends[peer][number])
                    for peer in range(len(self.sends))
                ]
                share.append(join(chunks, self.slots[number]))
            return share

        def result() -> list[list[Tensor]]:
            wait()
            return [joined(number) for number in range(len(self.slots))]

        return result

    def from_shares(
        self, comm: Communicator, shares: Sequence[list[Tensor]], specs: Sequence[TensorSpec]
    ) -> Callable[[], list[Tensor]]:
        """Post the exchange back; the result waits and returns one tensor per spec.

        Contributions of several shares to one entry are added up in fp32. The lists of the shares are emptied.
        """
        if len(self.sends) == 1:
            return lambda: [shares[0].pop(0).to(spec.dtype) for spec in specs]
        received = {
            peer: [[spec.buffer(contribution) for spec in specs] for contribution in self.sends[peer]]
            for peer in self._peers
        }
        wait = comm.exchange(
            {
                peer: [
                    take(t, 1, slots[peer]).to(spec.dtype).contiguous()
                    for share, slots in zip(shares, self.slots, strict=True)
                    for t, spec in zip(share, specs, strict=True)
                ]
                for peer in self._peers
            },
            {peer: [t for share in buffers for t in share] for peer, buffers in received.items()},
            "the exchange of heads for rows",
        )
        received[self.member] = [
            [take(t, 1, slots[self.member]) for t in share] for share, slots in zip(shares, self.slots, strict=True)
        ]
        for share in shares:
            share.clear()

        def result() -> list[Tensor]:
            wait()
            return [self._combine(spec, received) for spec in specs]

        return result

    def _combine(self, spec: TensorSpec, received: dict[int, list[list[Tensor]]]) -> Tensor:
        """One tensor from the first remaining entry of every list, which is removed from its list."""
        is_disjoint = self.disjoint and spec.shape[2] == self.heads
        write = put if is_disjoint else add
        total = spec.zeros(spec.dtype if is_disjoint else torch.promote_types(spec.dtype, torch.float32))
        for peer, contributions in enumerate(self.sends):
            for contribution, values in zip(contributions, received[peer], strict=True):
                write(take_unless_broadcast(total, 2, contribution.heads), 1, contribution.index, values.pop(0))
        return total.to(spec.dtype)

    @property
    def _peers(self) -> list[int]:
        return [peer for peer in range(len(self.sends)) if peer != self.member]


def _select(tensor: Tensor, contribution: _Contribution) -> Tensor:
    """The rows and heads that a rank contributes to a share."""
    return take(take_unless_broadcast(tensor, 2, contribution.heads), 1, contribution.index)


def _share_buffer(tensor: Tensor, contribution: _Contribution, rows: int) -> Tensor:
    """An empty buffer for that many rows of a share."""
    batch, _, heads, size = tensor.shape
    own_heads = 1 if heads == 1 else count(contribution.heads)
    return tensor.new_empty((batch, rows, own_heads, size))


def _indices_in(rows: Tensor, share: Tensor) -> Tensor:
    """The indices of the rows that are in the share; both ascend."""
    return torch.isin(rows, share, assume_unique=True).nonzero().squeeze(1)

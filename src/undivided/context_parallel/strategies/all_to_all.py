"""All-to-all: each rank trades its rows for heads. Between two exchanges it has whole sequences of some heads.

The usual form needs query and key heads that the ranks divide. Here rank r of W takes the stretch [r * H / W, (r + 1) *
H / W) of H query heads, fractions included: a head that two ranks share is split between them by rows, at the row where
its allowed pairs are split in that proportion. So 18 heads on 4 ranks are 4.5 for each, and 2 heads on 4 ranks are half
a head each. Key heads go to every rank that has one of their query heads, whole; groups that are cut give shares of
their own, so that in each share all key heads serve equally many query heads.

Source: Jacobs et al. 2023, DeepSpeed Ulysses (arXiv:2309.14509).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from undivided import _layout
from undivided._layout import Layout
from undivided.context_parallel._index import Index, add, as_index, count, joined, places, put, take, unless_broadcast
from undivided.context_parallel.exchange.collectives import Communicator


class Stretch(NamedTuple):
    """Of a share: query heads, key heads, and rows [start, stop) of those that are traded."""

    heads: slice
    kv_heads: slice
    start: int
    stop: int


def stretches(running: Tensor, rank: int, world: int, heads: int, kv_heads: int, rows: int) -> tuple[Stretch, ...]:
    """What a rank computes of all heads of so many rows; ``running``: see `running_work`."""
    if world == 1:
        return (Stretch(slice(0, heads), slice(0, kv_heads), 0, rows),)
    group = heads // kv_heads
    found = []
    for first, last, start, stop in _stretches(rank * heads, (rank + 1) * heads, world, group):
        served = slice(first // group, (last - 1) // group + 1)
        part = Stretch(slice(first, last), served, _cut(running, start, world), _cut(running, stop, world))
        if part.stop > part.start:
            found.append(part)
    return tuple(found)


def running_work(pairs: Tensor, rows: Tensor) -> Tensor:
    """The work up to and with each of these rows, in ``pairs`` of every row of the whole; float64, exact."""
    return pairs.index_select(0, rows).to(torch.float64).cumsum(0)


def _stretches(unit: int, end: int, world: int, group: int) -> list[tuple[int, int, int, int]]:
    """(first head, last + 1, from, to) of units [unit, end), ``world`` of which are a head; from and to are units of
    it.

    Whole heads stand together where they are of one group, or are whole groups.

    >>> _stretches(9, 18, 4, 2)        # the third quarter of 18 / 2 heads: 1/4 .. 1 of head 2, head 3, half of head 4
    [(2, 3, 1, 4), (3, 4, 0, 4), (4, 5, 0, 2)]
    """
    found = []
    while unit < end:
        head, within = divmod(unit, world)
        if within or unit + world > end:
            stop = min(end, (head + 1) * world)
            found.append((head, head + 1, within, stop - head * world))
        else:
            whole = end // world
            last = (
                whole - whole % group
                if head % group == 0 and whole - head >= group
                else min(whole, head - head % group + group)
            )
            stop = last * world
            found.append((head, last, 0, world))
        unit = stop
    return found


def _cut(running: Tensor, part: int, of: int) -> int:
    """The row at which part / of the work is done; ``running`` is its cumulative sum."""
    rows = running.numel()
    if part in (0, of) or not rows or not float(running[-1]):
        return rows * part // of
    return min(int(torch.searchsorted(running, running[-1] * part / of)) + 1, rows)


def kv_span(rank: int, world: int, heads: int, kv_heads: int) -> slice:
    """The key heads that serve a rank's query heads, one run.

    >>> [kv_span(rank, 4, 6, 3) for rank in range(4)]
    [slice(0, 1, None), slice(0, 2, None), slice(1, 3, None), slice(2, 3, None)]
    """
    group = heads // kv_heads
    return slice(rank * heads // world // group, ((rank + 1) * heads - 1) // world // group + 1)


@dataclass(frozen=True, eq=False)
class _Part:
    """Of one share: which of a rank's rows, and which heads."""

    index: Index
    heads: slice


class Wanted(NamedTuple):
    """A tensor to be made: its sizes [B, S, H, X], where B and H may be 1, and the layout that its memory is contiguous
    in."""

    shape: tuple[int, int, int, int]
    dtype: torch.dtype
    device: torch.device
    layout: Layout = "bshd"

    def part(self, part: _Part) -> Tensor:
        """A buffer for some rows and heads of it."""
        batch, _, heads, size = self.shape
        some = heads if heads == 1 else part.heads.stop - part.heads.start
        return torch.empty((batch, count(part.index), some, size), dtype=self.dtype, device=self.device)

    def zeros(self, dtype: torch.dtype) -> Tensor:
        """It, in another dtype."""
        return _layout.empty(self.layout, self.shape, torch.empty(0, dtype=dtype, device=self.device), zero=True)


@dataclass(frozen=True, eq=False)
class HeadExchange:
    """Rows for heads, and back. Tensors are [B, S, H, X]; B and H may be broadcast (1).

    sends: for every member, what of this rank's rows goes to each of its shares.
    where: for each share of this rank, the places of every member's rows among its rows.
    heads: of all shares together.
    disjoint: no row of a head is in two shares, so that on the way back nothing is added up.
    """

    comm_rank: int
    sends: tuple[tuple[_Part, ...], ...]
    where: tuple[tuple[Index, ...], ...]
    heads: int
    disjoint: bool

    @staticmethod
    def of(
        rank: int, rows: Sequence[Tensor], targets: Sequence[Sequence[tuple[Tensor, slice]]], heads: int
    ) -> HeadExchange:
        """rows: of every member. targets: for every member, (rows, heads) of each of its shares; all positions
        global."""
        sends = tuple(
            tuple(_Part(as_index(_within(rows[rank], share)), some) for share, some in member) for member in targets
        )
        where = tuple(places([of[_within(of, share)] for of in rows]) for share, _ in targets[rank])
        given = sum(share.numel() * (some.stop - some.start) for member in targets for share, some in member)
        return HeadExchange(rank, sends, where, heads, given == heads * sum(of.numel() for of in rows))

    def to_shares(self, comm: Communicator, tensors: Sequence[Tensor]) -> Callable[[], list[list[Tensor]]]:
        """Post the exchange of some tensors; the result waits and gives, for every share, its rows and heads of
        each."""
        if len(self.sends) == 1:
            return lambda: [list(tensors)]
        arriving = {
            peer: [
                [_of_share(t, part, count(where[peer])) for t in tensors]
                for part, where in zip(self.sends[self.comm_rank], self.where, strict=True)
            ]
            for peer in self._others
        }
        wait = comm.exchange(
            {
                peer: [_piece_of(t, part).contiguous() for part in self.sends[peer] for t in tensors]
                for peer in self._others
            },
            {peer: [t for share in got for t in share] for peer, got in arriving.items()},
        )

        def share(number: int) -> list[Tensor]:
            found = []
            for tensor in tensors:
                parts = [
                    arriving[peer][number].pop(0) if peer in arriving else _piece_of(tensor, self.sends[peer][number])
                    for peer in range(len(self.sends))
                ]
                found.append(joined(parts, self.where[number]))
            return found

        def result() -> list[list[Tensor]]:
            wait()
            return [share(number) for number in range(len(self.where))]

        return result

    def from_shares(
        self, comm: Communicator, shares: Sequence[list[Tensor]], wanted: Sequence[Wanted]
    ) -> Callable[[], list[Tensor]]:
        """The way back: what several shares have of a tensor is added up, in fp32. The lists of the shares are
        emptied."""
        if len(self.sends) == 1:
            return lambda: [shares[0].pop(0).to(of.dtype) for of in wanted]
        arriving = {peer: [[of.part(part) for of in wanted] for part in self.sends[peer]] for peer in self._others}
        wait = comm.exchange(
            {
                peer: [
                    take(t, 1, where[peer]).to(of.dtype).contiguous()
                    for share, where in zip(shares, self.where, strict=True)
                    for t, of in zip(share, wanted, strict=True)
                ]
                for peer in self._others
            },
            {peer: [t for part in got for t in part] for peer, got in arriving.items()},
        )
        arriving[self.comm_rank] = [
            [take(t, 1, where[self.comm_rank]) for t in share] for share, where in zip(shares, self.where, strict=True)
        ]
        for share in shares:
            share.clear()

        def result() -> list[Tensor]:
            wait()
            return [self._together(of, arriving) for of in wanted]

        return result

    def _together(self, wanted: Wanted, arrived: dict[int, list[list[Tensor]]]) -> Tensor:
        """The next tensor of every share, from all members; taken out of the lists."""
        beside = self.disjoint and wanted.shape[2] == self.heads
        write = put if beside else add
        total = wanted.zeros(wanted.dtype if beside else torch.promote_types(wanted.dtype, torch.float32))
        for peer, parts in enumerate(self.sends):
            for part, values in zip(parts, arrived[peer], strict=True):
                write(unless_broadcast(total, 2, part.heads), 1, part.index, values.pop(0))
        return total.to(wanted.dtype)

    @property
    def _others(self) -> list[int]:
        return [peer for peer in range(len(self.sends)) if peer != self.comm_rank]


def _piece_of(tensor: Tensor, part: _Part) -> Tensor:
    return take(unless_broadcast(tensor, 2, part.heads), 1, part.index)


def _of_share(tensor: Tensor, part: _Part, rows: int) -> Tensor:
    """A buffer for that many rows of a share."""
    batch, _, heads, size = tensor.shape
    return tensor.new_empty((batch, rows, heads if heads == 1 else part.heads.stop - part.heads.start, size))


def _within(rows: Tensor, share: Tensor) -> Tensor:
    """The numbers of those rows that are in the share; both ascend."""
    return torch.isin(rows, share, assume_unique=True).nonzero().squeeze(1)

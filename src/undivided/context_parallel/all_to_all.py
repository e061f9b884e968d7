"""All-to-all: each rank trades its rows for heads. Between two exchanges it has whole sequences of some heads.

The usual form needs query and key heads that the ranks divide. Here rank r of W takes the stretch [r * H / W, (r + 1) * H / W)
of H query heads, fractions included: a head that two ranks share is split between them by rows, at the row where its allowed
pairs are split in that proportion. So 18 heads on 4 ranks are 4.5 for each, and 2 heads on 4 ranks are half a head each. Key
heads go to every rank that has one of their query heads, whole; groups that are cut give shares of their own, so that in each
share all key heads serve equally many query heads.

Source: Jacobs et al. 2023, DeepSpeed Ulysses (arXiv:2309.14509).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from undivided.context_parallel._index import Index, add, as_index, take, unless_broadcast
from undivided.context_parallel._pieces import Share
from undivided.context_parallel.collectives import Communicator


def shares(
    running: Tensor, rank: int, world: int, heads: int, kv_heads: int, rows: Tensor
) -> tuple[Share, ...]:
    """What a rank computes of all heads of these rows (global positions); ``running``: see `running_work`."""
    if world == 1:
        return (Share(slice(0, heads), slice(0, kv_heads), rows),)
    group = heads // kv_heads
    found = []
    for first, last, start, stop in _stretches(rank * heads, (rank + 1) * heads, world, group):
        part = rows[_cut(running, start, world) : _cut(running, stop, world)]
        served = slice(first // group, (last - 1) // group + 1)
        if part.numel():
            found.append(Share(slice(first, last), served, part))
    return tuple(found)


def running_work(pairs: Tensor, rows: Tensor) -> Tensor:
    """The work up to and with each of these rows, in ``pairs`` of every row of the whole; float64, exact."""
    return pairs.index_select(0, rows).to(torch.float64).cumsum(0)


def _stretches(unit: int, end: int, world: int, group: int) -> list[tuple[int, int, int, int]]:
    """(first head, last + 1, from, to) of units [unit, end), ``world`` of which are a head; from and to are units of it.

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


@dataclass(frozen=True, eq=False)
class HeadExchange:
    """Rows for heads, and back. Tensors are [B, S, H, X]; B and H may be broadcast (1).

    sends: for every member, what of this rank's rows goes to each of its shares.
    receives: for each share of this rank, how many rows every member has of it.
    orders: for each share, its rows in ascending order from those of the members one after another; None: they are.
    """

    comm_rank: int
    sends: tuple[tuple[_Part, ...], ...]
    receives: tuple[tuple[int, ...], ...]
    orders: tuple[Tensor | None, ...]

    @staticmethod
    def of(
        rank: int, rows: Sequence[Tensor], targets: Sequence[Sequence[tuple[Tensor, slice]]]
    ) -> HeadExchange:
        """rows: of every member. targets: for every member, (rows, heads) of each of its shares; all positions global."""
        sends = tuple(
            tuple(_Part(as_index(_within(rows[rank], share)), heads) for share, heads in member)
            for member in targets
        )
        receives, orders = [], []
        for share, _ in targets[rank]:
            found = [theirs[_within(theirs, share)] for theirs in rows]
            order = torch.cat(found).argsort()
            receives.append(tuple(part.numel() for part in found))
            orders.append(None if bool((order[1:] > order[:-1]).all()) else order)
        return HeadExchange(rank, sends, tuple(receives), tuple(orders))

    def to_shares(self, comm: Communicator, tensors: Sequence[Tensor]) -> Callable[[], list[list[Tensor]]]:
        """Post the exchange of some tensors; the result waits and gives, for every share, its rows and heads of each."""
        if len(self.sends) == 1:
            return lambda: [list(tensors)]
        mine = [[self._cut(t, part) for t in tensors] for part in self.sends[self.comm_rank]]
        arriving = {
            peer: [
                [t.new_empty((t.shape[0], counts[peer], *t.shape[2:])) for t in own]
                for own, counts in zip(mine, self.receives, strict=True)
            ]
            for peer in self._others
        }
        wait = comm.exchange(
            {peer: [self._cut(t, part).contiguous() for part in self.sends[peer] for t in tensors] for peer in self._others},
            {peer: [t for share in got for t in share] for peer, got in arriving.items()},
        )  # fmt: skip

        def result() -> list[list[Tensor]]:
            wait()
            parts = [arriving.get(peer, mine) for peer in range(len(self.sends))]
            return [
                [self._joined([p[n][i] for p in parts], n) for i in range(len(tensors))]
                for n in range(len(mine))
            ]

        return result

    def from_shares(
        self, comm: Communicator, shares: Sequence[Sequence[Tensor]], likes: Sequence[Tensor]
    ) -> Callable[[], list[Tensor]]:
        """The way back: each of ``likes`` gives a shape and a dtype; what several shares have of it is added up, in fp32."""
        if len(self.sends) == 1:
            return lambda: [t.to(like.dtype) for t, like in zip(shares[0], likes, strict=True)]
        leaving = [
            [self._apart(t.to(like.dtype), n) for t, like in zip(share, likes, strict=True)]
            for n, share in enumerate(shares)
        ]
        arriving = {
            peer: [[torch.empty_like(self._cut(like, part)) for like in likes] for part in self.sends[peer]]
            for peer in self._others
        }
        wait = comm.exchange(
            {peer: [t[peer].contiguous() for share in leaving for t in share] for peer in self._others},
            {peer: [t for part in got for t in part] for peer, got in arriving.items()},
        )

        def result() -> list[Tensor]:
            wait()
            totals = [torch.zeros_like(t, dtype=torch.promote_types(t.dtype, torch.float32)) for t in likes]
            mine = [[t[self.comm_rank] for t in share] for share in leaving]
            for peer, parts in enumerate(self.sends):
                for part, values in zip(parts, arriving.get(peer, mine), strict=True):
                    for total, value in zip(totals, values, strict=True):
                        add(unless_broadcast(total, 2, part.heads), 1, part.index, value)
            return [total.to(like.dtype) for total, like in zip(totals, likes, strict=True)]

        return result

    @property
    def _others(self) -> list[int]:
        return [peer for peer in range(len(self.sends)) if peer != self.comm_rank]

    def _cut(self, tensor: Tensor, part: _Part) -> Tensor:
        return take(unless_broadcast(tensor, 2, part.heads), 1, part.index)

    def _joined(self, parts: list[Tensor], share: int) -> Tensor:
        joined = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        order = self.orders[share]
        return joined if order is None else joined.index_select(1, order)

    def _apart(self, tensor: Tensor, share: int) -> tuple[Tensor, ...]:
        order = self.orders[share]
        if order is not None:
            tensor = torch.empty_like(tensor).index_copy_(1, order, tensor)
        return tuple(tensor.split(list(self.receives[share]), 1))


def _within(rows: Tensor, share: Tensor) -> Tensor:
    """The numbers of those rows that are in the share; both ascend."""
    return torch.isin(rows, share, assume_unique=True).nonzero().squeeze(1)

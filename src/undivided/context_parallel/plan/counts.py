"""Bytes, exchanges and pairs of one strategy with one placement, for every rank, as a run would count them.

A mesh is R places on the ring of A members each; rank = place * A + member, and counts are int64 [W].
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from undivided._result import lse_dtype
from undivided.context_parallel._index import count
from undivided.context_parallel._schedule import Ranks, Strategy
from undivided.context_parallel.strategies.all_gather import head_groups
from undivided.context_parallel.strategies.all_to_all import Stretch


@dataclass(frozen=True)
class Sizes:
    """Of a call: batch elements, heads, key heads, head sizes, and the dtype of q, k and v."""

    batch: int
    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    dtype: torch.dtype

    @property
    def entry(self) -> int:
        """Bytes of an entry of q, k, v and the output."""
        return self.batch * self.dtype.itemsize

    @property
    def lse(self) -> int:
        """Bytes of the log-sum-exp of one row and head, and of an entry of what is summed."""
        return self.batch * lse_dtype(self.dtype).itemsize


class Work:
    """What every rank of a mesh computes, and what it trades for it; the same for every strategy on that mesh.

    pairs: allowed pairs, over batch elements and heads.
    shares, entries, largest: how many shares, rows x heads of all, and of the largest.
    rows_leave, rows_come, rows_stay: rows x heads that a rank gives to others of its place, gets from them, and keeps.
    trades: exchanges of a forward pass in which rows or keys are traded.
    """

    def __init__(self, ranks: Ranks, per_head: Tensor) -> None:
        self.ranks, self._key_heads = ranks, ranks.key_heads
        world = ranks.ring * ranks.members
        self.pairs, self.shares, self.entries, self.largest = _zeros(4, world)
        self.rows_leave, self.rows_come, self.rows_stay, self.trades = _zeros(4, world)
        self.keys_leave, self.keys_come, self.keys_stay = _zeros(3, world)
        """Keys x key heads."""
        for place in range(ranks.ring):
            found = [(m, part) for m in range(ranks.members) for part in ranks.stretches(place, m)]
            if found:
                self._compute(place, found, per_head)
            if ranks.members > 1:
                self._trade(place, found)

    def _compute(self, place: int, found: list[tuple[int, Stretch]], per_head: Tensor) -> None:
        start, first = self.ranks.lines[place], place * self.ranks.members
        running = torch.nn.functional.pad(per_head.index_select(1, start).cumsum(1), (1, 0))
        rank = torch.tensor([first + member for member, _ in found])
        heads = torch.tensor([count(part.heads) for _, part in found])
        ends = torch.tensor([[part.start, part.stop] for _, part in found])
        work = running[:, ends].diff(dim=2)[..., 0]  # [H|1, shares]
        if len(work) == 1:
            pairs = work[0] * heads
        else:
            pairs = torch.stack([work[part.heads, n].sum() for n, (_, part) in enumerate(found)])
        entries = ends.diff(dim=1)[:, 0] * heads
        for total, of_share in ((self.pairs, pairs), (self.entries, entries), (self.shares, entries > 0)):
            total.index_add_(0, rank, of_share.to(torch.int64))
        self.largest.scatter_reduce_(0, rank, entries, "amax")

    def _trade(self, place: int, found: list[tuple[int, Stretch]]) -> None:
        """Rows of all members come to one, and the results go back; gradients the other way round."""
        line, rows = self.ranks.line(place), self.ranks.lines[place]
        here = slice(line.start, line.stop)
        owner = torch.tensor([member for member, _ in found], dtype=torch.int64)
        heads = torch.tensor([count(part.heads) for _, part in found], dtype=torch.int64)
        # a share is a stretch of the line's rows, so its ends say how many of a rank's rows are in it
        ends = torch.tensor(
            [[int(rows[p.start]), int(rows[p.stop - 1]) + 1] for _, p in found], dtype=torch.int64
        ).view(-1, 2)
        of_rows, of_keys = (torch.zeros(len(line), dtype=torch.bool) for _ in range(2))
        for number, peer in enumerate(line):
            common = torch.searchsorted(self.ranks.rows[peer], ends).diff(dim=1)[:, 0] * heads
            entries = torch.zeros(len(line), dtype=torch.int64).index_add_(0, owner, common)
            keys = self._key_heads * self.ranks.keys[peer].numel()
            for sent, leave, come, stay, said in (
                (entries, self.rows_leave, self.rows_come, self.rows_stay, of_rows),
                (keys, self.keys_leave, self.keys_come, self.keys_stay, of_keys),
            ):
                stay[peer] = sent[number]
                sent[number] = 0
                leave[peer] = sent.sum()
                come[here] += sent
                said |= sent > 0
                said[number] |= bool(sent.any())
        self.trades[here] = 2 * of_rows + of_keys.to(torch.int64)


class Counts:
    """The counts of one strategy with one placement.

    Args:
        arriving: keys that each place asks of each other, int64 [R, R].
    """

    def __init__(self, strategy: Strategy, work: Work, arriving: Tensor, sizes: Sizes) -> None:
        self.strategy, self.work, self.arriving, self.sizes = strategy, work, arriving, sizes
        self.of_key = (sizes.qk_dim + sizes.v_dim) * sizes.entry
        """Bytes of a key and its value, of one head."""
        self.key_heads = work.ranks.key_heads
        asked, came = (self.by_rank(arriving.sum(dim)) * self.of_key for dim in (0, 1))
        self.in_rounds = came
        """Bytes of keys that come to a rank in rounds."""
        row, back = sizes.qk_dim * sizes.entry, sizes.v_dim * sizes.entry
        self.forward = asked + work.rows_leave * row + work.rows_come * (back + sizes.lse)
        self.forward += work.keys_leave * self.of_key
        # keys come again, and their gradients go back
        self.backward = asked + came + work.rows_leave * back + work.rows_come * row
        self.backward += work.keys_come * self.of_key

    def by_rank(self, of_place: Tensor) -> Tensor:
        """Keys [R, ..] that each place gets or gives, times the key heads of each member: [W, ..]."""
        heads = self.key_heads.view(-1, *(1,) * (of_place.dim() - 1))
        return (of_place.unsqueeze(1) * heads).flatten(0, 1)

    @cached_property
    def came(self) -> Tensor:
        """Keys that come to each place in each round, int64 [R, rounds]: in round t from place - t."""
        place = torch.arange(self.work.ranks.ring)
        return self.arriving.gather(1, (place[:, None] - place) % self.work.ranks.ring)

    @cached_property
    def gone(self) -> Tensor:
        """Keys that each place sends in each round, int64 [R, rounds]: in round t to place + t."""
        place = torch.arange(self.work.ranks.ring)
        return self.arriving[(place[:, None] + place) % self.work.ranks.ring, place[:, None]]

    @property
    def groups(self) -> int:
        """Groups of heads that an all-gather goes by."""
        return len(head_groups(self.work.ranks.span(0)))

    @property
    def shape(self) -> tuple[int, int]:
        """The mesh [ring, heads]."""
        return self.work.ranks.ring, self.work.ranks.members

    @property
    def pairs(self) -> Tensor:
        """Allowed pairs of every rank, over batch elements and heads."""
        return self.work.pairs

    @property
    def flops_of_pair(self) -> float:
        """Of one allowed pair, forward and backward: 2 products and 5, of 2 FLOP an entry."""
        return 2 * (self.sizes.qk_dim + self.sizes.v_dim) * 3.5

    @property
    def steps(self) -> Tensor:
        """Exchanges that a rank takes part in, of a forward pass: rounds, and up to three trades of rows for heads."""
        if self.strategy == "all_gather":
            rounds = ((self.arriving.sum(0) + self.arriving.sum(1)) > 0) * self.groups
        else:
            rounds = ((self.came + self.gone) > 0).sum(1)
        return rounds.repeat_interleave(self.work.ranks.members) + self.work.trades


def _zeros(number: int, world: int) -> list[Tensor]:
    return [torch.zeros(world, dtype=torch.int64) for _ in range(number)]

"""Bytes, exchanges and pairs of one strategy with one placement, for every rank, as `Traffic` counts them in a run.

A mesh has R ring positions with a group of A ranks each; rank = position * A + member. Counts are int64 [W].
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from undivided.context_parallel._index import count
from undivided.context_parallel._schedule import MeshRanks, Strategy
from undivided.context_parallel.strategies.all_gather import head_groups
from undivided.context_parallel.strategies.all_to_all import ShareRange
from undivided.request.result import lse_dtype


@dataclass(frozen=True)
class PlanSizes:
    """The sizes of a call, and the dtype of q, k and v."""

    batch: int
    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    dtype: torch.dtype

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry of q, k, v or the output, over all batch elements."""
        return self.batch * self.dtype.itemsize

    @property
    def lse_bytes(self) -> int:
        """Bytes of one log-sum-exp, or of one entry of a sum, over all batch elements."""
        return self.batch * lse_dtype(self.dtype).itemsize


class Work:
    """What every rank of a mesh computes and exchanges in the all-to-all; the same for every strategy on that mesh.

    per_head: the allowed pairs of every head and row, int64 [H|1, Sq]; see `head_pairs`.
    pairs: allowed pairs, summed over batch elements and heads.
    shares, entries, largest: number of shares, rows x heads of all shares, and of the largest one.
    rows_sent, rows_received, rows_kept: rows x heads that a rank sends to its group, receives from it, and keeps.
    keys_sent, keys_received, keys_kept: the same of keys x key heads.
    exchanges: all-to-all exchanges of a forward pass in which the rank takes part.
    """

    def __init__(self, ranks: MeshRanks, per_head: Tensor) -> None:
        self.ranks, self._key_heads = ranks, ranks.key_heads
        world = ranks.ring_world * ranks.group_size
        self.pairs, self.shares, self.entries, self.largest = _zeros(4, world)
        self.rows_sent, self.rows_received, self.rows_kept, self.exchanges = _zeros(4, world)
        self.keys_sent, self.keys_received, self.keys_kept = _zeros(3, world)
        for place in range(ranks.ring_world):
            shares = [(m, share) for m in range(ranks.group_size) for share in ranks.share_ranges(place, m)]
            if shares:
                self._count_work(place, shares, per_head)
            if ranks.group_size > 1:
                self._count_exchange(place, shares)

    def _count_work(self, place: int, shares: list[tuple[int, ShareRange]], per_head: Tensor) -> None:
        """Count pairs and entries of the (member, share) of one group."""
        rows, first = self.ranks.group_rows[place], place * self.ranks.group_size
        cumulative = torch.nn.functional.pad(per_head.index_select(1, rows).cumsum(1), (1, 0))
        rank = torch.tensor([first + member for member, _ in shares])
        heads = torch.tensor([count(share.heads) for _, share in shares])
        ends = torch.tensor([[share.start, share.stop] for _, share in shares])
        work = cumulative[:, ends].diff(dim=2)[..., 0]  # [H|1, shares]
        if len(work) == 1:
            pairs = work[0] * heads
        else:
            pairs = torch.stack([work[share.heads, n].sum() for n, (_, share) in enumerate(shares)])
        entries = ends.diff(dim=1)[:, 0] * heads
        for total, values in ((self.pairs, pairs), (self.entries, entries), (self.shares, entries > 0)):
            total.index_add_(0, rank, values.to(torch.int64))
        self.largest.scatter_reduce_(0, rank, entries, "amax")

    def _count_exchange(self, place: int, shares: list[tuple[int, ShareRange]]) -> None:
        """Count what the ranks of one group exchange: rows, keys, and the results on the way back."""
        group, rows = self.ranks.group(place), self.ranks.group_rows[place]
        here = slice(group.start, group.stop)
        owner = torch.tensor([member for member, _ in shares], dtype=torch.int64)
        heads = torch.tensor([count(share.heads) for _, share in shares], dtype=torch.int64)
        # a share is a range of the group's rows, so its ends say how many of a rank's rows are in it
        ends = torch.tensor(
            [[int(rows[share.start]), int(rows[share.stop - 1]) + 1] for _, share in shares], dtype=torch.int64
        ).view(-1, 2)
        takes_rows, takes_keys = (torch.zeros(len(group), dtype=torch.bool) for _ in range(2))
        for number, peer in enumerate(group):
            common = torch.searchsorted(self.ranks.rows[peer], ends).diff(dim=1)[:, 0] * heads
            entries = torch.zeros(len(group), dtype=torch.int64).index_add_(0, owner, common)
            keys = self._key_heads * self.ranks.keys[peer].numel()
            for to_members, sent, received, kept, takes_part in (
                (entries, self.rows_sent, self.rows_received, self.rows_kept, takes_rows),
                (keys, self.keys_sent, self.keys_received, self.keys_kept, takes_keys),
            ):
                kept[peer] = to_members[number]
                to_members[number] = 0
                sent[peer] = to_members.sum()
                received[here] += to_members
                takes_part |= to_members > 0
                takes_part[number] |= bool(to_members.any())
        self.exchanges[here] = 2 * takes_rows + takes_keys.to(torch.int64)


class Counts:
    """The counts of one strategy with one placement.

    arrivals: the keys that each ring position needs from every other, int64 [R, R]; see `count_arrivals`.
    """

    def __init__(self, strategy: Strategy, work: Work, arrivals: Tensor, sizes: PlanSizes) -> None:
        self.strategy, self.work, self.arrivals, self.sizes = strategy, work, arrivals, sizes
        self.key_bytes = (sizes.qk_dim + sizes.v_dim) * sizes.entry_bytes
        """Bytes of a key and its value, of one head."""
        self.key_heads = work.ranks.key_heads
        sent, received = (self.by_rank(arrivals.sum(dim)) * self.key_bytes for dim in (0, 1))
        self.round_bytes = received
        """Bytes of keys that a rank receives in rounds."""
        row, back = sizes.qk_dim * sizes.entry_bytes, sizes.v_dim * sizes.entry_bytes
        self.forward = sent + work.rows_sent * row + work.rows_received * (back + sizes.lse_bytes)
        self.forward += work.keys_sent * self.key_bytes
        # keys are sent again, and their gradients return
        self.backward = sent + received + work.rows_sent * back + work.rows_received * row
        self.backward += work.keys_received * self.key_bytes

    def by_rank(self, per_position: Tensor) -> Tensor:
        """Keys [R, ..] per ring position times the key heads of each member: [W, ..]."""
        heads = self.key_heads.view(-1, *(1,) * (per_position.dim() - 1))
        return (per_position.unsqueeze(1) * heads).flatten(0, 1)

    @cached_property
    def received(self) -> Tensor:
        """The keys that each ring position receives per round, int64 [R, rounds]: in round t from position - t."""
        place = torch.arange(self.work.ranks.ring_world)
        return self.arrivals.gather(1, (place[:, None] - place) % self.work.ranks.ring_world)

    @cached_property
    def sent(self) -> Tensor:
        """The keys that each ring position sends per round, int64 [R, rounds]: in round t to position + t."""
        place = torch.arange(self.work.ranks.ring_world)
        return self.arrivals[(place[:, None] + place) % self.work.ranks.ring_world, place[:, None]]

    @property
    def head_groups(self) -> int:
        """The number of head groups of an all-gather."""
        return len(head_groups(self.work.ranks.kv_span(0)))

    @property
    def steps(self) -> Tensor:
        """The exchanges of a forward pass in which a rank takes part: rounds, and up to three all-to-alls."""
        if self.strategy == "all_gather":
            rounds = ((self.arrivals.sum(0) + self.arrivals.sum(1)) > 0) * self.head_groups
        else:
            rounds = ((self.received + self.sent) > 0).sum(1)
        return rounds.repeat_interleave(self.work.ranks.group_size) + self.work.exchanges


def _zeros(number: int, world: int) -> list[Tensor]:
    return [torch.zeros(world, dtype=torch.int64) for _ in range(number)]

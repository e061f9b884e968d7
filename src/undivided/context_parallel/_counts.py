"""Bytes, exchanges, pairs and memory of one strategy with one placement, for every rank, as a run would count them.

A mesh is R places on the ring of A members each; rank = place * A + member, and counts are int64 [W].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from undivided._result import lse_dtype
from undivided.context_parallel._index import count
from undivided.context_parallel._pieces import Share
from undivided.context_parallel._schedule import Ranks, Strategy
from undivided.context_parallel.all_gather import head_groups


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


class Counts:
    """The counts of one strategy with one placement.

    Args:
        ranks: who holds and computes what.
        arriving: keys that each place asks of each other, int64 [R, R].
        per_head: allowed pairs of every head and row, int64 [H|1, Sq].
    """

    def __init__(
        self, strategy: Strategy, ranks: Ranks, arriving: Tensor, per_head: Tensor, sizes: Sizes
    ) -> None:
        self._strategy, self._ranks, self._arriving, self._sizes = strategy, ranks, arriving, sizes
        world = ranks.ring * ranks.members
        spans = [count(ranks.span(member)) for member in range(ranks.members)]
        self._key_bytes = torch.tensor(spans) * (sizes.qk_dim + sizes.v_dim) * sizes.entry
        asked, came = (arriving.sum(dim)[:, None] * self._key_bytes for dim in (0, 1))
        self.forward, self.backward = asked.flatten(), (asked + came).flatten()
        """Keys come, in the backward again, and their gradients go back."""
        self.rounds = self._rounds()
        self.in_rounds = came.flatten()
        """Bytes of keys that come to a rank in rounds."""
        self.pairs, self.trades, self._traded = (torch.zeros(world, dtype=torch.int64) for _ in range(3))
        for place in range(ranks.ring):
            shares = [ranks.shares(place, member) for member in range(ranks.members)]
            if ranks.members > 1:
                self._trade(place, shares)
            for rank, of_rank in zip(ranks.line(place), shares, strict=True):
                self.pairs[rank] = _pairs_of(of_rank, per_head)

    @cached_property
    def _came(self) -> Tensor:
        """Keys that come to each place in each round, int64 [R, rounds]: in round t from place - t."""
        place = torch.arange(self._ranks.ring)
        return self._arriving.gather(1, (place[:, None] - place) % self._ranks.ring)

    def _rounds(self) -> Tensor:
        """Rounds in which a rank sends or gets keys."""
        ring, members = self._ranks.ring, self._ranks.members
        if self._strategy == "all_gather":
            any_keys = (self._arriving.sum(0) + self._arriving.sum(1)) > 0
            return any_keys * len(head_groups(self._ranks.span(0)))
        place = torch.arange(ring)
        to = (place[:, None] + place) % ring  # in round t to place + t
        sent = self._arriving[to, place[:, None]]
        return ((self._came + sent) > 0).sum(1).repeat_interleave(members)

    def _trade(self, place: int, members: Sequence[Sequence[Share]]) -> None:
        """Rows of all members come to one, and the results go back; gradients the other way round."""
        line, sizes = self._ranks.line(place), self._sizes
        shares = [(member, share) for member, of in enumerate(members) for share in of]
        if not shares:
            return
        owner = torch.tensor([member for member, _ in shares])
        heads = torch.tensor([count(share.heads) for _, share in shares])
        # a share is a stretch of the line's rows, so its ends say how many of a rank's rows are in it
        ends = torch.stack([torch.stack([share.rows[0], share.rows[-1] + 1]) for _, share in shares])
        here = slice(line.start, line.stop)
        rows, keys = torch.zeros(len(line), dtype=torch.bool), torch.zeros(len(line), dtype=torch.bool)
        for number, peer in enumerate(line):
            common = torch.searchsorted(self._ranks.rows[peer], ends).diff(dim=1)[:, 0] * heads
            entries = torch.zeros(len(line), dtype=torch.int64).index_add_(0, owner, common)
            of_keys = self._key_bytes * self._ranks.keys[peer].numel()
            there = entries * sizes.qk_dim * sizes.entry + of_keys
            back = entries * sizes.v_dim * sizes.entry
            self._traded[here] += there
            entries[number] = of_keys[number] = there[number] = back[number] = 0  # to itself
            self.forward[peer] += there.sum()
            self.forward[here] += back + entries * sizes.lse
            self.backward[peer] += back.sum()
            self.backward[here] += there
            for talk, said in ((rows, entries), (keys, of_keys)):
                talk |= said > 0
                talk[number] |= bool(said.any())
        self.trades[here] = 2 * rows + keys.to(torch.int64)

    @property
    def shape(self) -> tuple[int, int]:
        """The mesh [ring, heads]."""
        return self._ranks.ring, self._ranks.members

    @property
    def flops_of_pair(self) -> float:
        """Of one allowed pair, forward and backward: 2 products and 5, of 2 FLOP an entry."""
        return 2 * (self._sizes.qk_dim + self._sizes.v_dim) * 3.5

    @property
    def steps(self) -> Tensor:
        """Exchanges that a rank takes part in, of a forward pass: rounds, and up to three trades of rows for heads."""
        return self.rounds + self.trades

    @cached_property
    def memory(self) -> Tensor:
        """q, k, v, output and lse; what was traded; keys that are being used and on their way; sums in fp32."""
        sizes, ranks = self._sizes, self._ranks
        rows = torch.tensor([part.numel() for part in ranks.rows])
        keys = torch.tensor([part.numel() for part in ranks.keys])
        of_row = sizes.heads * ((sizes.qk_dim + sizes.v_dim) * sizes.entry + sizes.lse)
        of_key = sizes.kv_heads * (sizes.qk_dim + sizes.v_dim)
        used = self._key_buffers(keys)
        sums = rows * sizes.heads * (sizes.qk_dim + sizes.v_dim + 1) * sizes.lse
        gradients = keys * of_key * sizes.lse + used * sizes.lse // sizes.entry
        return rows * of_row + keys * of_key * sizes.entry + self._traded + used + sums + gradients

    def _key_buffers(self, keys: Tensor) -> Tensor:
        """Bytes of others' keys here at one time: of two rounds, or of two groups of heads and their copy in order."""
        if self._strategy == "all_gather":
            groups = len(head_groups(self._ranks.span(0)))
            return (3 * self._arriving.sum(1) + keys) * self._key_bytes // groups
        following = self._came.roll(-1, 1)
        return ((self._came + following).max(1).values[:, None] * self._key_bytes).flatten()


def _pairs_of(shares: Sequence[Share], per_head: Tensor) -> int:
    total = 0
    for share in shares:
        some = per_head if per_head.shape[0] == 1 else per_head[share.heads]
        repeated = count(share.heads) // max(some.shape[0], 1)
        total += int(some.index_select(1, share.rows).sum()) * repeated
    return total

"""The work of one rank for one mask, sizes and placement: what it computes, and what it sends and receives.

Every strategy has two steps:

    heads     all-to-all: rows are exchanged for heads; nothing if the heads axis has one rank
    rounds    ring or all-gather: which keys arrive when; only its own if the ring axis has one rank

Ranks form a mesh [ring, heads]; rank = ring * heads_world + heads. The ranks at one ring position are a *group*: they
exchange rows for heads with one another. A schedule holds no tensors of a call, so it is built once per mask and cached
on the mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from undivided.context_parallel._index import count
from undivided.context_parallel._pieces import Round, Share
from undivided.context_parallel.sharding import Placement, row_pairs
from undivided.context_parallel.strategies import all_gather, all_to_all, ring
from undivided.context_parallel.strategies.all_to_all import HeadExchange, ShareRange
from undivided.masks import NormalForm

Strategy = Literal["ring", "all_gather", "all_to_all", "ring+all_to_all"]
STRATEGIES: tuple[Strategy, ...] = ("ring", "all_gather", "all_to_all", "ring+all_to_all")


@dataclass(frozen=True)
class Mesh:
    """A rank's coordinates in the mesh [ring, heads]."""

    ring: int
    heads: int
    ring_world: int
    heads_world: int

    @staticmethod
    def from_rank(rank: int, ring_world: int, heads_world: int) -> Mesh:
        """The coordinates of a rank in a mesh of this shape."""
        return Mesh(*divmod(rank, heads_world), ring_world, heads_world)

    @property
    def rank(self) -> int:
        """The rank at these coordinates."""
        return self.ring * self.heads_world + self.heads

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.ring_world * self.heads_world


@dataclass(frozen=True, eq=False)
class Schedule:
    """What one rank does in a call.

    queries, keys: the all-to-all exchanges. shares: the rows and query heads that this rank computes.
    kv_heads: the key heads that this rank has after the exchange.
    rounds: the keys that arrive, and the pieces that are computed with them, in order.
    """

    queries: HeadExchange
    keys: HeadExchange
    shares: tuple[Share, ...]
    kv_heads: slice
    rounds: tuple[Round, ...]


class MeshRanks:
    """What every rank of a mesh [ring, heads] holds and computes, in global positions.

    rows, keys: of every rank. group_rows, group_keys: of all ranks at one ring position together, ascending.
    """

    def __init__(
        self, form: NormalForm, placement: Placement, shape: tuple[int, int], heads: int, kv_heads: int
    ) -> None:
        device = form.ranges.device
        self.ring_world, self.group_size = shape
        self._heads = heads, kv_heads
        self.rows = [positions.to(device) for positions in placement.q]
        self.keys = self.rows if placement.kv is placement.q else [positions.to(device) for positions in placement.kv]
        self.group_rows = [self._positions(self.rows, place) for place in range(self.ring_world)]
        same = self.keys is self.rows
        self.group_keys = (
            self.group_rows if same else [self._positions(self.keys, place) for place in range(self.ring_world)]
        )
        self._pairs = row_pairs(form) if self.group_size > 1 else None
        self._work: dict[int, Tensor] = {}

    def group(self, place: int) -> range:
        """The ranks at a ring position."""
        return range(place * self.group_size, (place + 1) * self.group_size)

    def _positions(self, positions: Sequence[Tensor], place: int) -> Tensor:
        """The positions that the ranks at a ring position hold together, ascending."""
        group_positions = [positions[rank] for rank in self.group(place)]
        if len(group_positions) == len(positions):  # every position: nothing to sort
            return torch.arange(sum(map(torch.Tensor.numel, positions)), device=positions[0].device)
        return group_positions[0] if len(group_positions) == 1 else torch.cat(group_positions).sort().values

    def share_ranges(self, place: int, member: int) -> tuple[ShareRange, ...]:
        """The shares of a rank, as heads and ranges of the rows of its group."""
        rows = self.group_rows[place]
        if place not in self._work:
            work = rows.new_zeros(0) if self._pairs is None else all_to_all.cumulative_work(self._pairs, rows)
            self._work[place] = work
        return all_to_all.share_ranges(self._work[place], member, self.group_size, *self._heads, rows.numel())

    def shares(self, place: int, member: int) -> tuple[Share, ...]:
        """The shares that a rank computes."""
        rows = self.group_rows[place]
        return tuple(Share(h, kv, rows[start:stop]) for h, kv, start, stop in self.share_ranges(place, member))

    @property
    def key_heads(self) -> Tensor:
        """The number of key heads of each member of a group, int64 [A]."""
        return torch.tensor([count(self.kv_span(member)) for member in range(self.group_size)], device="cpu")

    def kv_span(self, member: int) -> slice:
        """The key heads of a member, the same in every group."""
        return all_to_all.kv_span(member, self.group_size, *self._heads)


def build(
    form: NormalForm,
    placement: Placement,
    strategy: Strategy,
    mesh: Mesh,
    heads: int,
    kv_heads: int,
    with_positions: bool,
) -> Schedule:
    """The schedule of one rank.

    form: of the mask of the whole sequence. with_positions: ALiBi or dropout depend on positions.
    """
    ranks = MeshRanks(form, placement, (mesh.ring_world, mesh.heads_world), heads, kv_heads)
    members = range(mesh.heads_world)
    group, group_keys = ranks.group(mesh.ring), ranks.group_keys[mesh.ring]
    group_shares = [ranks.shares(mesh.ring, member) for member in members]
    row_targets = [[(share.rows, share.heads) for share in shares] for shares in group_shares]
    key_targets = [[(group_keys, ranks.kv_span(member))] for member in members]
    queries = HeadExchange.build(mesh.heads, [ranks.rows[rank] for rank in group], row_targets, heads)
    keys = HeadExchange.build(mesh.heads, [ranks.keys[rank] for rank in group], key_targets, kv_heads)
    own = group_shares[mesh.heads]
    ring_shares = [own if p == mesh.ring else ranks.shares(p, mesh.heads) for p in range(mesh.ring_world)]
    kv_span = ranks.kv_span(mesh.heads)
    build_rounds: Callable[..., tuple[Round, ...]] = all_gather.rounds if strategy == "all_gather" else ring.rounds
    rounds = build_rounds(form, mesh.ring, ring_shares, ranks.group_keys, kv_span, with_positions)
    return Schedule(queries, keys, own, kv_span, rounds)

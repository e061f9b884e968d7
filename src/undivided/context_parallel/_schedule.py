"""The whole of what one rank does for one mask, sizes and placement: who computes what, and what is sent for it.

    heads     which rows and heads are traded (all-to-all), nothing where the group of heads is one rank
    rounds    which keys come when (ring or all-gather), its own where the ring is one rank

Every strategy is these two, one after the other. Ranks stand in a mesh [ring, heads]; rank = ring * (ranks of heads) +
heads. A schedule holds no tensors of a call, so it is made once for a mask and kept with it.
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
from undivided.context_parallel.strategies.all_to_all import HeadExchange, Stretch
from undivided.masks import NormalForm

Strategy = Literal["ring", "all_gather", "all_to_all", "ring+all_to_all"]
STRATEGIES: tuple[Strategy, ...] = ("ring", "all_gather", "all_to_all", "ring+all_to_all")


@dataclass(frozen=True)
class Mesh:
    """A place in the mesh [ring, heads]."""

    ring: int
    heads: int
    ring_world: int
    heads_world: int

    @staticmethod
    def of(strategy: Strategy, rank: int, ring_world: int, heads_world: int) -> Mesh:
        """Of a rank. A mesh of one axis lies along the ring, or along the heads for "all_to_all"."""
        return Mesh(*divmod(rank, heads_world), ring_world, heads_world)


@dataclass(frozen=True, eq=False)
class Schedule:
    """queries, keys: how rows are traded for heads. shares: what this rank computes. rounds: against which keys, when.

    kv_heads: the key heads that this rank has after the trade.
    """

    queries: HeadExchange
    keys: HeadExchange
    shares: tuple[Share, ...]
    kv_heads: slice
    rounds: tuple[Round, ...]

    @property
    def pairs(self) -> int:
        """Allowed pairs that this rank computes, over batch elements and heads."""
        return sum(piece.pairs for round_ in self.rounds for piece in round_.pieces)


class Ranks:
    """Who holds what and who computes what, of all ranks of a mesh [ring, heads].

    rows, keys: of every rank. lines, key_lines: of the ranks at one place on the ring together. All global positions.
    """

    def __init__(
        self, form: NormalForm, placement: Placement, shape: tuple[int, int], heads: int, kv_heads: int
    ) -> None:
        device = form.ranges.device
        self.ring, self.members = shape
        self._heads = heads, kv_heads
        self.rows = [part.to(device) for part in placement.q]
        self.keys = self.rows if placement.kv is placement.q else [part.to(device) for part in placement.kv]
        self.lines = [self._together(self.rows, place) for place in range(self.ring)]
        same = self.keys is self.rows
        self.key_lines = self.lines if same else [self._together(self.keys, place) for place in range(self.ring)]
        self._pairs = row_pairs(form) if self.members > 1 else None
        self._work: dict[int, Tensor] = {}

    def line(self, place: int) -> range:
        """The ranks at a place on the ring: those that trade heads with one another."""
        return range(place * self.members, (place + 1) * self.members)

    def _together(self, parts: Sequence[Tensor], place: int) -> Tensor:
        some = [parts[rank] for rank in self.line(place)]
        if len(some) == len(parts):  # every position, so that there is nothing to sort
            return torch.arange(sum(map(torch.Tensor.numel, parts)), device=parts[0].device)
        return some[0] if len(some) == 1 else torch.cat(some).sort().values

    def stretches(self, place: int, member: int) -> tuple[Stretch, ...]:
        """What a rank computes, in numbers of the rows of its line."""
        rows = self.lines[place]
        if place not in self._work:
            work = rows.new_zeros(0) if self._pairs is None else all_to_all.running_work(self._pairs, rows)
            self._work[place] = work
        return all_to_all.stretches(self._work[place], member, self.members, *self._heads, rows.numel())

    def shares(self, place: int, member: int) -> tuple[Share, ...]:
        """What a rank computes."""
        rows = self.lines[place]
        return tuple(Share(h, kv, rows[start:stop]) for h, kv, start, stop in self.stretches(place, member))

    @property
    def key_heads(self) -> Tensor:
        """How many key heads each member of a line has, int64 [A]."""
        return torch.tensor([count(self.span(member)) for member in range(self.members)])

    def span(self, member: int) -> slice:
        """The key heads that a member of every line has."""
        return all_to_all.kv_span(member, self.members, *self._heads)


def build(
    form: NormalForm,
    placement: Placement,
    strategy: Strategy,
    mesh: Mesh,
    heads: int,
    kv_heads: int,
    with_positions: bool,
) -> Schedule:
    """The schedule of one rank; ``form`` is the whole mask's. With positions: ALiBi or dropout look at them."""
    ranks = Ranks(form, placement, (mesh.ring_world, mesh.heads_world), heads, kv_heads)
    line, whole = ranks.line(mesh.ring), ranks.key_lines[mesh.ring]
    members = [ranks.shares(mesh.ring, member) for member in range(mesh.heads_world)]
    queries = HeadExchange.of(
        mesh.heads, [ranks.rows[r] for r in line], [[(s.rows, s.heads) for s in shares] for shares in members], heads
    )
    keys = HeadExchange.of(
        mesh.heads, [ranks.keys[r] for r in line], [[(whole, ranks.span(m))] for m in range(mesh.heads_world)], kv_heads
    )
    mine = members[mesh.heads]
    on_ring = [mine if p == mesh.ring else ranks.shares(p, mesh.heads) for p in range(mesh.ring_world)]
    make: Callable[..., tuple[Round, ...]] = all_gather.rounds if strategy == "all_gather" else ring.rounds
    rounds = make(form, mesh.ring, on_ring, ranks.key_lines, ranks.span(mesh.heads), with_positions)
    return Schedule(queries, keys, mine, ranks.span(mesh.heads), rounds)

"""The whole of what one rank does for one mask, sizes and placement: who computes what, and what is sent for it.

    heads     which rows and heads are traded (all-to-all), nothing where the group of heads is one rank
    rounds    which keys come when (ring or all-gather), its own where the ring is one rank

Every strategy is these two, one after the other. Ranks stand in a mesh [ring, heads]; rank = ring * (ranks of heads) + heads.
A schedule holds no tensors of a call, so it is made once for a mask and kept with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from undivided.context_parallel import all_gather, all_to_all, ring
from undivided.context_parallel._pieces import Round, Share
from undivided.context_parallel.all_to_all import HeadExchange, kv_span
from undivided.context_parallel.sharding import Placement
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

    def line(self, place: int) -> range:
        """The ranks that trade heads with one another at a place on the ring."""
        return range(place * self.heads_world, (place + 1) * self.heads_world)


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


def build(
    form: NormalForm, placement: Placement, strategy: Strategy, mesh: Mesh, heads: int, kv_heads: int, with_positions: bool
) -> Schedule:  # fmt: skip
    """The schedule of one rank; ``form`` is the whole mask's. With positions: ALiBi or dropout look at them."""
    device = form.ranges.device
    rows = [part.to(device) for part in placement.q]
    keys = rows if placement.kv is placement.q else [part.to(device) for part in placement.kv]
    lines = [_sorted([rows[r] for r in mesh.line(place)]) for place in range(mesh.ring_world)]
    key_lines = [_sorted([keys[r] for r in mesh.line(place)]) for place in range(mesh.ring_world)]

    def shares_of(place: int, member: int) -> tuple[Share, ...]:
        return all_to_all.shares(form, member, mesh.heads_world, heads, kv_heads, lines[place])

    members = [shares_of(mesh.ring, member) for member in range(mesh.heads_world)]
    line = mesh.line(mesh.ring)
    queries = HeadExchange.of(
        mesh.heads, [rows[r] for r in line], [[(s.rows, s.heads) for s in shares] for shares in members]
    )
    whole = key_lines[mesh.ring]
    spans = [kv_span(member, mesh.heads_world, heads, kv_heads) for member in range(mesh.heads_world)]
    traded = HeadExchange.of(mesh.heads, [keys[r] for r in line], [[(whole, span)] for span in spans])
    mine = spans[mesh.heads]
    on_ring = [
        members[mesh.heads] if p == mesh.ring else shares_of(p, mesh.heads) for p in range(mesh.ring_world)
    ]
    make: Callable[..., tuple[Round, ...]] = all_gather.rounds if strategy == "all_gather" else ring.rounds
    rounds = make(form, mesh.ring, on_ring, key_lines, mine, with_positions)
    return Schedule(queries, traded, members[mesh.heads], mine, rounds)


def _sorted(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts).sort().values

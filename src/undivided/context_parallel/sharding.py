"""Which rank holds which token: placements, and the maps between global positions and a rank's own.

A placement is one number a token, its owner. Three ways to choose it:

    contiguous   rank r holds the r-th of `world` equal stretches
    zigzag       2 * world equal chunks, rank r holds chunks r and 2 * world - 1 - r; packed: of every document
    balanced     equal chunks, as many for every rank, dealt so that each has the same number of allowed pairs

Under a causal mask row i costs i + 1 pairs, so that contiguous gives the last rank almost twice the mean, and zigzag
(an early chunk with a late one) the same to all. No length has to be divisible by anything: chunks differ by a token.

A rank's tokens stay in ascending order of global position. Legend: S tokens, W ranks.

Source: zigzag is the load balancing of Llama 3's and TransformerEngine's context parallelism ("dual chunk swap").
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from undivided.masks import Mask, NormalForm
from undivided.masks._parts import Dense, DocumentIds, Lengths

PlacementName = Literal["zigzag", "contiguous", "balanced"]
PLACEMENTS: tuple[PlacementName, ...] = ("zigzag", "contiguous", "balanced")
Side = Literal["q", "kv"]

EVEN_ENOUGH = 1.01
"""Largest over mean pairs at which `balanced` stops cutting finer: one percent of a step's time is not worth more
pieces."""

MOST_CHUNKS = 64
"""Chunks a rank in the finest cut of `balanced`: each is a stretch of keys that others ask for on its own."""

_MIX = (6364136223846793005, 1442695040888963407)


@dataclass(frozen=True, eq=False)
class Placement:
    """The owner of every token: int64 ``[q_len]`` and ``[kv_len]``, the same tensor where queries and keys are one
    sequence.

    >>> placement = Placement.of("zigzag", 2, 8, None)
    >>> [rows.tolist() for rows in placement.q]
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    """

    world: int
    q_owner: Tensor
    kv_owner: Tensor

    @staticmethod
    def of(
        name: PlacementName,
        world: int,
        q_len: int,
        kv_len: int | None,
        mask: Mask | None = None,
        form: NormalForm | None = None,
    ) -> Placement:
        """The placement of that name; ``kv_len`` None: keys are the same tokens as queries. `balanced` needs the
        form."""
        if name == "balanced":
            assert form is not None
            q_owner = balanced(row_pairs(form), world)
            return Placement(world, q_owner, q_owner if kv_len is None else contiguous(kv_len, world))
        place = functools.partial(_named, name, world)
        q_owner = place(q_len, document_edges(mask, "q", q_len))
        if kv_len is None:
            return Placement(world, q_owner, q_owner)
        return Placement(world, q_owner, place(kv_len, document_edges(mask, "kv", kv_len)))

    @cached_property
    def q(self) -> tuple[Tensor, ...]:
        """Global positions of each rank's query rows, int64, ascending."""
        return _by_owner(self.q_owner, self.world)

    @cached_property
    def kv(self) -> tuple[Tensor, ...]:
        """Global positions of each rank's keys, int64, ascending."""
        return self.q if self.kv_owner is self.q_owner else _by_owner(self.kv_owner, self.world)

    def rows(self, side: Side) -> tuple[Tensor, ...]:
        """`q` or `kv`."""
        return self.q if side == "q" else self.kv

    def length(self, side: Side) -> int:
        """Tokens of all ranks together."""
        return (self.q_owner if side == "q" else self.kv_owner).numel()

    @cached_property
    def order(self) -> dict[Side, Tensor]:
        """Where each global position lies in the ranks' shards one after another: the inverse of sharding."""
        sides: tuple[Side, Side] = ("q", "kv")
        return {side: torch.cat(self.rows(side)).argsort() for side in sides}

    @cached_property
    def digest(self) -> int:
        """A number that two different placements almost never share."""
        total = torch.zeros((), dtype=torch.int64)
        for owner in (self.q_owner, self.kv_owner):
            index = torch.arange(owner.numel()) * _MIX[0] + _MIX[1]
            total = total * _MIX[0] + ((owner + 1) * (index ^ (index >> 29))).sum() + owner.numel()
        return int(total)


def contiguous(length: int, world: int) -> Tensor:
    """Owners of equal stretches, int64 [length].

    >>> contiguous(5, 2).tolist()
    [0, 0, 1, 1, 1]
    """
    return _cell(torch.arange(length), torch.tensor(length), world)


def zigzag(length: int, world: int, edges: Sequence[int]) -> Tensor:
    """Owners by a pair of chunks of every document, int64 [length]; ``edges`` run from 0 to length.

    What does not divide is handed out in turn: the chunks of a document start one rank further for every token by which
    those before it left the ranks unequal. Where all divide, rank r has chunks r and 2 * world - 1 - r of each.

    >>> zigzag(8, 2, [0, 8]).tolist(), zigzag(8, 2, [0, 4, 8]).tolist()
    ([0, 0, 1, 1, 1, 1, 0, 0], [0, 1, 1, 0, 0, 1, 1, 0])
    """
    cuts = torch.tensor(edges)
    sizes = cuts.diff()
    token = torch.arange(length)
    document = torch.searchsorted(cuts, token, right=True) - 1
    chunk = _cell(token - cuts[document], sizes[document], 2 * world)
    rank = torch.where(chunk < world, chunk, 2 * world - 1 - chunk)
    left_over = sizes % (2 * world)
    return (rank + (left_over.cumsum(0) - left_over)[document]) % world


def balanced(pairs: Tensor, world: int) -> Tensor:
    """Owners so that every rank has as many tokens and as much of ``pairs`` (a number for every row), int64 [rows].

    Equal chunks are dealt heaviest first to the rank with the least, as many to each. The coarsest cut that is even
    enough is taken, for its long stretches: where rows cost the same, that is contiguous; for a causal mask, zigzag.

    >>> balanced(torch.arange(8), 2).tolist()
    [0, 0, 1, 1, 1, 1, 0, 0]
    """
    length = pairs.numel()
    best: tuple[float, Tensor] | None = None
    running = torch.nn.functional.pad(pairs.to(torch.float64).cumsum(0), (1, 0))
    chunks = 1
    while chunks <= MOST_CHUNKS and (best is None or chunks * world <= length):
        cell = _cell(torch.arange(length), torch.tensor(length), chunks * world)
        edges = torch.searchsorted(cell, torch.arange(chunks * world + 1))
        owner = torch.tensor(_dealt(running[edges].diff().tolist(), world))[cell]
        spread = imbalance(torch.zeros(world, dtype=torch.float64).index_add_(0, owner, pairs.to(torch.float64)))
        if best is None or spread < best[0]:
            best = spread, owner
        if spread <= EVEN_ENOUGH:
            break
        chunks *= 2
    assert best is not None
    return best[1]


def _dealt(work: Sequence[float], world: int) -> list[int]:
    """The rank of each chunk: heaviest first, to the rank with the least work that has room."""
    room = len(work) // world
    owners = [0] * len(work)
    ranks = [(0.0, rank, 0) for rank in range(world)]
    for chunk in sorted(range(len(work)), key=lambda c: (-work[c], c)) if room > 1 else range(len(work)):
        has, rank, count = heapq.heappop(ranks)
        owners[chunk] = rank
        if count + 1 < room:
            heapq.heappush(ranks, (has + work[chunk], rank, count + 1))
    return owners


def imbalance(work: Tensor) -> float:
    """Largest over mean; 1 where there is nothing to do."""
    mean = float(work.to(torch.float64).mean())
    return float(work.max()) / mean if mean > 0 else 1.0


def row_pairs(form: NormalForm) -> Tensor:
    """Allowed pairs of every row over all batch elements and heads, int64 [Sq]. From ranges alone O(S)."""
    pairs = head_pairs(form)
    together: Tensor = pairs.sum(0) * (form.heads // max(pairs.shape[0], 1))
    return together


def head_pairs(form: NormalForm) -> Tensor:
    """Allowed pairs of every head and row over all batch elements, int64 [H|1, Sq]; 1 where heads have the same."""
    if form.exact:
        spans = form.ranges.to(torch.int64).unflatten(-1, (-1, 2)).diff(dim=-1).sum((-1, -2))[:, None]
    else:
        spans = form.counts(range(form.q_len + 1), [0, form.kv_len])[..., 0]
    pairs: Tensor = spans.sum(0) * (form.batch // max(spans.shape[0], 1))
    return pairs


def document_edges(mask: Mask | None, side: Side, length: int) -> tuple[int, ...]:
    """Where the documents of the mask begin in memory, from 0 to length; (0, length) where it has none."""
    documents = None if mask is None else mask.take("documents")[0]
    if documents is None:
        return (0, length) if length else (0,)
    offsets = getattr(documents, f"padded_{side}")
    offsets = getattr(documents, f"cu_seqlens_{side}") if offsets is None else offsets
    return tuple(sorted({0, length, *(min(int(edge), length) for edge in offsets.tolist())}))


def sizes_of(mask: Mask) -> tuple[int, int]:
    """Batch elements and heads that the mask tells apart."""
    batch, heads = 1, 1
    for part in mask.parts:
        if isinstance(part, Lengths):
            batch = max(batch, part.kv.shape[0])
        elif isinstance(part, DocumentIds):
            batch = max(batch, part.ids_q.shape[0])
        elif isinstance(part, Dense):
            batch, heads = max(batch, part.tensor.shape[0]), max(heads, part.tensor.shape[1])
        elif "documents" not in mask.kinds:
            batch = max([batch, *(t.shape[0] for t in part.tensors if t.dim() == 1)])
    return batch, heads


@functools.lru_cache(64)
def _named(name: PlacementName, world: int, length: int, edges: tuple[int, ...]) -> Tensor:
    return zigzag(length, world, edges) if name == "zigzag" and length else contiguous(length, world)


def _cell(index: Tensor, size: Tensor, cells: int) -> Tensor:
    """The cell of each index where cell c of ``cells`` is [c * size // cells, (c + 1) * size // cells)."""
    return ((index + 1) * cells - 1).div(size, rounding_mode="floor") if index.numel() else index


def _by_owner(owner: Tensor, world: int) -> tuple[Tensor, ...]:
    order = owner.argsort(stable=True)
    return tuple(order.split(torch.bincount(owner, minlength=world).tolist()))

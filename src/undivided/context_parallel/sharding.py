"""Which rank holds which token: placements, and the maps between global positions and those of a rank.

A placement is one number per token, its owner. There are three ways to choose it:

    contiguous   rank r holds the r-th of `world` equal ranges
    zigzag       2 * world equal chunks, rank r holds chunks r and 2 * world - 1 - r; packed: of every document
    balanced     equal chunks, the same number per rank, assigned so that all ranks have equally many allowed pairs

Under a causal mask row i has i + 1 pairs, so contiguous gives the last rank almost twice the mean, and zigzag (an early
chunk with a late one) gives all ranks the same. Lengths need not be multiples of anything: chunks differ by one token.

The tokens of a rank are in ascending order of global position. Legend: S tokens, W ranks.

Source: zigzag is the load balancing of Llama 3's and TransformerEngine's context parallelism ("dual chunk swap").
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from undivided.arguments.checks import as_integer, check_type, checked_choice
from undivided.arguments.tensors import is_traced
from undivided.context_parallel._index import HASH_FACTOR, hash_entries
from undivided.errors import InputError
from undivided.masks import Mask, NormalForm
from undivided.masks._parts import Blocks, Dense, DocumentIds, Lengths

PlacementName = Literal["zigzag", "contiguous", "balanced"]
PLACEMENTS: tuple[PlacementName, ...] = ("zigzag", "contiguous", "balanced")
Side = Literal["q", "kv"]
SIDES: tuple[Side, ...] = ("q", "kv")

MAX_IMBALANCE = 1.01
"""The imbalance at which `balanced` stops using smaller chunks: 1 % of a step's time is not worth more pieces."""

MAX_LENGTH = 1 << 40
"""Tokens of a sequence: a placement has a number for each, so that a larger length is a mistake."""

MAX_CHUNKS = 64
"""Chunks per rank in the finest cut of `balanced`: more chunks are more, and shorter, ranges of keys to send."""


@dataclass(frozen=True, eq=False)
class Placement:
    """The owner of every token.

    Attributes:
        world: number of ranks.
        q_owner: int64 [q_len], the rank that holds each query.
        kv_owner: int64 [kv_len], the rank that holds each key; the same tensor if queries and keys are the same tokens.

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
        """The placement with that name.

        Args:
            name: "zigzag", "contiguous" or "balanced".
            world: number of ranks.
            q_len: number of queries of all ranks together.
            kv_len: number of keys; None if keys are the same tokens as queries.
            mask: its documents are what "zigzag" cuts.
            form: the normal form of the mask of the whole sequence, which "balanced" needs.

        Returns:
            The owner of every token.

        Raises:
            InputError: an argument is wrong, or "balanced" has no form.

        >>> Placement.of("contiguous", 2, 4, None).q_owner.tolist()
        [0, 0, 1, 1]
        """
        checked_choice("name", name, PLACEMENTS)
        as_integer("world", world, 1)
        check_length("q_len", q_len)
        if kv_len is not None:
            check_length("kv_len", kv_len)
        if mask is not None:
            check_type("mask", mask, Mask, "an undivided.masks.Mask or None")
        if form is not None or name == "balanced":
            check_type("form", form, NormalForm, "a NormalForm, which placement 'balanced' needs")
        with torch.inference_mode(False):  # a placement is cached, and autograd saves its indices
            if name == "balanced":
                assert form is not None
                q_owner = balanced(row_pairs(form), world)
                return Placement(world, q_owner, q_owner if kv_len is None else contiguous(kv_len, world))
            q_owner = _named_owner(name, world, q_len, document_edges(mask, "q", q_len))
            if kv_len is None:
                return Placement(world, q_owner, q_owner)
            return Placement(world, q_owner, _named_owner(name, world, kv_len, document_edges(mask, "kv", kv_len)))

    @cached_property
    def q(self) -> tuple[Tensor, ...]:
        """The global positions of each rank's queries, int64, ascending."""
        return _tokens_by_owner(self.q_owner, self.world)

    @cached_property
    def kv(self) -> tuple[Tensor, ...]:
        """The global positions of each rank's keys, int64, ascending."""
        return self.q if self.kv_owner is self.q_owner else _tokens_by_owner(self.kv_owner, self.world)

    def rows(self, side: Side) -> tuple[Tensor, ...]:
        """The global positions of each rank's tokens of one side.

        Args:
            side: "q" or "kv".

        Returns:
            `q` or `kv`.
        """
        checked_choice("side", side, SIDES)
        return self.q if side == "q" else self.kv

    def length(self, side: Side) -> int:
        """The number of tokens of all ranks together.

        Args:
            side: "q" or "kv".

        Returns:
            The length of `q_owner` or `kv_owner`.
        """
        checked_choice("side", side, SIDES)
        return (self.q_owner if side == "q" else self.kv_owner).numel()

    @cached_property
    def order(self) -> dict[Side, Tensor]:
        """For each side, the index of each global position in the concatenated shards: the inverse of sharding."""
        with torch.inference_mode(False):
            return {side: torch.cat(self.rows(side)).argsort() for side in SIDES}

    @cached_property
    def digest(self) -> int:
        """A hash of the placement."""
        total = torch.zeros((), dtype=torch.int64, device=self.q_owner.device)
        for owner in (self.q_owner, self.kv_owner):
            total = total * HASH_FACTOR + hash_entries(owner) + owner.numel()
        return int(total)


def check_length(argument: str, length: object) -> None:
    """InputError unless it is a number of tokens."""
    if isinstance(length, bool | float) or not hasattr(length, "__index__"):
        raise InputError(argument, "be a number of tokens", repr(length))
    if not 0 <= as_integer(argument, length) <= MAX_LENGTH:
        raise InputError(argument, f"be a number of tokens, at most {MAX_LENGTH}", length)


def contiguous(length: int, world: int) -> Tensor:
    """The owners if each rank holds one of equal ranges, int64 [length].

    >>> contiguous(5, 2).tolist()
    [0, 0, 1, 1, 1]
    """
    return _chunk_index(torch.arange(length, device="cpu"), length, world)


def zigzag(length: int, world: int, edges: Sequence[int]) -> Tensor:
    """The owners if each rank holds a pair of chunks of every document, int64 [length].

    Rank r holds chunks r and 2 * world - 1 - r of each document. If lengths are not multiples of 2 * world, the
    remainders rotate over the ranks: each document starts one rank further for every left-over token before it.

    Args:
        length: number of tokens.
        world: number of ranks.
        edges: the starts of the documents and the length, ascending from 0.

    >>> zigzag(8, 2, [0, 8]).tolist(), zigzag(8, 2, [0, 4, 8]).tolist()
    ([0, 0, 1, 1, 1, 1, 0, 0], [0, 1, 1, 0, 0, 1, 1, 0])
    """
    cuts = torch.tensor(edges, device="cpu")
    sizes = cuts.diff()
    token = torch.arange(length, device="cpu")
    document = torch.searchsorted(cuts, token, right=True) - 1
    chunk = _chunk_index(token - cuts[document], sizes[document], 2 * world)
    rank = torch.where(chunk < world, chunk, 2 * world - 1 - chunk)
    remainder = sizes % (2 * world)
    return (rank + (remainder.cumsum(0) - remainder)[document]) % world


def balanced(pairs: Tensor, world: int) -> Tensor:
    """The owners if every rank gets equally many tokens and nearly equal work, int64 [rows].

    Equal chunks are assigned, heaviest first, to the rank with the least work, the same number to each rank. The
    coarsest cut that reaches MAX_IMBALANCE is taken, because its ranges are the longest: contiguous if all rows cost
    the same, zigzag for a causal mask.

    Args:
        pairs: the work of every row, int64 [rows], as `row_pairs` counts it.
        world: number of ranks.

    >>> balanced(torch.arange(8), 2).tolist()
    [0, 0, 1, 1, 1, 1, 0, 0]
    """
    length = pairs.numel()
    best: tuple[float, Tensor] | None = None
    cumulative = torch.nn.functional.pad(pairs.to(torch.float64).cumsum(0), (1, 0))
    chunks = 1
    while chunks <= MAX_CHUNKS and (best is None or chunks * world <= length):
        chunk = _chunk_index(torch.arange(length, device="cpu"), length, chunks * world)
        edges = torch.searchsorted(chunk, torch.arange(chunks * world + 1, device="cpu"))
        owner = torch.tensor(_assign_chunks(cumulative[edges].diff().tolist(), world), device="cpu")[chunk]
        work = torch.zeros(world, dtype=torch.float64, device="cpu")
        spread = imbalance(work.index_add_(0, owner, pairs.to(torch.float64)))
        if best is None or spread < best[0]:
            best = spread, owner
        if spread <= MAX_IMBALANCE:
            break
        chunks *= 2
    assert best is not None
    return best[1]


def _assign_chunks(work: Sequence[float], world: int) -> list[int]:
    """The rank of each chunk: heaviest first, to the rank with the least work that is not full."""
    capacity = len(work) // world
    owners = [0] * len(work)
    ranks = [(0.0, rank, 0) for rank in range(world)]
    for chunk in sorted(range(len(work)), key=lambda c: (-work[c], c)) if capacity > 1 else range(len(work)):
        assigned, rank, count = heapq.heappop(ranks)
        owners[chunk] = rank
        if count + 1 < capacity:
            heapq.heappush(ranks, (assigned + work[chunk], rank, count + 1))
    return owners


def imbalance(work: Tensor) -> float:
    """The largest over the mean work of the ranks; 1 if there is no work.

    Args:
        work: one number per rank, [world], any dtype.

    >>> imbalance(torch.tensor([3, 1]))
    1.5
    """
    mean = float(work.to(torch.float64).mean())
    return float(work.max()) / mean if mean > 0 else 1.0


def row_pairs(form: NormalForm) -> Tensor:
    """The allowed pairs of every row, summed over batch elements and heads, int64 [Sq]; O(S) if the mask is ranges.

    Args:
        form: of the mask of the whole sequence, `mask.normal_form(batch, heads, q_len, kv_len, "cpu")`.

    >>> from undivided import masks
    >>> row_pairs(masks.causal().normal_form(1, 2, 4, 4, "cpu")).tolist()
    [2, 4, 6, 8]
    """
    pairs = head_pairs(form)
    total: Tensor = pairs.sum(0) * (form.heads // max(pairs.shape[0], 1))
    return total


def head_pairs(form: NormalForm) -> Tensor:
    """The allowed pairs of every head and row, summed over the batch, int64 [H|1, Sq]; 1 if all heads are equal."""
    if form.exact:
        counts = form.ranges.to(torch.int64).unflatten(-1, (-1, 2)).diff(dim=-1).sum((-1, -2))[:, None]
    else:
        counts = form.counts(range(form.q_len + 1), [0, form.kv_len])[..., 0]
    pairs: Tensor = counts.sum(0) * (form.batch // max(counts.shape[0], 1))
    return pairs


def document_edges(mask: Mask | None, side: Side, length: int) -> tuple[int, ...]:
    """The starts of the mask's documents in memory, and the length; (0, length) if it has no documents."""
    documents = None if mask is None else mask.take("documents")[0]
    if documents is None:
        return (0, length) if length else (0,)
    offsets = getattr(documents, f"padded_{side}")
    offsets = getattr(documents, f"cu_seqlens_{side}") if offsets is None else offsets
    return tuple(sorted({0, length, *(min(int(edge), length) for edge in offsets.tolist())}))


def mask_sizes(mask: Mask) -> tuple[int, int]:
    """The numbers of batch elements and of heads between which the mask differs."""
    batches, heads = [1], 1
    for part in mask.parts:
        if isinstance(part, Lengths):
            batches.append(part.kv.shape[0])
        elif isinstance(part, DocumentIds):
            batches.append(part.ids_q.shape[0])
        elif isinstance(part, Dense):
            batches.append(part.tensor.shape[0])
            heads = max(heads, part.tensor.shape[1])
        elif isinstance(part, Blocks):
            # heads come in groups: any common multiple of the numbers of groups is enough
            heads = math.lcm(heads, part.table.shape[1])
            if "documents" not in mask.kinds:
                batches.append(part.table.shape[0])
        elif "documents" not in mask.kinds:
            batches += [t.shape[0] for t in part.tensors if t.dim() == 1]
    return 0 if 0 in batches else max(batches), heads


def _named_owner(name: PlacementName, world: int, length: int, edges: tuple[int, ...]) -> Tensor:
    owner = _owner.__wrapped__ if is_traced() else _owner  # a fake tensor must not serve later calls
    return owner(name, world, length, edges)


@functools.lru_cache(64)
def _owner(name: PlacementName, world: int, length: int, edges: tuple[int, ...]) -> Tensor:
    return zigzag(length, world, edges) if name == "zigzag" and length else contiguous(length, world)


def _chunk_index(index: Tensor, size: Tensor | int, chunks: int) -> Tensor:
    """The chunk of each index, if chunk c of ``chunks`` is [c * size // chunks, (c + 1) * size // chunks)."""
    return ((index + 1) * chunks - 1).div(size, rounding_mode="floor") if index.numel() else index


def _tokens_by_owner(owner: Tensor, world: int) -> tuple[Tensor, ...]:
    with torch.inference_mode(False):
        order = owner.argsort(stable=True)
        return tuple(order.split(torch.bincount(owner, minlength=world).tolist()))

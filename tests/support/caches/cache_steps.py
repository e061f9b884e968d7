"""Caches, sequences and the state of a cache for its tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from token_lists import POISON, joined, parted
from torch import Tensor

import undivided
from undivided import KVCache, PagedKVCache, masks
from undivided.masks import Mask

HEADS, KV_HEADS, DIM, VALUE_DIM = 4, 2, 8, 5


LENGTHS = (13, 7, 10)


KINDS = ("contiguous", "paged")


Cache = KVCache | PagedKVCache


def new_cache(kind: str, batch: int = 3, layout: str = "bshd", dtype: torch.dtype = torch.float32) -> Cache:
    """A cache with room for 16 tokens per sequence, filled with NaN."""
    sizes: dict[str, Any] = {"value_dim": VALUE_DIM, "dtype": dtype, "layout": layout}
    cache: Cache
    if kind == "contiguous":
        cache = KVCache(batch, 16, KV_HEADS, DIM, **sizes)
    else:
        cache = PagedKVCache(4 * batch, 4, KV_HEADS, DIM, batch=batch, **sizes)
    cache._storage.k.fill_(POISON)
    cache._storage.v.fill_(POISON)
    return cache


def new_sequences(lengths: Sequence[int] = LENGTHS, dtype: torch.dtype = torch.float32) -> list[list[Tensor]]:
    """[q, k, v] of each sequence, [n, H, D]."""
    sizes = ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, VALUE_DIM))
    return [[torch.randn(n, *size).to(dtype) for size in sizes] for n in lengths]


@dataclass
class Kind:
    """A kind of attention: `whole` are the arguments for one sequence in one pass, `step` those for some of its rows.

    `first` is the minimum number of tokens of the first step, as later ones would change its rows (prefix).
    """

    mask: Mask | None
    options: dict[str, Any] = field(default_factory=dict)
    first: int = 0

    def whole(self) -> tuple[Mask, dict[str, Any]]:
        return masks.causal() if self.mask is None else self.mask, self.options


def step(cache: Cache, tokens: list[list[Tensor]], kind: Kind) -> list[Tensor]:
    """Append [q, k, v] of each sequence, and attend."""
    counts = [len(q) for q, _, _ in tokens]
    q, k, v = (joined([t[n] for t in tokens], cache.layout) for n in range(3))
    cache.append(k, v, lengths=counts)
    return parted(cache.attend(q, kind.mask, **kind.options), cache.layout, counts)


def in_one_pass(sequence: list[Tensor], kind: Kind) -> Tensor:
    """The rows of a sequence without a cache."""
    mask, options = kind.whole()
    q, k, v = (t.unsqueeze(0) for t in sequence)
    out: Tensor = undivided.attention(q, k, v, layout="bshd", mask=mask, backend="reference", **options)
    return out[0]

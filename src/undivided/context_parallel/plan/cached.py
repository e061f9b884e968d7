"""Bytes of a step of generation over a cache whose pages are spread over ranks, as `Traffic` counts them in a run.

No cached key is sent, so no count depends on the length of the cache. Only its memory does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from undivided.arguments.checks import check_type, checked_flag
from undivided.context_parallel.decode import MergeMethod, check_merge_method
from undivided.context_parallel.pages.attend import default_merge_method, held_tokens
from undivided.context_parallel.sharding import MAX_LENGTH, Placement
from undivided.errors import InputError
from undivided.request.result import lse_dtype


@dataclass(frozen=True)
class CachedStep:
    """What the rank that sends the most sends in one layer for the new tokens of a step, and what a rank holds.

    Attributes:
        sharded: whether each rank has its part of the new tokens, as after ``pre_step(..., sharded=True)``; otherwise
            every rank has all of them.
        queries, keys, results: bytes of new queries, of new keys and values, and of partial results.
        cache: bytes of the keys and values, new ones included, on the rank that holds the most.
    """

    sharded: bool
    queries: int
    keys: int
    results: int
    cache: int

    @property
    def sent(self) -> int:
        """All bytes sent."""
        return self.queries + self.keys + self.results


def cached_step(
    new: int,
    cached: int,
    heads: int,
    head_dim: int,
    world: int = 8,
    *,
    kv_heads: int | None = None,
    value_dim: int | None = None,
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    page_size: int = 64,
    sharded: bool = True,
    by: MergeMethod | None = None,
) -> CachedStep:
    """The `CachedStep` of `InferenceParams` or `ContextPagedKVCache` over the ranks of strategy "ring".

    Args:
        new, cached: new tokens of each sequence, and tokens in its cache before.
        heads, head_dim, world: number and size of the query heads; number of ranks.
        kv_heads, value_dim: number of key heads and size of the value heads; None if they are those of the queries.
        batch: sequences, which all have these lengths.
        dtype: of queries, keys and values.
        page_size: tokens of a page.
        sharded: see `CachedStep`.
        by: how results are merged if every rank has all new tokens; None is the default of the caches.

    Raises:
        InputError: a size is not a positive number, `cached` is negative, or another argument is wrong.

    >>> step = cached_step(4096, 1_000_000, 32, 128, 4, kv_heads=8)
    >>> step.queries >> 20, step.keys >> 20, step.results >> 20
    (24, 12, 48)
    >>> cached_step(1, 1_000_000, 32, 128, 4, kv_heads=8, sharded=False).sent
    49536
    """
    kv_heads, value_dim = heads if kv_heads is None else kv_heads, head_dim if value_dim is None else value_dim
    sizes = {"new": new, "heads": heads, "head_dim": head_dim, "world": world, "kv_heads": kv_heads}
    for name, value in (sizes | {"value_dim": value_dim, "batch": batch, "page_size": page_size}).items():
        _check_size(name, value, 1)
    _check_size("cached", cached, 0)
    check_type("dtype", dtype, torch.dtype, "a torch.dtype")
    checked_flag("sharded", sharded)
    if by is not None:
        check_merge_method(by)
    token = batch * kv_heads * (head_dim + value_dim) * dtype.itemsize
    row = batch * heads * (value_dim + 1) * lse_dtype(dtype).itemsize
    cache = held_tokens(cached + new, page_size, 0, world) * token
    if not sharded:
        return CachedStep(False, 0, 0, _merge_bytes(new * row, batch * new * heads, world, by), cache)
    counts = [rows.numel() for rows in Placement.of("zigzag", world, new, None).q]
    query = batch * heads * head_dim * dtype.itemsize
    steps = [(own * (world - 1) * query, own * (world - 1) * token, (new - own) * row) for own in counts]
    return CachedStep(True, *max(steps, key=sum), cache)


def _check_size(argument: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(argument, f"be an integer of at least {least}", repr(value))
    if value > MAX_LENGTH:
        raise InputError(argument, f"be at most {MAX_LENGTH}", value)


def _merge_bytes(size: int, rows: int, world: int, by: MergeMethod | None) -> int:
    """Bytes that a rank sends to merge its `rows` partial results of `size` bytes; see `ContextParallel.decode`."""
    if world == 1:
        return 0
    if by is None:
        by = default_merge_method(size)
    if by == "all_gather":
        return (world - 1) * size
    # rank 0, which merges the most rows, sends the other rows to the ranks that merge them, and its own to all of them
    merged = -(-rows // world)
    return (rows - merged + merged * (world - 1)) * (size // rows)

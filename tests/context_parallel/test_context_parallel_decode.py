"""Decoding with keys that are distributed over ranks: equal to one cache, and the bytes that a step sends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from context_parallel_check import differences
from torch import Tensor

import undivided
from undivided import masks
from undivided.arguments import layout as _layout
from undivided.context_parallel import RankError, simulate
from undivided.context_parallel.exchange.simulate import SimulatedGroup

DECODED: dict[str, dict[str, Any]] = {
    "next-token": {"rows": 1},
    "three-tokens": {"rows": 3},
    "window": {"rows": 3, "mask": masks.window(6, 0, align="bottom_right")},
    "global-keys": {"rows": 2, "mask": masks.window(3, 0, align="bottom_right") | masks.prefix(2)},
    "dense": {"rows": 2, "mask": masks.dense(torch.arange(2)[:, None] < torch.arange(17) % 3)},
    "lengths": {"rows": 1, "mask": masks.lengths([9, 17])},
    "alibi-sinks-bias": {
        "rows": 3,
        "alibi_slopes": torch.rand(4).double(),
        "sinks": torch.randn(4).double(),
        "softcap": 3.0,
        "bias": torch.randn(4, 3, 17).double(),
    },
}


@pytest.mark.parametrize("by", ["all_gather", "ring"])
@pytest.mark.parametrize("layout", ["bshd", "sbhd", "bhsd"])
@pytest.mark.parametrize("name", DECODED)
def test_a_cache_distributed_over_ranks_equals_one_cache(name: str, layout: Any, by: Any) -> None:
    """Two of 17 keys are on rank 1, none on rank 2; those of the other ranks alternate."""
    options = dict(DECODED[name])
    q, k, v = (
        _layout.from_canonical(torch.randn(2, length, heads, 8, dtype=torch.float64), layout)
        for length, heads in ((options.pop("rows"), 4), (17, 2), (17, 2))
    )
    held = [[*range(5), *range(7, 17, 2)], [5, 6], [], list(range(8, 17, 2))]
    axis = {"bshd": 1, "sbhd": 0, "bhsd": 2}[layout]

    def rank(group: SimulatedGroup) -> tuple[Tensor, Tensor]:
        mine = torch.tensor(held[group.rank], dtype=torch.int64)
        keys = (t.index_select(axis, mine) for t in (k, v))
        cp = undivided.ContextParallel(group)
        return cp.decode(q, *keys, mine, 17, layout=layout, by=by, **options)

    whole = {"mask": masks.causal(align="bottom_right"), **options}
    right = undivided.attention(q, k, v, layout=layout, return_lse=True, backend="reference", **whole)
    results = simulate(4, rank)
    for out, lse in results:
        assert not differences({"out": out, "lse": lse}, dict(zip(("out", "lse"), right, strict=True)))
        assert torch.equal(out, results[0][0]), "the next token must not depend on the rank"


def test_a_zigzag_prefill_and_steps_after_it_are_one_causal_sequence() -> None:
    """Each rank keeps what it prefilled, and rank n % world appends token n: 29 tokens at once, then 6."""
    q, k, v = (torch.randn(1, 35, heads, 16) for heads in (4, 2, 2))

    def rank(group: SimulatedGroup) -> Tensor:
        cp = undivided.ContextParallel(group).bind(29, mask=masks.causal())
        mine = [cp.shard(t[:, :29], "bshd") for t in (q, k, v)]
        first = undivided.attention(*mine, layout="bshd", mask=masks.causal(), context_parallel=cp)
        outs, positions = [cp.unshard(first, "bshd")], cp.positions(of="kv")
        cache = undivided.KVCache(1, 35, 2, 16, dtype=torch.float32)
        cache.append(*mine[1:])
        for n in range(29, 35):
            if n % cp.world == cp.rank:
                cache.append(k[:, n : n + 1], v[:, n : n + 1])
                positions = torch.cat([positions, torch.tensor([n])])
            keys = (t[:, : positions.numel()] for t in (cache.k, cache.v))
            outs.append(cp.decode(q[:, n : n + 1], *keys, positions, n + 1, layout="bshd")[0])
        return torch.cat(outs, 1)

    right = undivided.attention(q, k, v, layout="bshd", mask=masks.causal())
    for out in simulate(3, rank):
        torch.testing.assert_close(out, right)


@pytest.mark.parametrize("world", [3, (2, 2)])
def test_decoding_sends_the_documented_number_of_bytes(world: Any) -> None:
    """With n bytes per partial result: (W - 1) n by all_gather, 2 (W - 1) n / W by ring, for any number of keys."""
    n, strategy = 12 * 6 * (8 + 1) * 4, "ring" if world == 3 else "ring+all_to_all"

    def rank(group: SimulatedGroup) -> list[int]:
        cp, sent = undivided.ContextParallel(group, strategy), []  # type: ignore[arg-type]
        q, k = torch.randn(1, 12, 6, 8), torch.randn(1, 100, 6, 8)
        positions = torch.arange(100) * cp.world + cp.rank
        for by in ("all_gather", "ring"):
            cp.traffic.reset()
            cp.decode(q, k, k, positions, 100 * cp.world, layout="bshd", by=by)  # type: ignore[arg-type]
            sent.append(cp.traffic.bytes_sent)
        return sent

    of_axes = (3,) if world == 3 else world
    gathered, rung = sum(n * (w - 1) for w in of_axes), sum(2 * n * (w - 1) // w for w in of_axes)
    assert simulate(world, rank) == [[gathered, rung]] * (3 if world == 3 else 4)


def test_different_generation_steps_are_an_error_on_each_rank() -> None:
    def rank(group: SimulatedGroup) -> None:
        cp, q, k = undivided.ContextParallel(group), torch.randn(1, 1, 2, 8), torch.randn(1, 4, 2, 8)
        mine = torch.arange(4) * 2 + cp.rank
        with pytest.raises(undivided.InputError, match="kv_len must be the same on every rank, got 8 on rank 0; 9"):
            cp.decode(q, k, k, mine, 8 + cp.rank, layout="bshd")
        with pytest.raises(
            undivided.InputError if cp.rank else RankError, match="by must be one of 'all_gather', 'ring'"
        ):
            cp.decode(q, k, k, mine, 8, layout="bshd", by="rings" if cp.rank else "ring")  # type: ignore[arg-type]

    simulate(2, rank, timeout=20)


def test_decoding_over_ranks_is_not_batch_invariant() -> None:
    q = torch.randn(1, 1, 2, 8)
    undivided.set_backends(batch_invariant=True)
    try:
        with pytest.raises(undivided.InputError, match="batch_invariant must be False over ranks"):
            simulate(
                2, lambda group: undivided.ContextParallel(group).decode(q, q, q, torch.tensor([0]), 1, layout="bshd")
            )
    finally:
        undivided.set_backends()

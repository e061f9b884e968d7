"""A paged cache over ranks gives what one process gives, whatever the mask, and refuses the same requests."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import undivided
from undivided import InputError, PagedKVCache, masks
from undivided.context_parallel import ContextPagedKVCache, RankError, simulate

HEADS, KV_HEADS, SIZE, PAGE, BATCH = 4, 2, 16, 4, 3


def draw(tokens: int, heads: int, seed: int, batch: int = BATCH) -> Tensor:
    return torch.randn(batch, tokens, heads, SIZE, generator=torch.Generator().manual_seed(seed))


def last_ranges(lengths: tuple[int, ...]) -> dict[str, Any]:
    """A dense mask and a bias for the keys of the longest sequence."""
    draws = torch.Generator().manual_seed(9)
    allowed = torch.rand(BATCH, HEADS, 1, max(lengths), generator=draws) < 0.6
    return {"mask": masks.dense(allowed), "bias": torch.randn(BATCH, 1, 1, max(lengths), generator=draws)}


def by_position(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (kv_idx + b + h) % 3 > 0


OPTIONS: dict[str, Callable[[tuple[int, ...]], dict[str, Any]]] = {
    "causal": lambda n: {},
    "ring": lambda n: {"by": "ring"},
    "window-and-sinks": lambda n: {"mask": masks.window(6, 0) | masks.sinks(2), "sinks": torch.tensor([0.5, -1, 2, 0])},
    "alibi": lambda n: {"alibi_slopes": undivided.alibi_slopes(HEADS), "softcap": 8.0},
    "dense-and-bias": last_ranges,
    "predicate": lambda n: {"mask": masks.predicate(by_position), "scale": 0.1},
    "reference": lambda n: {"backend": "reference"},
}


def generate(cache: Any, case: str, layout: str) -> list[Tensor]:
    """The results of a prompt, two steps, a fork, a rejected token and a new sequence."""
    found = []

    def step(tokens: list[int], seed: int) -> None:
        q, k, v = (
            draw(max(tokens), HEADS, seed),
            draw(max(tokens), KV_HEADS, seed + 1),
            draw(max(tokens), KV_HEADS, seed + 2),
        )
        if layout == "thd":
            q, k, v = (torch.cat([t[n, :count] for n, count in enumerate(tokens)]) for t in (q, k, v))
        cache.append(k, v, tokens)
        now = OPTIONS[case](cache.lengths)
        if not isinstance(cache, ContextPagedKVCache):
            now.pop("by", None)
        if case == "dense-and-bias" and max(tokens) > 1:
            now = {}
        found.append(cache.attend(q, **now))

    step([9, 2, 14], 0)
    step([1, 1, 1], 10)
    cache.fork(2, 1)
    step([1, 1, 1], 20)
    cache.truncate([9, 16, 13])
    cache.free(0)
    step([3, 1, 2], 30)
    step([1, 0, 1], 40)
    return found


def context_cache(group: Any, layout: str = "bshd", pages: int = 8, **options: Any) -> ContextPagedKVCache:
    context = undivided.ContextParallel(group)
    made = {"batch": BATCH, "dtype": torch.float32, "layout": layout, **options}
    return ContextPagedKVCache(context, pages, PAGE, KV_HEADS, SIZE, **made)


def one_process(layout: str = "bshd", **options: Any) -> PagedKVCache:
    made = {"batch": BATCH, "dtype": torch.float32, "layout": layout, **options}
    return PagedKVCache(30, PAGE, KV_HEADS, SIZE, **made)


def check_equal(found: list[list[Tensor]], expected: list[Tensor]) -> None:
    for results in found:
        for out, right, first in zip(results, expected, found[0], strict=True):
            torch.testing.assert_close(out, right, rtol=1e-5, atol=1e-5)
            assert torch.equal(out, first), "ranks differ"


@pytest.mark.parametrize("case", OPTIONS)
def test_ranks_give_the_results_of_one_process(case: str) -> None:
    expected = generate(one_process(), case, "bshd")
    check_equal(simulate(3, lambda group: generate(context_cache(group), case, "bshd")), expected)


@pytest.mark.parametrize("case", ["causal", "window-and-sinks"])
def test_packed_tokens(case: str) -> None:
    expected = generate(one_process("thd"), case, "thd")
    check_equal(simulate(2, lambda group: generate(context_cache(group, "thd"), case, "thd")), expected)


def test_quantised_pages() -> None:
    expected = generate(one_process(quantize="int8"), "causal", "bshd")
    check_equal(simulate(2, lambda group: generate(context_cache(group, quantize="int8"), "causal", "bshd")), expected)


def test_masks_of_another_number_of_ranks_are_not_reused() -> None:
    """What a mask means for a rank is cached on the mask, which layers and caches share."""
    q, k, v = draw(1, HEADS, 0), draw(9, KV_HEADS, 1), draw(9, KV_HEADS, 2)
    mask = masks.window(6, 0)

    def attend(group: Any) -> list[Tensor]:
        cache = context_cache(group)
        cache.append(k, v)
        return [cache.attend(q, mask)]

    whole = one_process()
    whole.append(k, v)
    for world in (2, 3):
        check_equal(simulate(world, attend), [whole.attend(q, mask)])


def test_under_autocast() -> None:
    q, k, v = draw(1, HEADS, 0), draw(9, KV_HEADS, 1), draw(9, KV_HEADS, 2)

    def attend(cache: Any) -> list[Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            cache.append(k, v)
            return [cache.attend(q)]

    (expected,) = attend(one_process(dtype=torch.bfloat16))
    for (out,) in simulate(2, lambda group: attend(context_cache(group, dtype=torch.bfloat16))):
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


def test_each_rank_holds_its_pages_only() -> None:
    def work(group: Any) -> tuple[Any, ...]:
        cache = context_cache(group, batch=1)
        cache.append(draw(18, KV_HEADS, 0, 1), draw(18, KV_HEADS, 1, 1))
        return cache.lengths, cache.held, cache.free_pages

    assert simulate(2, work) == [((18,), (10,), (5, 6)), ((18,), (8,), (5, 6))]


def attempt(call: Callable[[ContextPagedKVCache], Any], group: Any) -> str:
    cache = context_cache(group, pages=2, batch=1)
    cache.append(draw(6, KV_HEADS, 0, 1), draw(6, KV_HEADS, 1, 1))
    before = cache.lengths, cache.free_pages
    try:
        call(cache)
    except (InputError, RankError) as error:
        assert (cache.lengths, cache.free_pages) == before
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.append(draw(15, KV_HEADS, 0, 1), draw(15, KV_HEADS, 1, 1)), "the pages of each rank"),
        (lambda c: c.append(draw(1, 3, 0, 1), draw(1, 3, 1, 1)), "k must have shape"),
        (lambda c: c.attend(draw(1, HEADS, 0, 1), by="sum"), "by must be one of 'all_gather', 'ring'"),
        (lambda c: c.attend(draw(1, HEADS, 0, 1), masks.lengths([3])), "mask must leave the lengths to the cache"),
        (lambda c: c.attend(draw(1, HEADS, 0, 1), sinks=torch.zeros(3)), "sinks must have shape"),
        (lambda c: c.attend(draw(1, HEADS, 0, 1), bias=torch.zeros(5)), "bias must end with the 6 keys"),
        (lambda c: c.truncate([7]), "lengths[0] must be at most the 6 cached tokens"),
        (lambda c: c.free(1), "i must be a sequence of the cache"),
    ],
)
def test_wrong_requests_are_refused_on_every_rank(call: Callable[[ContextPagedKVCache], Any], message: str) -> None:
    for text in simulate(2, functools.partial(attempt, call)):
        assert message in text


def test_different_calls_of_ranks_are_refused() -> None:
    def call(group: Any) -> str:
        width = 3 + undivided.ContextParallel(group).rank
        return attempt(lambda cache: cache.attend(draw(1, HEADS, 0, 1), masks.window(width, 0)), group)

    for text in simulate(2, call):
        assert "mask must be the same on every rank" in text


def test_a_context_without_a_group_is_refused() -> None:
    with pytest.raises(InputError, match="have a group to attend with"):
        ContextPagedKVCache(undivided.ContextParallel(rank=0, world=2), 1, 1, 1, 8, batch=1, dtype=torch.float32)
    with pytest.raises(InputError, match=r"context must be an undivided.ContextParallel, got int"):
        ContextPagedKVCache(3, 1, 1, 1, 8, batch=1, dtype=torch.float32)  # type: ignore[arg-type]

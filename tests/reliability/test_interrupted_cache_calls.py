"""Calls of caches that an exception of a signal's handler ends, such as Ctrl-C: after any line of the bookkeeping, no
page is free and in use at once, and a repeated call gives the result of one that was not interrupted, or an error."""

from __future__ import annotations

import functools
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch
from interrupts import is_interrupted
from torch import Tensor

import undivided
from undivided import InferenceParams, InputError, PagedKVCache, masks
from undivided.cache._ledger.pages import Pages

CACHE = str(Path(undivided.__file__).parent / "cache")
STREAMING = masks.window(2, 0)
PAGE_SIZE, PAGES, BATCH = 4, 24, 4


def is_cache(code: CodeType) -> bool:
    return code.co_filename.startswith(CACHE)


def new_tokens(batch: int, count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, count, 2, 16), torch.randn(batch, count, 2, 16)


def check_ledger(ledger: Pages) -> None:
    used = Counter(page for pages in ledger.tables for page in pages if page >= 0)
    used.update(node.page for node in ledger.prefixes)
    free = [page for pages in ledger.unused for page in pages]
    assert len(set(free)) == len(free), "a page is free twice"
    assert not any(used[page] for page in free), "a page is free and in use"
    assert all(ledger.references[page] >= count for page, count in used.items()), "too few references"
    for length, pages in zip(ledger.lengths, ledger.tables, strict=True):
        assert -(-length // PAGE_SIZE) == len(pages), "the length does not match the pages"


def paged_cache() -> PagedKVCache:
    cache = PagedKVCache(PAGES, PAGE_SIZE, 2, 16, batch=BATCH, dtype=torch.float32)
    cache.append(*new_tokens(BATCH, 9), lengths=[9, 6, 3, 0])
    cache.fork(0, 2)
    cache.append(*new_tokens(BATCH, 1), lengths=[1, 1, 1, 0])
    cache.fork(0, 2)
    cache.remember([1] * 8, 0)
    cache.remember([2] * 4, 1)
    return cache


def nearly_full_cache() -> PagedKVCache:
    """A cache whose next tokens need the pages of the index of prefixes."""
    cache = paged_cache()
    cache.free(0)
    cache.free(2)
    return cache


def cache_with_drafts() -> PagedKVCache:
    cache = paged_cache()
    cache.append(*new_tokens(BATCH, 3))
    return cache


CALLS: dict[str, tuple[Callable[[], PagedKVCache], Callable[[PagedKVCache], object]]] = {
    "append": (paged_cache, lambda cache: cache.append(*new_tokens(BATCH, 3))),
    "append, which takes pages of prefixes": (
        nearly_full_cache,
        lambda cache: cache.append(*new_tokens(BATCH, 33), lengths=[33, 30, 20, 0]),
    ),
    "fork": (paged_cache, lambda cache: cache.fork([0, 1], [1, 3])),
    "truncate": (paged_cache, lambda cache: cache.truncate([2, 2, 2, 0])),
    "free": (paged_cache, lambda cache: cache.free(1)),
    "keep": (cache_with_drafts, lambda cache: cache.keep([[0, 2], [1], [2], []])),
    "evict": (paged_cache, lambda cache: cache.evict(STREAMING)),
    "remember": (paged_cache, lambda cache: cache.remember([3] * 8, 2)),
    "match": (paged_cache, lambda cache: cache.match([1] * 9, 3)),
}


@pytest.mark.parametrize("name", CALLS)
def test_no_page_is_free_and_in_use_wherever_a_call_ends(name: str) -> None:
    make, call = CALLS[name]
    line = 1
    while True:
        cache = make()
        check_ledger(cache._ledger)
        if not is_interrupted(functools.partial(call, cache), line, is_cache):
            break
        check_ledger(cache._ledger)
        for n in range(BATCH):  # the index of prefixes is as consistent
            cache.free(n)
        check_ledger(cache._ledger)
        room = cache.free_pages * PAGE_SIZE
        cache.append(*new_tokens(BATCH, room), lengths=[room, 0, 0, 0])
        check_ledger(cache._ledger)
        line += 1
    assert line > 10


def inference_params(paged: bool) -> InferenceParams:
    torch.manual_seed(2)
    params = InferenceParams(4, 32, 2, 16, torch.float32, is_paged=paged, page_size=PAGE_SIZE if paged else None)
    for counts in ({"a": 5, "b": 3, "c": 4}, {"a": 2, "b": 2, "c": 2}):
        params.pre_step(OrderedDict(counts))
        for layer in (1, 2):
            attend(params, layer, max(counts.values()))
    if paged:
        params.remember([1] * 4, "b")
    return params


def attend(params: InferenceParams, layer: int, count: int) -> Tensor:
    batch = params.batch_size
    return params.attend(layer, torch.randn(batch, count, 4, 16), *new_tokens(batch, count), mask=STREAMING)


def next_step(params: InferenceParams, starts: bool) -> tuple[dict[Any, int], list[Tensor]]:
    """The sequences and the results of a step of one token."""
    torch.manual_seed(5)
    if starts:
        params.pre_step(OrderedDict((name, 1) for name in params.sequences))
    return dict(params.sequences), [attend(params, layer, 1) for layer in (1, 2)]


STEPS: dict[str, Callable[[InferenceParams], object]] = {
    "pre_step": lambda params: params.pre_step(OrderedDict(a=1, b=1, c=1)),
    "pre_step, which ends and starts sequences": lambda params: params.pre_step(OrderedDict(a=1, d=1)),
    "fork": lambda params: params.fork("a", "z"),
    "truncate": lambda params: params.truncate("a", 3),
    "free": lambda params: params.free("b"),
    "evict": lambda params: params.evict(STREAMING),
    "match": lambda params: params.match([1] * 9, "n"),
}


PAGED_ONLY = "evict", "match"


@pytest.mark.parametrize(
    ("name", "paged"), [(name, paged) for name in STEPS for paged in (False, True) if paged or name not in PAGED_ONLY]
)
def test_a_repeated_call_of_inference_params_is_right_or_refused(name: str, paged: bool) -> None:
    call, starts = STEPS[name], not name.startswith("pre_step")
    params = inference_params(paged)
    call(params)
    sequences, results = next_step(params, starts)
    refusals: list[str] = []
    line = 1
    while True:
        params = inference_params(paged)
        if not is_interrupted(functools.partial(call, params), line, is_cache):
            break
        line += 1
        if isinstance(params._batch.ledger, Pages):
            check_ledger(params._batch.ledger)
        assert params.sequences == params._batch.sequences
        try:
            call(params)
            repeated, again = next_step(params, starts)
        except InputError as error:
            refusals.append(str(error))
            continue
        assert repeated == sequences
        assert all(map(torch.equal, again, results))
    assert line > 10
    expected = "be that of a layer that received all", "not be the id of a sequence", "be the id of a sequence"
    assert all(any(message in refusal for message in expected) for refusal in refusals)

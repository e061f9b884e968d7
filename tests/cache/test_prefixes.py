"""The index of prefixes: a prompt that begins as an earlier one shares its pages, and no page is ever lost."""

from __future__ import annotations

import contextlib
import copy
import heapq
import random
from typing import Any

import pytest
import torch
from token_lists import POISON
from torch import Tensor

import undivided
from undivided import InputError, PagedKVCache, masks
from undivided.cache._ledger.pages import Pages
from undivided.cache._ledger.prefixes import PrefixIndex
from undivided.cache._storage import Storage

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 8, 4


def new_cache(pages: int = 12, batch: int = 3) -> PagedKVCache:
    cache = PagedKVCache(pages, PAGE, KV_HEADS, DIM, batch=batch, dtype=torch.float32)
    cache.k.fill_(POISON)
    cache.v.fill_(POISON)
    return cache


def embed(tokens: list[int], heads: int, seed: int) -> Tensor:
    """[n, heads, D]: a row depends on its token and position only."""
    rows = [
        torch.randn(heads, DIM, generator=torch.Generator().manual_seed(seed + 1000 * n + token))
        for n, token in enumerate(tokens)
    ]
    return torch.stack(rows) if rows else torch.zeros(0, heads, DIM)


def serve(cache: PagedKVCache, i: int, tokens: list[int]) -> tuple[Tensor, int]:
    """The output of the tokens that were not in the cache, and the number of those that were."""
    known = cache.match(tokens, i)
    q, k, v = (embed(tokens, h, s)[known:] for h, s in ((HEADS, 1), (KV_HEADS, 2), (KV_HEADS, 3)))
    counts = [0] * cache.batch
    counts[i] = len(q)
    padded = [torch.zeros(cache.batch, len(q), *t.shape[1:]) for t in (q, k, v)]
    for row, t in zip(padded, (q, k, v), strict=True):
        row[i] = t
    cache.append(padded[1], padded[2], lengths=counts)
    out = cache.attend(padded[0])[i]
    cache.remember(tokens, i)
    return out, known


def in_one_pass(tokens: list[int]) -> Tensor:
    q, k, v = (embed(tokens, h, s).unsqueeze(0) for h, s in ((HEADS, 1), (KV_HEADS, 2), (KV_HEADS, 3)))
    return undivided.attention(q, k, v, layout="bshd", mask=masks.causal(), backend="reference")[0]


def test_a_prompt_that_begins_as_another_is_computed_from_there() -> None:
    cache, first = new_cache(), list(range(11))
    out, known = serve(cache, 0, first)
    assert known == 0
    torch.testing.assert_close(out, in_one_pass(first))
    second = [*range(9), 77, 78]  # equal for two full pages and one token
    out, known = serve(cache, 1, second)
    assert known == 8
    torch.testing.assert_close(out, in_one_pass(second)[8:])
    assert cache.block_table[1, :2].tolist() == cache.block_table[0, :2].tolist()
    assert cache.free_pages == 12 - 4


def test_pages_outlive_their_sequence() -> None:
    cache, prompt = new_cache(), list(range(10))
    serve(cache, 0, prompt)
    cache.free(0)
    assert cache.free_pages == 12
    out, known = serve(cache, 2, [*prompt, 50])
    assert known == 8
    torch.testing.assert_close(out, in_one_pass([*prompt, 50])[8:])


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    cache, prompt = new_cache(), list(range(8))
    serve(cache, 0, prompt)
    out, known = serve(cache, 1, prompt)
    assert known == 4
    torch.testing.assert_close(out, in_one_pass(prompt)[4:])


def test_equal_tokens_after_other_ones_do_not_match() -> None:
    """A page is known by all tokens before it too."""
    cache = new_cache()
    serve(cache, 0, [1, 2, 3, 4, 9, 9, 9, 9, 0])
    assert cache.match([5, 6, 7, 8, 9, 9, 9, 9, 0], 1) == 0


def test_the_least_recently_used_pages_go_first() -> None:
    cache = new_cache(pages=4, batch=1)
    prompts = [[n] * 5 for n in range(3)]
    for prompt in prompts[:2]:
        serve(cache, 0, prompt)
        cache.free(0)
    assert cache.match(prompts[0], 0) == 4  # used again, so that the second is the older one
    cache.free(0)
    serve(cache, 0, [7] * 12)  # takes three of four pages
    cache.free(0)
    assert cache.match(prompts[1], 0) == 0


def test_no_call_reads_the_whole_index(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Pages(1000, PAGE, 2)
    for n in range(100):
        ledger.commit(ledger.plan((10 * PAGE, 0)))
        ledger.remember(0, [n] * 10 * PAGE)
        ledger.free(0)
    monkeypatch.setattr(PrefixIndex, "__iter__", lambda _: pytest.fail("the index is read"))
    taken: list[object] = []
    pop = heapq.heappop
    monkeypatch.setattr(heapq, "heappop", lambda queue: taken.append(entry := pop(queue)) or entry)
    assert ledger.free_pages == (1000,)
    ledger.commit(ledger.plan((3 * PAGE, 0)))
    assert len(taken) == 3
    assert ledger.match(1, [50] * 10 * PAGE) == 10 * PAGE
    assert ledger.free_pages == (987,)
    ledger.free(1)
    assert ledger.free_pages == (997,)


def random_step(ledger: Pages, chance: random.Random) -> None:
    """One change of a ledger of four sequences; a refused one changes nothing."""
    i, length = chance.randrange(4), ledger.lengths
    kind = chance.choice(["append", "append", "free", "fork", "match", "truncate", "evict", "remember"])
    tokens = [chance.randrange(2) for _ in range(16)]
    if kind == "append":
        counts = tuple(chance.randrange(9) for _ in range(4))
        with contextlib.suppress(InputError):
            ledger.commit(ledger.plan(counts))
    elif kind == "free":
        ledger.free(i)
    elif kind == "fork":
        ledger.fork([(i, (i + 1) % 4)])
    elif kind == "match" and not length[i]:
        ledger.match(i, tokens)
    elif kind == "truncate":
        with contextlib.suppress(InputError):
            ledger.truncate(tuple(chance.randrange(n + 1) if n else 0 for n in length))
    elif kind == "evict":
        ledger.evict(i, ledger.held_places(i)[:1])
    elif kind == "remember":
        ledger.remember(i, tokens[: length[i]])


def test_free_pages_are_those_that_can_be_taken() -> None:
    """Random steps of ledgers. A copy that frees sequences is dropped if the rest of a step fails."""
    chance, ledger, checked = random.Random(1), Pages(20, 2, 4, ranks=2), 0
    for n in range(3000):
        for _ in range(chance.randrange(4)):
            random_step(ledger, chance)
        if chance.random() < 0.4:
            twin = ledger.copy()
            twin.free(chance.randrange(4))
            with contextlib.suppress(InputError):
                twin.plan((chance.randrange(9), 0, 0, 0))
            ledger = chance.choice([ledger, twin])
        if n % 50 == 0:
            ledger = copy.deepcopy(ledger)
        used = {page for table in ledger.tables for page in table}
        for node in ledger.prefixes:
            ancestor = node if node.page in used else None
            while ancestor is not None:
                used.add(ancestor.page)
                ancestor = ancestor.parent
        free = [sum(page % 2 == rank for page in range(40) if page not in used) for rank in (0, 1)]
        assert ledger.free_pages == tuple(free)
        checked += len(ledger.prefixes) > 3 and min(free) > 2
    assert checked > 300


def test_a_refused_append_forgets_nothing() -> None:
    cache = new_cache(pages=4, batch=1)
    serve(cache, 0, [1] * 9)
    cache.free(0)
    tokens = torch.zeros(1, 17, KV_HEADS, DIM)
    with pytest.raises(InputError, match="fit into the 4 free pages of 4"):
        cache.append(tokens, tokens)
    assert cache.match([1] * 9, 0) == 8


def test_a_step_that_fails_in_the_storage_forgets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def new_tokens(count: int) -> list[Tensor]:
        return [torch.randn(1, count, 1, DIM) for _ in range(3)]

    params = undivided.InferenceParams(4, 64, 1, DIM, torch.float32, is_paged=True, page_size=4, total_num_pages=6)
    params.pre_step({"first": 8})
    params.attend(1, *new_tokens(8))
    params.remember(list(range(8)), "first")
    params.pre_step({"second": 9})  # the first ends; its two pages stay in the index
    params.attend(1, *new_tokens(9))
    with monkeypatch.context() as patched:
        patched.setattr(Storage, "copy", out_of_memory)
        with pytest.raises(MemoryError):
            params.pre_step({"third": 21})  # ends the second, and needs the pages of the index
    params.pre_step({})
    assert params.match(list(range(9)), "fourth") == 8
    params.pre_step({"fourth": 1})
    params.pre_step({})
    params.pre_step({"fifth": 24})


def test_pages_of_the_index_stay_on_their_ranks() -> None:
    ledger = Pages(3, 4, 1, ranks=2)
    ledger.commit(ledger.plan((16,)))
    ledger.remember(0, list(range(16)))
    ledger.free(0)  # the index holds four of six pages
    plan = ledger.plan((24,))
    assert sorted(plan.tables[0]) == list(range(6))
    assert [page % 2 for page in plan.tables[0]] == [0, 1] * 3
    ledger.commit(plan)
    assert ledger.free_pages == (0, 0)
    assert not list(ledger.prefixes)


def out_of_memory(*_: object) -> None:
    raise MemoryError


def test_a_shared_page_is_copied_before_it_is_written_to() -> None:
    cache, prompt = new_cache(), list(range(8))
    serve(cache, 0, prompt)
    cache.truncate([6, 0, 0])
    other = [*prompt[:6], 60, 61]
    k, v = (embed(other, KV_HEADS, s)[6:].expand(3, -1, -1, -1) for s in (2, 3))
    cache.append(k, v, lengths=[2, 0, 0])
    out, known = serve(cache, 1, [*prompt, 5])
    assert known == 8
    torch.testing.assert_close(out, in_one_pass([*prompt, 5])[8:])


def test_evicted_pages_end_what_is_indexed() -> None:
    cache, prompt = new_cache(), list(range(12))
    serve(cache, 0, prompt)
    window = masks.window(3, 0)
    cache.evict(window)
    cache.remember(prompt, 0)
    cache.free(0)
    assert cache.match([*prompt, 0], 0) == 12  # indexed before the eviction


def test_no_page_is_lost() -> None:
    """Random prompts from few beginnings, in a pool that is too small for all; unused pages hold NaN."""
    chance, cache = random.Random(0), new_cache(pages=14, batch=3)
    beginnings = [[chance.randrange(9) for _ in range(12)] for _ in range(3)]
    found = 0
    for _ in range(120):
        i = chance.randrange(3)
        cache.free(i)
        prompt = [*chance.choice(beginnings)[: chance.randrange(1, 13)], *(chance.randrange(9) for _ in range(4))]
        unused = list(cache._ledger.unused[0])
        cache.k[unused] = cache.v[unused] = POISON
        out, known = serve(cache, i, prompt)
        found += known
        torch.testing.assert_close(out, in_one_pass(prompt)[known:])
    assert found > 200
    for i in range(3):
        cache.free(i)
    assert cache.free_pages == 14
    serve(cache, 0, list(range(100, 156)))  # the whole pool, whatever the index held
    cache.free(0)
    assert cache.free_pages == 14


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1, 2.5], r"tokens\[1\] must be an int"),
        (torch.zeros(2), r"tokens must be a list of ints"),
        (torch.zeros(2, 2, dtype=torch.int64), r"tokens must be a list of ints"),
        ("text", r"tokens must be a list of ints"),
        (None, r"tokens must be a list of ints"),
    ],
)
def test_wrong_tokens_are_refused(tokens: Any, message: str) -> None:
    cache = new_cache()
    serve(cache, 0, [1, 2, 3, 4, 5])
    for call in (cache.match, cache.remember):
        with pytest.raises(InputError, match=message):
            call(tokens, 1)


def test_wrong_sequences_are_refused() -> None:
    cache = new_cache()
    serve(cache, 0, [1, 2, 3, 4, 5])
    with pytest.raises(InputError, match="i must be an empty sequence, got one of 5 tokens"):
        cache.match([1, 2], 0)
    with pytest.raises(InputError, match="tokens must be at most the 5 cached tokens of sequence 0"):
        cache.remember([1] * 6, 0)
    with pytest.raises(InputError, match="i must be a sequence of the cache"):
        cache.match([1, 2], 3)


def test_a_tensor_is_as_good_as_a_list() -> None:
    cache = new_cache()
    serve(cache, 0, [1, 2, 3, 4, 5])
    assert cache.match(torch.tensor([1, 2, 3, 4, 6]), 1) == 4


def test_a_layer_that_gets_memory_later_matches_no_earlier_pages() -> None:
    """Its pages of these tokens were never written."""
    params = undivided.InferenceParams(4, 64, 1, DIM, torch.float32, is_paged=True, page_size=4)
    prompt, x = list(range(6)), torch.randn(1, 6, 1, DIM)
    params.pre_step({"a": 6})
    params.attend(1, x, x, x)
    params.remember(prompt, "a")
    params.pre_step({"b": 3})
    for layer in (1, 2):
        params.attend(layer, x[:, :3], x[:, :3], x[:, :3])
    assert params.match(prompt, "c") == 0

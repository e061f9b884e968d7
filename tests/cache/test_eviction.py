"""Evicted pages: what remains gives the rows of one pass, and no mask reads an evicted page."""

from __future__ import annotations

import random
from collections import OrderedDict
from dataclasses import replace
from typing import Any

import pytest
import torch
from token_lists import POISON, joined, parted
from torch import Tensor

import undivided
from undivided import InferenceParams, InputError, PagedKVCache, masks
from undivided.cache._ledger import eviction
from undivided.cache._ledger.pages import Pages
from undivided.cache._masks import CausalBand
from undivided.masks import Mask

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 8, 4
STREAMING = masks.window(6, 0) | masks.sinks(3)
MASKS = {
    "window": masks.window(6, 0),
    "window-of-one": masks.window(0, 0),
    "window-and-sinks": STREAMING,
    "window-and-prefix": masks.window(6, 0) | masks.prefix(torch.tensor([1, 0, 5])) & masks.causal(),
    "chunks": masks.chunks(6) & masks.causal(),
    "two-windows": masks.window(9, 0) & (masks.window(5, 0) | masks.sinks(2)),
    "causal": masks.causal(),
}


def new_sequences(lengths: tuple[int, ...]) -> list[list[Tensor]]:
    """[q, k, v] of each sequence, [n, H, D]."""
    return [[torch.randn(n, h, DIM) for h in (HEADS, KV_HEADS, KV_HEADS)] for n in lengths]


def in_one_pass(sequence: list[Tensor], mask: Mask) -> Tensor:
    q, k, v = (t.unsqueeze(0) for t in sequence)
    return undivided.attention(q, k, v, layout="bshd", mask=mask, backend="reference")[0]


def poison(cache: PagedKVCache) -> None:
    """Fill every page that no sequence uses with NaN."""
    unused = list(cache._ledger.unused[0])
    cache._storage.k[unused] = POISON
    cache._storage.v[unused] = POISON


def one_step(cache: PagedKVCache, tokens: list[list[Tensor]], mask: Mask, **options: Any) -> list[Tensor]:
    counts = [len(q) for q, _, _ in tokens]
    q, k, v = (joined([t[n] for t in tokens], cache.layout) for n in range(3))
    cache.append(k, v, lengths=counts)
    return parted(cache.attend(q, mask, **options), cache.layout, counts)


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("layout", ["bshd", "thd"])
@pytest.mark.parametrize("name", MASKS)
def test_steps_with_eviction_equal_one_pass(name: str, layout: Any, backend: str | None) -> None:
    mask = MASKS[name]
    if layout == "thd" and name == "window-and-prefix":
        mask = masks.window(6, 0) | masks.sinks(3)
    lengths = (41, 17, 30)
    sequences, chance = new_sequences(lengths), random.Random(name)
    cache = PagedKVCache(24, PAGE, KV_HEADS, DIM, batch=3, dtype=torch.float32, layout=layout)
    poison(cache)
    found: list[list[Tensor]] = [[] for _ in sequences]
    while any(at < end for at, end in zip(cache.lengths, lengths, strict=True)):
        step = []
        for sequence, at in zip(sequences, cache.lengths, strict=True):
            stop = at + chance.randrange(1, 5)
            step.append([t[at:stop] for t in sequence])
        for rows, out in zip(found, one_step(cache, step, mask, backend=backend), strict=True):
            rows.append(out)
        cache.evict(mask)
        poison(cache)
    for n, (sequence, rows) in enumerate(zip(sequences, found, strict=True)):
        alone = (
            masks.window(6, 0) | masks.sinks((1, 0, 5)[n]) if name == "window-and-prefix" and layout == "bshd" else mask
        )
        torch.testing.assert_close(torch.cat(rows), in_one_pass(sequence, alone))
    assert (cache.free_pages == 0) == (name == "causal")


def test_a_pool_of_a_window_streams_forever() -> None:
    cache = PagedKVCache(4, PAGE, KV_HEADS, DIM, batch=1, dtype=torch.float32)
    (sequence,) = new_sequences((200,))
    rows = []
    for n in range(200):
        rows += one_step(cache, [[t[n : n + 1] for t in sequence]], STREAMING)
        cache.evict(STREAMING)
    torch.testing.assert_close(torch.cat(rows), in_one_pass(sequence, STREAMING))
    assert cache.lengths == (200,)


@pytest.mark.parametrize("length", [60, 6000])
def test_a_step_looks_at_the_pages_of_the_window_only(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    mask = masks.window(6, 0) | masks.prefix([3]) & masks.causal()
    cache = PagedKVCache(1600, PAGE, KV_HEADS, DIM, batch=1, dtype=torch.float32)
    one_step(cache, new_sequences((length,)), mask)
    cache.evict(mask)
    looks: list[object] = []
    first_seen = eviction._first_seen
    monkeypatch.setattr(eviction, "_first_seen", lambda *args: looks.append(args) or first_seen(*args))
    (sequence,) = new_sequences((PAGE,))
    one_step(cache, [sequence], mask)
    assert cache.evict(mask) == 1
    assert 0 < len(looks) < 10


BANDS = {
    "window": masks.window(6, 0),
    "window-and-sinks": STREAMING,
    "window-and-more-sinks": masks.window(2, 0) | masks.sinks(2 * PAGE + 1),
    "bottom-right-window": masks.window(5, 0, align="bottom_right"),
    "causal": masks.causal(),
}


@pytest.mark.parametrize("name", BANDS)
def test_a_window_with_sinks_evicts_without_the_ranges_of_any_row(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eviction at every step takes little host time: no tensors are built."""
    monkeypatch.setattr(eviction, "visible", None)
    cache = PagedKVCache(40, PAGE, KV_HEADS, DIM, batch=2, dtype=torch.float32)
    for lengths in ((13, 1), (1, 1), (0, 1), (9, 1)):
        one_step(cache, new_sequences(lengths), BANDS[name])
        cache.evict(BANDS[name])


@pytest.mark.parametrize("name", BANDS)
def test_a_window_with_sinks_evicts_and_hides_what_its_ranges_say(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mask, chance = BANDS[name], random.Random(name)
    of_mask = CausalBand.of_mask
    for _ in range(30):
        ledgers = [Pages(100, PAGE, 3), Pages(100, PAGE, 3)]
        for _ in range(4):
            counts = tuple(chance.choice((0, 1, 1, 7, 30)) for _ in range(3))
            later = chance.choice([*BANDS.values()])
            found: list[list[object]] = []
            for ledger, rule in zip(ledgers, (of_mask, lambda mask: None), strict=True):
                monkeypatch.setattr(CausalBand, "of_mask", rule)
                ledger.commit(ledger.plan(counts))
                try:
                    eviction.check_hidden(replace(later), ledger.evicted_places, ledger.lengths, counts, PAGE)
                    message = ""
                except InputError as error:
                    message = str(error)
                found.append([message, eviction.evict(ledger, replace(mask), (0, 1, 2)), ledger.tables])
            assert found[0] == found[1]


def test_pages_between_evicted_ones_are_evicted_later() -> None:
    cache = PagedKVCache(8, PAGE, KV_HEADS, DIM, batch=1, dtype=torch.float32)
    one_step(cache, new_sequences((8 * PAGE,)), masks.causal())
    ledger = cache._ledger
    for places, ranges, held in (
        ([2, 4], ((2, 3), (4, 5)), [0, 1, 3, 5, 6, 7]),
        ([0, 5], ((0, 1), (2, 3), (4, 6)), [1, 3, 6, 7]),
        ([1, 3], ((0, 6),), [6, 7]),
        ([6, 7], ((0, 8),), []),
    ):
        ledger.evict(0, places)
        assert ledger.evicted_places[0] == ranges
        assert ledger.held_places(0) == held
        assert cache.free_pages == 8 - len(held)


def test_a_broader_mask_is_refused_and_a_narrower_one_is_not() -> None:
    cache = PagedKVCache(8, PAGE, KV_HEADS, DIM, batch=1, dtype=torch.float32)
    one_step(cache, new_sequences((30,)), STREAMING)
    released = cache.evict(STREAMING)
    assert released == 8 - cache.block_table.shape[1] + 5
    query = torch.randn(1, 1, HEADS, DIM)
    assert cache.attend(query, masks.window(2, 0)).isfinite().all()
    for mask in (None, masks.window(20, 0), masks.sinks(12), masks.predicate(lambda b, h, q, k: k > 20)):
        with pytest.raises(InputError, match=r"mask must hide the evicted keys( of sequence 0)?, got"):
            cache.attend(query, mask)
    with pytest.raises(InputError, match="shows keys 20 to 23 to its query 26"):  # before the eviction
        cache.attend(torch.randn(1, 4, HEADS, DIM), STREAMING)


@pytest.mark.parametrize("mask", [masks.window(1, 0) | masks.sinks(1), masks.window(1, 0) | masks.prefix([1, 1])])
def test_no_query_of_a_call_sees_an_evicted_page(mask: Mask) -> None:
    """The sinks or the prefix keep the page that the first queries see."""
    cache = PagedKVCache(8, PAGE, KV_HEADS, DIM, batch=2, dtype=torch.float32)
    sequences = new_sequences((12, 2))
    one_step(cache, [[t[:12] for t in sequences[0]], sequences[1]], mask)
    cache.evict(mask)
    poison(cache)
    q = torch.randn(2, 12, HEADS, DIM)
    for counts, first in (([12, 12], 4), ([8, 1], 4), ([6, 0], 6)):
        with pytest.raises(InputError, match=f"of sequence 0, got .* shows keys 4 to 7 to its query {first}"):
            cache.attend(q[:, : counts[0]], mask, counts)
    with pytest.raises(InputError, match="shows keys 4 to 7 to its query 4"):
        cache.attend(q, mask)
    assert cache.attend(q, masks.sinks(1) & masks.causal(), [12, 2]).isfinite().all()
    assert cache.attend(q[:, :3], mask, [3, 2]).isfinite().all()


def test_a_step_of_many_tokens_sees_no_evicted_page() -> None:
    mask = masks.window(1, 0) | masks.sinks(1)
    params = InferenceParams(1, 64, KV_HEADS, DIM, torch.float32, is_paged=True, page_size=PAGE)
    (sequence,) = new_sequences((31,))
    rows = []
    for first, stop, released in ((0, 12, 1), (12, 27, 4), (27, 31, 1)):
        params.pre_step({"a": stop - first})
        rows += params.attend(1, *(t[None, first:stop] for t in sequence), mask=mask)
        assert params.evict(mask) == released
        with pytest.raises(InputError, match="pre_step"):
            params.attend(1, *(t[None, first:stop] for t in sequence), mask=mask)
    torch.testing.assert_close(torch.cat(rows), in_one_pass(sequence, mask))


@pytest.mark.parametrize(
    "mask",
    [
        masks.predicate(lambda b, h, q, k: k > 3),
        masks.document_ids(torch.zeros(1, 1).int(), torch.zeros(1, 30).int()),
        masks.window(6, 0, align="top_left"),
        masks.chunks(8, offset=3),
        masks.causal() & masks.lengths([30]),
    ],
)
def test_masks_that_may_show_a_key_again_are_refused(mask: Mask) -> None:
    cache = PagedKVCache(8, PAGE, KV_HEADS, DIM, batch=1, dtype=torch.float32)
    one_step(cache, new_sequences((30,)), masks.causal())
    before = cache.block_table.clone(), cache.free_pages
    with pytest.raises(InputError, match="mask must consist of causal, window, sinks, prefix and chunks"):
        cache.evict(mask)
    assert torch.equal(cache.block_table, before[0])
    assert cache.free_pages == before[1]
    assert cache.evict(masks.causal()) == 0


@pytest.mark.parametrize(
    ("mask", "got"),
    [
        (None, "None"),
        ("causal", "str\n  HINT: a mask is built by a call: mask=masks.causal()"),
        (True, "bool"),
        (masks.causal, "function\n  HINT: add the parentheses: mask=masks.causal()"),
    ],
)
def test_what_is_not_a_mask_is_refused_without_offering_none(mask: Any, got: str) -> None:
    cache = PagedKVCache(8, PAGE, KV_HEADS, DIM, batch=1, dtype=torch.float32)
    with pytest.raises(InputError) as caught:
        cache.evict(mask)
    assert str(caught.value) == f"mask must be the undivided.masks.Mask of all later calls, got {got}"


def test_forks_share_what_one_of_them_evicts() -> None:
    cache = PagedKVCache(12, PAGE, KV_HEADS, DIM, batch=2, dtype=torch.float32)
    (sequence,) = new_sequences((24,))
    nothing = [t[:0] for t in sequence]
    one_step(cache, [sequence, nothing], STREAMING)
    cache.evict(STREAMING)
    free = cache.free_pages
    cache.fork(0, 1)
    assert cache.free_pages == free
    (ending,) = new_sequences((3,))
    outs = one_step(cache, [ending, [t.neg() for t in ending]], STREAMING)
    for sign, out in zip((1, -1), outs, strict=True):
        whole = [torch.cat([a, sign * b]) for a, b in zip(sequence, ending, strict=True)]
        torch.testing.assert_close(out, in_one_pass(whole, STREAMING)[24:])
    cache.free(0)
    cache.free(1)
    assert cache.free_pages == 12


def test_a_truncation_to_before_the_eviction_is_refused() -> None:
    cache = PagedKVCache(12, PAGE, KV_HEADS, DIM, batch=2, dtype=torch.float32)
    one_step(cache, new_sequences((30, 5)), STREAMING)
    cache.evict(STREAMING)
    with pytest.raises(InputError, match=r"lengths\[0\] must be 0 or at least the 30 tokens"):
        cache.truncate([29, 4])
    assert cache.lengths == (30, 5)
    cache.truncate([30, 4])  # nothing of the second sequence was evicted
    cache.truncate([0, 0])
    assert cache.free_pages == 12
    (sequence, _) = new_sequences((9, 0))
    out = one_step(cache, [sequence, [t[:0] for t in sequence]], masks.causal())[0]
    torch.testing.assert_close(out, in_one_pass(sequence, masks.causal()))


def test_a_default_device_does_not_change_what_is_evicted() -> None:
    cache = PagedKVCache(12, PAGE, KV_HEADS, DIM, batch=1, dtype=torch.float32)
    params = InferenceParams(1, 64, KV_HEADS, DIM, torch.float32, is_paged=True, page_size=PAGE)
    (sequence,) = new_sequences((31,))
    q, k, v = (t[None, 30:] for t in sequence)
    one_step(cache, [[t[:30] for t in sequence]], STREAMING)
    with torch.device("meta"):
        params.pre_step({"a": 30})
        params.attend(1, *(t[None, :30] for t in sequence), mask=STREAMING)
        assert cache.evict(STREAMING) == params.evict(STREAMING) == 5
        cache.append(k, v)
        outs = [cache.attend(q, STREAMING)]
        params.pre_step({"a": 1})
        outs.append(params.attend(1, q, k, v, mask=STREAMING))
    for out in outs:
        torch.testing.assert_close(out[0], in_one_pass(sequence, STREAMING)[30:])


def test_positions_of_a_step_are_on_the_cpu_before_the_device_is_known() -> None:
    with torch.device("meta"):
        params = InferenceParams(1, 64, KV_HEADS, DIM, torch.float32)
        params.pre_step({"a": 3})
    for tensor in (params.get_seqlens_pre_step(), params.cu_seqlens_q, params.cu_seqlens_kv, params.page_table):
        assert tensor.device == torch.device("cpu")


@pytest.mark.parametrize("max_sequences", [2, 4])
def test_a_mask_per_sequence_is_in_the_order_of_the_step(max_sequences: int) -> None:
    params = InferenceParams(max_sequences, 100, KV_HEADS, DIM, torch.float32, is_paged=True, page_size=PAGE)
    a, b = sequences = new_sequences((42, 42))
    mask = masks.window(6, 0) | (masks.prefix([0, 3 * PAGE]) & masks.causal())  # no prefix of b, which comes first
    params.pre_step(OrderedDict(a=40, b=40))
    params.attend(1, *(torch.stack([s[n][:40] for s in sequences]) for n in range(3)))
    for at in (40, 41):
        params.pre_step(OrderedDict(b=1, a=1))
        out = params.attend(1, *(torch.stack([s[n][at : at + 1] for s in (b, a)]) for n in range(3)), mask=mask)
        assert params.evict(mask) == {40: 13, 41: 2}[at]
    for row, sequence, prefix in ((0, b, 0), (1, a, 3 * PAGE)):
        alone = masks.window(6, 0) | (masks.prefix(prefix) & masks.causal())
        torch.testing.assert_close(out[row], in_one_pass(sequence, alone)[41:])


def test_all_layers_of_a_model_evict_together() -> None:
    params = InferenceParams(
        2, 100, KV_HEADS, DIM, torch.float32, is_paged=True, page_size=PAGE, total_num_pages=9, qkv_format="bshd"
    )
    sequences = new_sequences((60, 40))
    found: list[list[Tensor]] = [[], []]
    for n in range(40):
        params.pre_step(OrderedDict(a=1, b=1))
        for layer in (1, 2):
            q, k, v = (torch.stack([s[i][n : n + 1] for s in sequences]) * layer for i in range(3))
            out = params.attend(layer, q, k, v, mask=STREAMING if layer == 1 else masks.window(4, 0))
            if layer == 1:
                for b in range(2):
                    found[b].append(out[b])
        params.evict(STREAMING)
    for b in range(2):
        want = in_one_pass([t[:40] for t in sequences[b]], STREAMING)
        torch.testing.assert_close(torch.cat(found[b]), want)
    params.pre_step(OrderedDict(b=1))  # a has ended, and its pages are free
    with pytest.raises(InputError, match="is_paged must be True"):
        InferenceParams(2, 100, KV_HEADS, DIM, torch.float32).evict(STREAMING)

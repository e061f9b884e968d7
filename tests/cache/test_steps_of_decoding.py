"""Steps of decoding over pages: each runs what the step before prepared, with other ranges of keys."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import hypothesis
import pytest
import torch
from hypothesis import strategies
from native_oracle import needs_library
from torch import Tensor

import undivided
from undivided import masks
from undivided.masks.normal_form.ranges import last_query_form
from undivided.request.request import Request
from undivided.run import replay
from undivided.selection.policy import Policy

BATCH, HEADS, KV_HEADS, DIM = 3, 4, 2, 32
MASKS = {
    "None": None,
    "causal": masks.causal(),
    "bottom-right": masks.causal(align="bottom_right"),
    "window": masks.window(6, 0),
    "own key": masks.window(0, 0, align="bottom_right"),
    "sinks": masks.window(4, 0) | masks.sinks(2),
    "many sinks": masks.window(1, 0, align="bottom_right") | masks.sinks(12),
}


@pytest.fixture
def prepared_anew(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """The requests that were prepared from their arguments."""
    seen: list[Request] = []
    prepare: Callable[[Request, Policy], replay.PreparedCall | None] = replay.PreparedCall.prepare

    def counted(request: Request, allowed: Policy) -> replay.PreparedCall | None:
        seen.append(request)
        return prepare(request, allowed)

    monkeypatch.setattr(replay.PreparedCall, "prepare", counted)
    return seen


def new_tokens(layout: str, count: int, heads: int) -> Tensor:
    shapes = {"bshd": (BATCH, count, heads), "sbhd": (count, BATCH, heads), "bhsd": (BATCH, heads, count)}
    return torch.randn(*shapes.get(layout, (BATCH * count, heads)), DIM)


@needs_library
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
@pytest.mark.parametrize("layout", ["bshd", "sbhd", "bhsd", "thd"])
def test_every_step_sees_its_own_lengths(
    layout: str, quantize: str | None, name: str, prepared_anew: list[Request]
) -> None:
    """Three of every four steps have the pages of the step before; the other one has one more."""
    cache = undivided.PagedKVCache(
        64, 4, KV_HEADS, DIM, batch=BATCH, dtype=torch.float32, layout=layout, quantize=quantize
    )
    prompt = new_tokens(layout, 9, KV_HEADS)
    cache.append(prompt, prompt, lengths=[9] * BATCH if layout == "thd" else [9, 2, 5])
    mask = MASKS[name]
    if mask is not None:
        mask = mask & masks.window(None, None)  # an object of its own, without earlier calls
    for step in range(13):
        k, v, q = (new_tokens(layout, 1, heads) for heads in (KV_HEADS, KV_HEADS, HEADS))
        cache.append(k, v, lengths=[1] * BATCH if layout == "thd" else None)
        out, before = cache.attend(q, mask), len(prepared_anew)
        expected = cache.attend(q, mask, backend="reference")
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5, msg=lambda text, step=step: f"{step}: {text}")
        del prepared_anew[before:]
    assert len(prepared_anew) <= 5


@needs_library
@pytest.mark.parametrize("mask", [masks.causal(), masks.window(3, 0), masks.window(3, 0) | masks.sinks(2)], ids=str)
def test_a_step_that_was_prepared_before_decides_as_one_that_was_not(
    mask: masks.Mask, prepared_anew: list[Request]
) -> None:
    cache = undivided.PagedKVCache(64, 8, KV_HEADS, DIM, batch=BATCH, dtype=torch.float32)
    mask = mask & masks.window(None, None)  # an object of its own, without earlier calls
    problems = []
    for _ in range(6):
        k, q = new_tokens("bshd", 1, KV_HEADS), new_tokens("bshd", 1, HEADS)
        cache.append(k, k)
        cache.attend(q, mask)
        decision = undivided.last_decision()
        assert decision is not None
        cache.attend(q, mask, return_lse=True)  # never repeated
        other = undivided.last_decision()
        assert other is not None
        problems.append((decision.problem, other.problem._replace(features=decision.problem.features)))
    assert len(prepared_anew) == 2  # of one key, where the alignments agree, and of two
    for repeated, anew in problems:
        assert repeated == anew


@needs_library
def test_the_first_tokens_of_all_sequences_share_a_mask() -> None:
    """Both alignments mean the same for them, which selection reads: their steps are prepared anew."""
    mask = masks.window(3, 0)
    for _ in range(2):
        cache = undivided.PagedKVCache(8, 8, KV_HEADS, DIM, batch=BATCH, dtype=torch.float32)
        for _ in range(2):
            cache.append(*(new_tokens("bshd", 1, KV_HEADS) for _ in range(2)))
            q = new_tokens("bshd", 1, HEADS)
            out = cache.attend(q, mask)
            torch.testing.assert_close(out, cache.attend(q, mask, backend="reference"))


@needs_library
def test_drafts_and_idle_sequences_are_prepared_anew() -> None:
    cache = undivided.PagedKVCache(32, 8, KV_HEADS, DIM, batch=BATCH, dtype=torch.float32, layout="thd")
    for counts in ([5, 2, 9], [1, 1, 1], [1, 1, 1], [2, 2, 2], [1, 0, 1], [0, 1, 1], [3, 1, 2], [1, 1, 1]):
        k, q = torch.randn(sum(counts), KV_HEADS, DIM), torch.randn(sum(counts), HEADS, DIM)
        cache.append(k, k, lengths=counts)
        for mask in (None, masks.window(4, 0)):
            out, expected = (cache.attend(q, mask, q_lengths=counts, **o) for o in ({}, {"backend": "reference"}))
            torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@needs_library
def test_nothing_of_a_cache_is_kept_alive() -> None:
    cache = undivided.PagedKVCache(32, 8, KV_HEADS, DIM, batch=BATCH, dtype=torch.float32, quantize="int8")
    for _ in range(3):
        cache.append(*(new_tokens("bshd", 1, KV_HEADS) for _ in range(2)))
        cache.attend(new_tokens("bshd", 1, HEADS))
    gone = [weakref.ref(tensor) for tensor in (cache.k, cache.v_scale)]
    del cache
    assert [reference() for reference in gone] == [None, None]


@hypothesis.given(
    lengths=strategies.lists(strategies.integers(0, 40), min_size=1, max_size=5),
    left=strategies.none() | strategies.integers(0, 50),
    sinks=strategies.integers(0, 20),
    more=strategies.integers(0, 9),
)
def test_the_form_of_last_queries_is_that_of_the_mask(
    lengths: list[int], left: int | None, sinks: int, more: int
) -> None:
    kv_len = max(max(lengths), 1) + more
    form = last_query_form(lengths, left, kv_len, 2, torch.device("cpu"), 0 if left is None else sinks)
    mask = masks.window(left, 0, align="bottom_right")
    if sinks and left is not None:
        mask = mask | masks.sinks(sinks)
    mask = mask & masks.lengths(lengths)
    mask.check(len(lengths), 2, 1, kv_len, packed=False, device=torch.device("cpu"))
    expected = mask.normal_form(len(lengths), 2, 1, kv_len, "cpu")
    assert form.table.tolist() == expected.table.tolist()
    assert (form.kv_len, form.batch, form.heads, form.exact) == (kv_len, len(lengths), 2, expected.exact)
    assert form.first_key is expected.first_key is None

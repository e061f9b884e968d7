"""Sequences whose block tables begin with the same pages: their shared keys are read once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from native_oracle import ALLOWED, apart, needs_library
from torch import Tensor

import undivided
from undivided import masks
from undivided.masks import Mask

pytestmark = needs_library
DTYPES = pytest.mark.parametrize("dtype", ALLOWED, ids=lambda dtype: str(dtype).removeprefix("torch."))
PAGE, HEADS, KV_HEADS, DIM = 16, 8, 2, 32
CAUSAL = masks.causal("bottom_right")


class Cached:
    """Queries, pools and a block table; `prefixes` are the first pages of each sequence, those after them its own."""

    def __init__(self, prefixes: list[list[int]], lengths: list[int], dtype: torch.dtype, rows: int = 1) -> None:
        torch.manual_seed(0)
        self.lengths = torch.tensor(lengths)
        width = -(-max(lengths) // PAGE)
        own = max(max(prefix, default=-1) for prefix in prefixes) + 1
        pages = own + width * len(lengths)
        self.table = torch.arange(own, pages).int().view(len(lengths), width)
        for row, prefix in zip(self.table, prefixes, strict=True):
            row[: len(prefix)] = torch.tensor(prefix, dtype=torch.int32)
        self.q = torch.randn(len(lengths), rows, HEADS, DIM).to(dtype)
        self.k, self.v = (torch.randn(pages, PAGE, KV_HEADS, DIM).to(dtype) for _ in range(2))

    def arguments(self, mask: Mask | None = None, **options: Any) -> dict[str, Any]:
        lengths = masks.lengths(self.lengths)
        mask = lengths if mask is None else mask & lengths
        return {"layout": "bshd", "mask": mask, "pages": self.table, "backend": "native", **options}

    def run(self, mask: Mask | None = None, **options: Any) -> Tensor:
        out: Tensor = undivided.attention(self.q, self.k, self.v, **self.arguments(mask, **options))
        return out

    def unshared(self, mask: Mask | None = None, **options: Any) -> Tensor:
        """The same, each sequence in a call of its own."""
        arguments = self.arguments(mask, **options)
        outs = []
        for n, length in enumerate(self.lengths):
            one = masks.lengths(length[None])
            alone = {**arguments, "mask": one if mask is None else mask & one, "pages": self.table[n : n + 1]}
            outs.append(undivided.attention(self.q[n : n + 1], self.k, self.v, **alone))
        return torch.cat(outs)

    def check(self, mask: Mask | None = None, **options: Any) -> None:
        expected = self.unshared(mask, **options).double()
        assert apart(self.run(mask, **options), expected) < ALLOWED[self.q.dtype]

    def notes(self, mask: Mask | None = None) -> tuple[str, ...]:
        return undivided.explain(self.q, self.k, self.v, **self.arguments(mask)).notes


TWELVE = list(range(12))  # pages, of 192 keys
GROUPS = {
    "one prefix": ([TWELVE] * 5, [300, 193, 192, 250, 400], ("5 sequences share keys 0 to 191",)),
    "two prefixes, one sequence apart": (
        [TWELVE, list(range(20, 32)), TWELVE, [], list(range(20, 32)), list(range(20, 32)), TWELVE],
        [300, 200, 193, 220, 208, 300, 192],
        ("3 sequences share keys 0 to 191", "3 sequences share keys 0 to 191"),
    ),
    "nested": (
        [TWELVE] * 3 + [[*TWELVE, *range(20, 30)]] * 3,
        [300, 200, 210, 360, 353, 380],
        ("6 sequences share keys 0 to 191", "3 sequences share keys 192 to 351"),
    ),
    "limited by the shortest": ([TWELVE] * 4, [130, 300, 300, 140], ("4 sequences share keys 0 to 127",)),
}


@pytest.mark.parametrize("group", list(GROUPS))
@DTYPES
def test_shared_keys_are_read_once_and_give_the_result_of_separate_calls(group: str, dtype: torch.dtype) -> None:
    prefixes, lengths, notes = GROUPS[group]
    cached = Cached(prefixes, lengths, dtype)
    assert cached.notes() == notes
    sinks = torch.randn(HEADS)
    for options in ({}, {"sinks": sinks}, {"softcap": 3.0}):
        cached.check(**options)
    cached.unshared()
    decision = undivided.last_decision()
    assert decision is not None
    assert not decision.notes
    cached.run()
    decision = undivided.last_decision()
    assert decision is not None
    assert decision.notes == notes
    assert "note: " + notes[0] in str(decision)
    undivided.attention(cached.q[:, :0], cached.k, cached.v, **cached.arguments())
    decision = undivided.last_decision()
    assert decision is not None
    assert not decision.notes


def test_the_log_sum_exp_of_shared_keys() -> None:
    cached = Cached([TWELVE] * 4, [192, 300, 200, 250], torch.float32)
    out, lse = cached.run(return_lse=True)
    expected_out, expected = cached.run(return_lse=True, backend="reference")
    torch.testing.assert_close(out, expected_out)
    torch.testing.assert_close(lse, expected)


@DTYPES
def test_a_window_that_begins_after_the_first_key_shares_nothing(dtype: torch.dtype) -> None:
    cached = Cached([TWELVE] * 5, [300, 193, 192, 250, 280], dtype)
    cut, whole = (masks.window(left, 0, align="bottom_right") for left in (100, 400))
    assert cached.notes(cut) == ()
    assert cached.notes(whole) == ("5 sequences share keys 0 to 191",)
    for mask in (cut, whole, cut | masks.sinks(4, align="bottom_right")):
        cached.check(mask)


def test_sequences_with_few_shared_keys_or_rows_are_computed_alone() -> None:
    assert Cached([TWELVE[:7]] * 5, [300] * 5, torch.float32).notes() == ()
    assert Cached([TWELVE, TWELVE, [], []], [300] * 4, torch.float32).notes() == ()
    assert Cached([TWELVE] * 3, [300, 0, 300], torch.float32).notes() == ()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_shared_keys_with_threads(threads: int) -> None:
    cached = Cached([TWELVE] * 4 + [[]], [300, 200, 193, 900, 700], torch.float32)
    before = torch.get_num_threads()
    expected = cached.run()
    try:
        torch.set_num_threads(threads)
        assert torch.equal(cached.run(), expected)
    finally:
        torch.set_num_threads(before)


def test_shared_keys_whose_numbers_do_not_fit_16_bit_parts() -> None:
    cached = Cached([TWELVE] * 4, [300, 200, 193, 250], torch.float32)
    cached.k[3] *= 1e30
    cached.q *= 1e-20
    cached.check()


def test_pages_that_no_row_sees_are_not_read() -> None:
    cached = Cached([TWELVE] * 4, [300, 200, 193, 250], torch.float32)
    expected = cached.run()
    table = cached.table.clone()
    for row, length in zip(table, cached.lengths, strict=True):
        row[-(-int(length) // PAGE) :] = -1
    cached.table = table
    used = torch.zeros(len(cached.k), dtype=torch.bool)
    used[table[table >= 0].long()] = True
    for pool in (cached.k, cached.v):
        pool[~used] = torch.nan
    assert torch.equal(cached.run(), expected)


def test_forks_of_a_cache_share_their_prompt() -> None:
    cache = undivided.PagedKVCache(64, PAGE, KV_HEADS, DIM, batch=6, dtype=torch.float32)
    prompt = torch.randn(6, 200, KV_HEADS, DIM)
    cache.append(prompt, prompt, lengths=[200, 0, 0, 0, 0, 0])
    cache.fork([0] * 5, [1, 2, 3, 4, 5])
    new = torch.randn(6, 1, KV_HEADS, DIM)
    cache.append(new, new)
    q = torch.randn(6, 1, HEADS, DIM)
    out = cache.attend(q, backend="native")
    decision = undivided.last_decision()
    assert decision is not None
    assert decision.notes == ("6 sequences share keys 0 to 191",)
    torch.testing.assert_close(out, cache.attend(q, backend="reference"))

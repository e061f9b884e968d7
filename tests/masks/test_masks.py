"""Masks as exact sets of pairs, compared with definitions written as nested loops that share no code with the
library."""

from __future__ import annotations

import pytest
import torch
from mask_pairs import ALIGNS, Case, agree, causal_rule, chunks_rule, either, prefix_rule, sinks_rule, window_rule

from undivided import masks
from undivided.masks import FULL

SIZES = [(0, 0), (0, 3), (3, 0), (1, 1), (1, 5), (5, 1), (4, 4), (4, 7), (7, 4)]


@pytest.mark.parametrize(("q_len", "kv_len"), SIZES, ids=lambda n: str(n))
@pytest.mark.parametrize("align", ALIGNS)
class TestConstructors:
    """Every mask of positions only, with both alignments, and equal, unequal and zero lengths."""

    def test_causal(self, q_len: int, kv_len: int, align: str) -> None:
        agree(Case(masks.causal(align), 1, q_len, kv_len, rules=(causal_rule,), align=align))

    @pytest.mark.parametrize("left", [None, 0, 2], ids=lambda n: f"left{n}")
    @pytest.mark.parametrize("right", [None, 0, 1], ids=lambda n: f"right{n}")
    def test_window(self, q_len: int, kv_len: int, align: str, left: int | None, right: int | None) -> None:
        agree(Case(masks.window(left, right, align), 1, q_len, kv_len, rules=(window_rule(left, right),), align=align))

    @pytest.mark.parametrize("n", [0, 2, 9])
    def test_prefix_joined_to_a_window(self, q_len: int, kv_len: int, align: str, n: int) -> None:
        for left, right in [(None, 0), (1, 0), (0, 1), (1, None), (None, None)]:
            rules = (either(window_rule(left, right), prefix_rule(n)),)
            for mask in (
                masks.window(left, right, align) | masks.prefix(n),
                masks.prefix(n) | masks.window(left, right, align),
            ):
                agree(Case(mask, 1, q_len, kv_len, rules=rules, align=align))

    @pytest.mark.parametrize("n", [0, 2, 9])
    def test_sinks(self, q_len: int, kv_len: int, align: str, n: int) -> None:
        agree(Case(masks.sinks(n, align), 1, q_len, kv_len, rules=(sinks_rule(n),), align=align))

    @pytest.mark.parametrize("n", [0, 2, 9])
    def test_sinks_joined_to_a_window(self, q_len: int, kv_len: int, align: str, n: int) -> None:
        for left, right in [(None, 0), (0, 0), (1, 0), (0, 1), (2, 3), (1, None), (None, None)]:
            rules = (either(window_rule(left, right), sinks_rule(n)),)
            for mask in (
                masks.window(left, right, align) | masks.sinks(n),
                masks.sinks(n) | masks.window(left, right, align),
            ):
                agree(Case(mask, 1, q_len, kv_len, rules=rules, align=align))

    @pytest.mark.parametrize("offset", [None, 0, 1, 5, -4])
    def test_chunks(self, q_len: int, kv_len: int, align: str, offset: int | None) -> None:
        for size in (1, 3, 100):
            mask = masks.chunks(size, align, offset=offset)
            agree(Case(mask, 1, q_len, kv_len, rules=(chunks_rule(size, offset),), align=align))

    def test_a_bare_prefix(self, q_len: int, kv_len: int, align: str) -> None:
        agree(Case(masks.prefix(2), 1, q_len, kv_len, rules=(prefix_rule(2),)))


def test_full_is_every_pair() -> None:
    agree(Case(FULL, 2, 3, 4))
    assert FULL.is_full
    assert str(FULL).startswith("every pair")


def test_chunk_offset_counts_from_the_queries_own_place_in_the_sequence() -> None:
    """A prefill chunk whose first query is token 6 of 4-token chunks sees keys 4.. of the cache that starts at 0."""
    mask = masks.chunks(4, align="bottom_right", offset=6)
    assert mask.intervals(2, 8).tolist() == [[[4, 8], [4, 8]]]


def test_no_batch_elements_give_no_pairs() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    for mask in (masks.causal(), masks.lengths(none, none), masks.causal() & masks.lengths(none, none)):
        assert mask.to_dense(0, 2, 3, 3).shape == (0, 2, 3, 3)

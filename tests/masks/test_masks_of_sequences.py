"""Masks of lengths, documents, ids, tensors and functions are their exact sets of pairs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from mask_pairs import (
    ALIGNS,
    CPU,
    Case,
    Place,
    agree,
    causal_rule,
    chunks_rule,
    dense_rule,
    either,
    ids_rule,
    prefix_rule,
    window_rule,
)
from torch import Tensor

from undivided import masks

LENGTHS = {
    "right-padding": {"kv": [0, 3, 7], "q": [4, 2, 0]},
    "queries-all-real": {"kv": [1, 4, 7]},
    "left-padding": {"kv": [2, 5, 0], "q": [3, 1, 4], "kv_start": [5, 1, 2], "q_start": [1, 3, 0]},
    "starts-of-keys-alone": {"kv": [2, 5, 0], "kv_start": [5, 1, 2]},
}


@pytest.mark.parametrize("given_", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("align", ALIGNS)
def test_lengths(given_: dict[str, list[int]], dtype: torch.dtype, align: str) -> None:
    batch, q_len, kv_len = 3, 4, 7
    lengths = masks.lengths(**{name: torch.tensor(value, dtype=dtype) for name, value in given_.items()})
    sequences = tuple(
        zip(
            given_.get("q_start", [0] * batch),
            given_.get("q", [q_len] * batch),
            given_.get("kv_start", [0] * batch),
            given_["kv"],
            strict=True,
        )
    )
    base = Case(lengths, batch, q_len, kv_len, sequences=sequences, align=align)
    agree(base)
    agree(replace(base, mask=lengths & masks.causal(align), rules=(causal_rule,)))
    agree(replace(base, mask=masks.window(1, 1, align) & lengths, rules=(window_rule(1, 1),)))
    agree(replace(base, mask=masks.chunks(2, align) & lengths, rules=(chunks_rule(2, None),)))
    n = [0, 2, 3]
    rules = (either(window_rule(1, 0), prefix_rule(n)),)
    agree(replace(base, mask=(masks.window(1, 0, align) | masks.prefix(n)) & lengths, rules=rules))


DOCUMENTS = {
    "one": ([0, 5], None, None, None),
    "several-with-an-empty-one": ([0, 2, 2, 5], None, None, None),
    "rows-after-the-last": ([0, 2, 3], None, None, None),
    "no-documents": ([0], None, None, None),
    "other-keys": ([0, 2, 2, 5], [0, 1, 4, 4], None, None),
    "padded": ([0, 2, 2, 4], None, [0, 3, 4, 6], None),
    "padded-at-the-start": ([0, 1, 3], None, [1, 3, 5], None),
    "padded-queries-and-other-keys": ([0, 2, 3], [0, 3, 4], [0, 3, 5], None),
    "both-padded": ([0, 2, 3], [0, 3, 4], [0, 3, 5], [0, 4, 6]),
}


def documents_case(name: str, align: str | None) -> Case:
    cu_q, cu_kv, padded_q, padded_kv = DOCUMENTS[name]
    mask = masks.documents(cu_q, cu_kv, padded_q=padded_q, padded_kv=padded_kv, total_q=6, total_kv=7)
    slots_q = padded_q or cu_q
    slots_kv = padded_kv or cu_kv or padded_q or cu_q
    cu_kv = cu_kv or cu_q
    sequences = tuple(
        (slots_q[n], cu_q[n + 1] - cu_q[n], slots_kv[n], cu_kv[n + 1] - cu_kv[n]) for n in range(len(cu_q) - 1)
    )
    # a document list without documents still owns every pair of the call: none
    sequences = sequences or ((0, 0, 0, 0),)
    return Case(mask, 1, 6, 7, sequences=sequences, packed=True, align=align)


@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.parametrize("align", ALIGNS)
def test_documents(name: str, align: str) -> None:
    base = documents_case(name, align)
    agree(base)
    agree(replace(base, mask=base.mask & masks.causal(align), rules=(causal_rule,)))
    agree(replace(base, mask=base.mask & masks.window(0, 1, align), rules=(window_rule(0, 1),)))
    agree(replace(base, mask=base.mask & masks.chunks(2, align), rules=(chunks_rule(2, None),)))
    n = [2, 0, 1][: len(base.sequences)] if DOCUMENTS[name][0] != [0] else []
    mask = base.mask & (masks.window(0, 0, align) | masks.prefix(torch.tensor(n, dtype=torch.int32)))
    agree(replace(base, mask=mask, rules=(either(window_rule(0, 0), prefix_rule(n)),)))


def test_documents_positions_count_within_each_document() -> None:
    mask = masks.documents([0, 2, 3], padded_q=[0, 3, 5]) & masks.causal(align="bottom_right")
    form = mask.normal_form(1, 1, 5, 5, CPU)
    assert form.q_position.tolist() == [[0, 1, 2, 0, 1]]
    assert form.kv_position.tolist() == [[0, 1, 2, 0, 1]]
    assert form.q_sequence.tolist() == [[0, 0, 0, 1, 1]]
    assert form.shift.tolist() == [[0] * 5]


def test_positions_of_lengths_with_starts_and_bottom_right_shift() -> None:
    mask = masks.lengths([5, 2], q=[2, 2], kv_start=[0, 4], q_start=[1, 0]) & masks.causal("bottom_right")
    form = mask.normal_form(2, 1, 3, 6, CPU)
    assert form.q_position.tolist() == [[-1, 0, 1], [0, 1, 2]]
    assert form.kv_position.tolist() == [[0, 1, 2, 3, 4, 5], [-4, -3, -2, -1, 0, 1]]
    assert form.q_sequence.tolist() == [[0, 0, 0], [1, 1, 1]]
    assert form.shift.expand(2, 3).tolist() == [[3, 3, 3], [0, 0, 0]]
    assert {t.dtype for t in (form.q_position, form.kv_position, form.q_sequence, form.shift)} == {torch.int32}


IDS = {
    "runs": ([[0, 0, 3, 3, 3]], None),
    "padding": ([[-1, 0, 0, 1, -1], [2, 2, -1, -1, -1]], None),
    "padding-in-one-run": ([[0, 0, -1, -1]], None),
    "several-runs": ([[0, 1, 0, 1, 2]], None),
    "runs-in-one-row-only": ([[0, 0, 1, 1, 1], [1, 0, 0, 1, 0]], None),
    "other-keys": ([[0, 1, 1], [5, 5, 5]], [[1, 1, 0, 0], [5, 4, 5, 5]]),
    "shared-queries": ([[0, 1, 1]], [[1, 1, 0, 0], [1, 0, 1, 0]]),
    "unknown-ids": ([[7, 8]], [[1, 2, 3]]),
    "no-keys": ([[0, 0]], [[]]),
}


@pytest.mark.parametrize("name", IDS)
def test_document_ids(name: str) -> None:
    ids_q, ids_kv = IDS[name][0], IDS[name][1] or IDS[name][0]
    mask = masks.document_ids(
        torch.tensor(ids_q), None if IDS[name][1] is None else torch.tensor(ids_kv, dtype=torch.int64)
    )
    base = Case(mask, 2, len(ids_q[0]), len(ids_kv[0]), rules=(ids_rule(ids_q, ids_kv),), align="bottom_right")
    agree(base)
    agree(replace(base, mask=mask & masks.causal("bottom_right"), rules=(*base.rules, causal_rule)))


def test_document_ids_in_runs_are_exact_ranges_and_in_pieces_are_not() -> None:
    assert masks.document_ids([0, 0, 1, -1]).normal_form(1, 1, 4, 4, CPU).exact
    assert not masks.document_ids([0, 1, 0]).normal_form(1, 1, 3, 3, CPU).exact


def test_document_ids_keep_the_positions_of_the_rows_beside_lengths() -> None:
    lengths = masks.lengths([2, 4], q=[2, 4])
    ids = [[0, 0, 0, 0], [0, 1, 1, 1]]
    case = Case(
        lengths & masks.document_ids(torch.tensor(ids)) & masks.causal(),
        2,
        4,
        4,
        rules=(ids_rule(ids, ids), causal_rule),
        sequences=((0, 2, 0, 2), (0, 4, 0, 4)),
    )
    agree(case)


@pytest.mark.parametrize("shape", [(5, 6), (2, 3, 5, 6), (1, 3, 5, 1), (2, 1, 1, 6), (1, 1, 1, 1)], ids=str)
def test_dense(shape: tuple[int, ...]) -> None:
    tensor = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.3
    rule = dense_rule(tensor if tensor.dim() == 4 else tensor[None, None])
    agree(Case(masks.dense(tensor), 2, 5, 6, heads=3, rules=(rule,)))
    mask = masks.dense(tensor) & masks.causal("bottom_right")
    agree(Case(mask, 2, 5, 6, heads=3, rules=(rule, causal_rule), align="bottom_right"))


def test_dense_intervals_are_the_hull_over_all_heads() -> None:
    tensor = torch.zeros(1, 2, 2, 6, dtype=torch.bool)
    tensor[0, 0, 0, 4], tensor[0, 1, 0, 1] = True, True
    assert masks.dense(tensor).intervals(2, 6).tolist() == [[[1, 5], [0, 0]]]


PREDICATES: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "pairs": lambda b, h, q, k: (q + 2 * k) % 3 == 0,
    "heads": lambda b, h, q, k: (k % (h + 1) == 0) & (q >= k),
    "batch": lambda b, h, q, k: q * b >= k,
    "rows-alone": lambda b, h, q, k: q == 1,
    "nothing": lambda b, h, q, k: (q < 0) & (k < 0),
}


@pytest.mark.parametrize("name", PREDICATES)
def test_predicate(name: str) -> None:
    fn = PREDICATES[name]

    def rule(place: Place) -> bool:
        return bool(fn(*(torch.tensor(n) for n in (place.b, place.h, place.row, place.key))))

    agree(Case(masks.predicate(fn), 2, 5, 4, heads=3, rules=(rule,)))
    mask = masks.predicate(fn) & masks.window(2, 0, "top_left")
    agree(Case(mask, 2, 5, 4, heads=3, rules=(rule, window_rule(2, 0)), align="top_left"))


def test_predicates_are_called_with_index_tensors_that_broadcast() -> None:
    seen: list[tuple[tuple[int, ...], torch.dtype]] = []

    def fn(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen.extend((tuple(t.shape), t.dtype) for t in (b, h, q, k))
        return (q + k) % 2 == 0

    masks.predicate(fn).normal_form(2, 3, 4, 5, CPU).allowed(slice(0, 2), slice(1, 4), slice(0, 5), slice(1, 3))
    assert {dtype for _, dtype in seen} == {torch.int64}
    assert [shape for shape, _ in seen[-4:]] == [(2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 3, 1), (1, 1, 1, 5)]


def test_two_windows_with_prefixes_keep_exact_pairs_beside_ranges() -> None:
    """Two unions intersected may need three ranges per row: the ranges become a hull, the pairs stay exact."""
    mask = (masks.window(1, 0, "top_left") | masks.prefix(6)) & (masks.window(4, 4, "top_left") | masks.prefix(2))
    rules = (either(window_rule(1, 0), prefix_rule(6)), either(window_rule(4, 4), prefix_rule(2)))
    agree(Case(mask, 1, 12, 12, rules=rules, align="top_left"))
    assert not mask.normal_form(1, 1, 12, 12, CPU).exact


def test_a_streaming_window_with_sinks_never_sees_the_future() -> None:
    """`window(left, 0) | prefix(n)` lets the first n - 1 rows see keys after their own; `sinks(n)` does not."""
    future = torch.ones(8, 8, dtype=torch.bool).triu(1)
    assert not (masks.window(2, 0) | masks.sinks(4)).to_dense(1, 1, 8, 8)[..., future].any()
    assert (masks.window(2, 0) | masks.prefix(4)).to_dense(1, 1, 8, 8)[..., future].any()


def test_sinks_joined_to_a_window_are_described_by_their_calls() -> None:
    mask = masks.window(2, 0, align="bottom_right") | masks.sinks(4)
    assert repr(mask) == "window(2, 0, align='bottom_right') | sinks(4)"
    assert masks.describe(mask.structure) == "(window(2, 0) | sinks) (bottom-right)"
    spec, tensors = mask.flatten()
    assert repr(masks.Mask.unflatten(spec, tensors)) == repr(mask)


def test_prefix_lm_needs_one_range_per_row() -> None:
    assert (masks.causal() | masks.prefix(3)).intervals(5, 5).shape[-1] == 2

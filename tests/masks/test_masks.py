"""Masks as exact sets of pairs, compared with definitions written as nested loops that share no code with the
library."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise, product

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from undivided import masks
from undivided.masks import FULL, Mask

CPU = torch.device("cpu")
Rule = Callable[["Place"], bool]


@dataclass(frozen=True)
class Place:
    """One pair within its sequence: positions i', j', real lengths, alignment, raw indices."""

    i: int
    j: int
    q_len: int
    kv_len: int
    align: str | None
    sequence: int
    b: int
    h: int
    row: int
    key: int

    @property
    def d(self) -> int:
        return self.kv_len - self.q_len if self.align == "bottom_right" else 0


@dataclass(frozen=True)
class Case:
    """A call, its sequences, the rules of its mask, and the mask that the library built."""

    mask: Mask
    batch: int
    q_len: int
    kv_len: int
    heads: int = 1
    rules: tuple[Rule, ...] = ()
    align: str | None = None
    # (q_start, q_len, kv_start, kv_len) of each sequence; of each batch element, or of the documents of the only one
    sequences: tuple[tuple[int, int, int, int], ...] = ()
    packed: bool = False

    def places(self, b: int, h: int, row: int, key: int) -> Iterator[Place]:
        """The pair within each sequence that contains both its row and its key."""
        sequences = self.sequences or tuple((0, self.q_len, 0, self.kv_len) for _ in range(self.batch))
        for n, (q_start, q_len, kv_start, kv_len) in enumerate(sequences):
            i, j = row - q_start, key - kv_start
            if (self.packed or n == b) and 0 <= i < q_len and 0 <= j < kv_len:
                yield Place(i, j, q_len, kv_len, self.align, n, b, h, row, key)

    def pairs(self) -> set[tuple[int, int, int, int]]:
        indices = product(range(self.batch), range(self.heads), range(self.q_len), range(self.kv_len))
        return {
            index for index in indices if any(all(rule(place) for rule in self.rules) for place in self.places(*index))
        }


def pairs_of(tensor: Tensor) -> set[tuple[int, ...]]:
    return {tuple(index) for index in tensor.nonzero().tolist()}


def agree(case: Case) -> None:
    """Assert that every representation of the mask has the pairs of the definition."""
    sizes = (case.batch, case.heads, case.q_len, case.kv_len)
    expected = case.pairs()
    case.mask.check(*sizes, packed=case.packed, device=CPU)
    dense = case.mask.to_dense(*sizes)
    assert pairs_of(dense) == expected
    form = case.mask.normal_form(*sizes, CPU)
    ranges = form.ranges
    assert ranges.dtype == torch.int32
    assert ranges.shape[0] in (1, case.batch)
    assert ranges.shape[1] == case.q_len
    check_order(ranges)
    painted = paint(ranges, case.kv_len)
    expected_any_head = {(b, i, j) for b, _, i, j in expected}
    if form.exact:
        assert pairs_of(painted.expand(case.batch, -1, -1)) == expected_any_head
    else:
        assert pairs_of(painted.expand(case.batch, -1, -1)) >= expected_any_head
    assert form.pairs == len(expected)
    check_rows(form, dense)
    check_blocks(form, dense)
    check_tiles(form, dense)
    again = Mask.unflatten(*case.mask.flatten())
    assert torch.equal(again.to_dense(*sizes), dense)
    assert again.structure == case.mask.structure


def check_order(ranges: Tensor) -> None:
    for row in ranges.flatten(0, 1).tolist():
        pairs = [row[n : n + 2] for n in range(0, len(row), 2)]
        assert all(start < stop or [start, stop] == [0, 0] for start, stop in pairs)
        if len(pairs) == 2 and pairs[1] != [0, 0]:
            assert pairs[0][0] < pairs[0][1] < pairs[1][0], "two ranges: both used, disjoint, apart, in order"


def paint(ranges: Tensor, kv_len: int) -> Tensor:
    painted = torch.zeros(*ranges.shape[:2], kv_len, dtype=torch.bool)
    for b, row in product(range(ranges.shape[0]), range(ranges.shape[1])):
        bounds = ranges[b, row].tolist()
        for n in range(0, len(bounds), 2):
            painted[b, row, bounds[n] : bounds[n + 1]] = True
    return painted


def check_rows(form: masks.NormalForm, dense: Tensor) -> None:
    rows = form.rows_allowed if form.rows_allowed.dim() == 3 else form.rows_allowed[:, None]
    assert torch.equal(rows.expand(dense.shape[:3]), dense.any(-1))


def check_blocks(form: masks.NormalForm, dense: Tensor) -> None:
    choose = random.Random(0)
    for _ in range(4):
        cuts = [sorted(choose.choices(range(size + 1), k=2)) for size in dense.shape]
        batch, heads, rows, keys = (slice(start, stop) for start, stop in cuts)
        block = form.allowed(batch, rows, keys, heads)
        assert block.shape[2:] == dense[batch, heads, rows, keys].shape[2:]
        if batch.start < batch.stop and heads.start < heads.stop:
            assert torch.equal(block.expand(dense[batch, heads, rows, keys].shape), dense[batch, heads, rows, keys])
        keys_used = paint(form.ranges, form.kv_len).expand(dense.shape[0], -1, -1)[batch, rows].nonzero()[:, 2]
        hull = (int(keys_used.min()), int(keys_used.max()) + 1) if len(keys_used) else (0, 0)
        assert form.hull(batch, rows) == hull


def check_tiles(form: masks.NormalForm, dense: Tensor) -> None:
    block_q, block_k = 3, 2
    tiles = form.tiles(block_q, block_k)
    wanted = (*dense.shape[:2], -(-dense.shape[2] // block_q), -(-dense.shape[3] // block_k))
    assert tiles.dtype == torch.uint8
    assert tiles.shape[2:] == wanted[2:]
    for b, h, row, key in product(*(range(size) for size in wanted)):
        tile = dense[b, h, row * block_q : (row + 1) * block_q, key * block_k : (key + 1) * block_k]
        value = 2 if tile.all() else 1 if tile.any() else 0
        assert tiles.expand(wanted)[b, h, row, key] == value


# The definitions, one rule per constructor.


def causal_rule(place: Place) -> bool:
    return place.j <= place.i + place.d


def window_rule(left: int | None, right: int | None) -> Rule:
    return lambda place: (
        (left is None or place.i + place.d - left <= place.j)
        and (right is None or place.j <= place.i + place.d + right)
    )


def prefix_rule(n: int | list[int]) -> Rule:
    return lambda place: place.j < (n if isinstance(n, int) else n[place.sequence])


def sinks_rule(n: int | list[int]) -> Rule:
    return lambda place: prefix_rule(n)(place) and causal_rule(place)


def chunks_rule(size: int, offset: int | list[int] | None) -> Rule:
    def rule(place: Place) -> bool:
        shift = place.d if offset is None else offset if isinstance(offset, int) else offset[place.sequence]
        return (place.i + shift) // size == (place.j - place.d + shift) // size

    return rule


def ids_rule(ids_q: list[list[int]], ids_kv: list[list[int]]) -> Rule:
    def rule(place: Place) -> bool:
        mine, its = ids_q[place.b % len(ids_q)][place.row], ids_kv[place.b % len(ids_kv)][place.key]
        return mine >= 0 and mine == its

    return rule


def dense_rule(tensor: Tensor) -> Rule:
    def rule(place: Place) -> bool:
        index = (place.b, place.h, place.row, place.key)
        return bool(tensor[tuple(n if size > 1 else 0 for n, size in zip(index, tensor.shape, strict=True))])

    return rule


def either(*rules: Rule) -> Rule:
    return lambda place: any(rule(place) for rule in rules)


SIZES = [(0, 0), (0, 3), (3, 0), (1, 1), (1, 5), (5, 1), (4, 4), (4, 7), (7, 4)]
ALIGNS = ["top_left", "bottom_right"]


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
        return q >= k

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


# Random masks: any parts of any call, joined by &.


@dataclass
class Drawn:
    mask: Mask
    rules: list[Rule] = field(default_factory=list)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A call with lengths, documents or neither, and up to four more parts."""
    kind = draw(st.sampled_from(["plain", "lengths", "documents"]))
    batch = 1 if kind == "documents" else draw(st.integers(1, 2))
    q_len, kv_len = draw(st.integers(0, 7)), draw(st.integers(0, 7))
    heads, align = draw(st.integers(1, 2)), draw(st.sampled_from(ALIGNS))
    case = Case(FULL, batch, q_len, kv_len, heads=heads, align=align)
    if kind == "lengths":
        case = with_lengths(draw, case)
    elif kind == "documents":
        case = with_documents(draw, case)
    count = len(case.sequences) or batch
    mask, rules = case.mask, list(case.rules)
    for part in draw(st.lists(st.sampled_from(list(PARTS)), max_size=4)):
        drawn = PARTS[part](draw, case, count)
        mask = mask & drawn.mask if draw(st.booleans()) else drawn.mask & mask
        rules += drawn.rules
    return replace(case, mask=mask, rules=tuple(rules))


def with_lengths(draw: st.DrawFn, case: Case) -> Case:
    def side(limit: int, starts: bool) -> tuple[list[int], list[int]]:
        start = [draw(st.integers(0, limit)) if starts else 0 for _ in range(case.batch)]
        return start, [draw(st.integers(0, limit - one)) for one in start]

    starts = draw(st.booleans())
    kv_start, kv = side(case.kv_len, starts)
    if draw(st.booleans()):
        q_start, q = side(case.q_len, starts)
        mask = masks.lengths(kv, q, kv_start, q_start) if starts else masks.lengths(kv, q)
    else:
        q_start, q = [0] * case.batch, [case.q_len] * case.batch
        mask = masks.lengths(kv, kv_start=kv_start if starts else None)
    return replace(case, mask=mask, sequences=tuple(zip(q_start, q, kv_start, kv, strict=True)))


def with_documents(draw: st.DrawFn, case: Case) -> Case:
    count = draw(st.integers(1, 3))

    def side(limit: int, padded: bool) -> tuple[list[int], list[int]]:
        slots = sorted(draw(st.lists(st.integers(0, limit), min_size=count, max_size=count)))
        slots = [0, *slots]
        sizes = [draw(st.integers(0, b - a)) if padded else b - a for a, b in pairwise(slots)]
        return slots, sizes

    padded = draw(st.booleans())
    (slots_q, q), (slots_kv, kv) = side(case.q_len, padded), side(case.kv_len, padded)
    cu_q, cu_kv = ([sum(sizes[:n]) for n in range(count + 1)] for sizes in (q, kv))
    totals = {"total_q": case.q_len, "total_kv": case.kv_len}
    slots = (slots_q, slots_kv) if padded else (None, None)
    mask = masks.documents(cu_q, cu_kv, *slots, **totals)
    sequences = tuple(zip(slots_q[:-1], q, slots_kv[:-1], kv, strict=True))
    return replace(case, mask=mask, sequences=sequences, packed=True)


def drawn_sides(draw: st.DrawFn) -> tuple[int | None, int | None]:
    side = st.none() | st.integers(0, 3)
    return draw(side), draw(side)


def drawn_count(draw: st.DrawFn, count: int, low: int = 0) -> int | list[int]:
    if draw(st.booleans()):
        return draw(st.integers(low, 5))
    return draw(st.lists(st.integers(low, 5), min_size=count, max_size=count))


def drawn_causal(draw: st.DrawFn, case: Case, count: int) -> Drawn:
    return Drawn(masks.causal(case.align), [causal_rule])  # type: ignore[arg-type]


def drawn_window(draw: st.DrawFn, case: Case, count: int) -> Drawn:
    left, right = drawn_sides(draw)
    return Drawn(masks.window(left, right, case.align), [window_rule(left, right)])  # type: ignore[arg-type]


def drawn_prefix(draw: st.DrawFn, case: Case, count: int) -> Drawn:
    n = drawn_count(draw, count)
    return Drawn(masks.prefix(n), [prefix_rule(n)])


def drawn_union(draw: st.DrawFn, case: Case, count: int) -> Drawn:
    (left, right), n = drawn_sides(draw), drawn_count(draw, count)
    first, rule = (masks.sinks, sinks_rule) if draw(st.booleans()) else (masks.prefix, prefix_rule)
    mask = masks.window(left, right, case.align) | first(n)  # type: ignore[arg-type]
    return Drawn(mask, [either(window_rule(left, right), rule(n))])


def drawn_chunks(draw: st.DrawFn, case: Case, count: int) -> Drawn:
    size = draw(st.integers(1, 4))
    offset = None if draw(st.booleans()) else drawn_count(draw, count, low=-3)
    return Drawn(masks.chunks(size, case.align, offset), [chunks_rule(size, offset)])  # type: ignore[arg-type]


def drawn_ids(draw: st.DrawFn, case: Case, count: int) -> Drawn:
    def ids(length: int) -> list[list[int]]:
        rows = draw(st.sampled_from([1, case.batch]))
        one = st.lists(st.integers(-1, 2), min_size=length, max_size=length)
        return [sorted(draw(one)) if draw(st.booleans()) else draw(one) for _ in range(rows)]

    ids_q, ids_kv = ids(case.q_len), ids(case.kv_len)
    as_ids = [torch.tensor(rows, dtype=torch.int32).view(len(rows), -1) for rows in (ids_q, ids_kv)]
    return Drawn(masks.document_ids(*as_ids), [ids_rule(ids_q, ids_kv)])


def drawn_dense(draw: st.DrawFn, case: Case, count: int) -> Drawn:
    full = (case.batch, case.heads, case.q_len, case.kv_len)
    shape = [size if draw(st.booleans()) else 1 for size in full]
    tensor = torch.rand(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))) < 0.6
    return Drawn(masks.dense(tensor), [dense_rule(tensor)])


def drawn_predicate(draw: st.DrawFn, case: Case, count: int) -> Drawn:
    a, c = draw(st.integers(1, 4)), draw(st.integers(0, 2))
    fn: Callable[..., Tensor] = lambda b, h, q, k: (q + a * k + c * h + b) % 3 != 0  # noqa: E731
    return Drawn(masks.predicate(fn), [lambda p: (p.row + a * p.key + c * p.h + p.b) % 3 != 0])


PARTS: dict[str, Callable[[st.DrawFn, Case, int], Drawn]] = {
    "causal": drawn_causal,
    "window": drawn_window,
    "prefix": drawn_prefix,
    "union": drawn_union,
    "chunks": drawn_chunks,
    "ids": drawn_ids,
    "dense": drawn_dense,
    "predicate": drawn_predicate,
}


@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(cases())
def test_any_intersection_of_parts_is_the_intersection_of_their_pairs(case: Case) -> None:
    agree(case)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(cases(), st.randoms(use_true_random=False))
def test_a_shard_of_rows_and_keys_is_those_rows_and_keys_of_the_whole(case: Case, choose: random.Random) -> None:
    sizes = (case.batch, case.heads, case.q_len, case.kv_len)
    form, dense = case.mask.normal_form(*sizes, CPU), case.mask.to_dense(*sizes)
    rows = torch.tensor(choose.sample(range(case.q_len), case.q_len // 2), dtype=torch.int64)
    keys = torch.tensor(sorted(choose.sample(range(case.kv_len), case.kv_len // 2)), dtype=torch.int64)
    shard, wanted = form.shard(rows, keys), dense[:, :, rows][..., keys]
    everything = slice(None)
    assert torch.equal(shard.allowed(everything, everything, everything, everything).expand(wanted.shape), wanted)
    check_order(shard.ranges)
    check_tiles(shard, wanted)
    check_rows(shard, wanted)
    assert torch.equal(shard.q_position, form.q_position[:, rows])
    assert torch.equal(shard.kv_position, form.kv_position[:, keys])
    assert torch.equal(shard.q_sequence, form.q_sequence[:, rows])

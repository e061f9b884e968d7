"""The normal form's parts one by one: bounds of ranges, blocks of pairs, private copies, and the device of the call."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from undivided import InputError, masks
from undivided.masks import Mask
from undivided.masks._parts import Origin
from undivided.masks._slice import CallSlice, slice_mask
from undivided.masks.normal_form.bounds import count_in_cells, overlap, tidy

SIZES = BATCH, HEADS, Q_LEN, KV_LEN = 3, 4, 7, 9


def blocks_table() -> Tensor:
    return torch.tensor(
        [[[[b % 3, t], [1, -1], [2, 2], [-1, -1]] for t in range(2)] for b in range(BATCH)], dtype=torch.int32
    )


def tree_parents() -> Tensor:
    return torch.tensor([[-1, 0, 0, 1, 2, -1, 5], [-1, -1, 0, 0, 3, 3, 1], [-1, 0, 1, 2, 3, 4, 5]])


def odd_sums(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (b + h + q + k) % 2 == 1


# every kind of part, with other values for each batch element and head if it has them
MASKS: dict[str, Callable[[], Mask]] = {
    "causal": lambda: masks.causal("bottom_right"),
    "two-ranges": lambda: masks.window(1, 1, "top_left") | masks.prefix(2),
    "two-unions": lambda: (
        (masks.window(1, 1, "top_left") | masks.prefix(2)) & (masks.window(3, 0, "top_left") | masks.prefix(1))
    ),
    "prefix-per-sequence": lambda: masks.prefix(torch.tensor([0, 3, 9])),
    "chunks-per-sequence": lambda: masks.chunks(3, "top_left", torch.tensor([0, 1, 2])),
    "lengths": lambda: masks.lengths(torch.tensor([9, 4, 0]), torch.tensor([7, 2, 3])) & masks.causal("bottom_right"),
    "ids-in-pieces": lambda: masks.document_ids(
        torch.tensor([[0, 1, 0, 1, -1, 2, 0]]), torch.tensor([[0, 1, 1, 0, 2, -1, 0, 1, 2]])
    ),
    "dense": lambda: masks.dense(torch.arange(BATCH * HEADS * Q_LEN * KV_LEN).view(SIZES) % 5 < 2),
    "predicate": lambda: masks.predicate(odd_sums),
    "predicate-over-padding": lambda: masks.lengths(torch.tensor([9, 4, 2])) & masks.predicate(odd_sums),
    "tree": lambda: masks.tree(tree_parents()),
    "tree-before-unused-keys": lambda: masks.tree(tree_parents()) & masks.lengths([9, 8, 7], [7, 7, 7]),
    "blocks": lambda: masks.blocks(2, 3, blocks_table()),
    "blocks-for-all": lambda: masks.blocks(2, 3, blocks_table()[1:2]),
    "pages": lambda: masks.pages(torch.tensor([[0, 2], [1, -1], [-1, -1]]), 4),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_block_of_pairs_is_that_block_of_all_pairs(name: str) -> None:
    form, choose = MASKS[name]().normal_form(*SIZES, "cpu"), random.Random(name)
    whole = form.allowed(slice(None), slice(None), slice(None), slice(None)).expand(SIZES)
    assert whole.any()
    assert not whole.all()
    for _ in range(40):
        batch, heads, rows, keys = (
            slice(start, choose.randint(start + 1, size)) for size in SIZES for start in [choose.randrange(size)]
        )
        part = whole[batch, heads, rows, keys]
        assert torch.equal(form.allowed(batch, rows, keys, heads).expand(part.shape), part)


@pytest.mark.parametrize("name", MASKS)
def test_a_shard_of_heads_rows_and_keys_has_their_pairs(name: str) -> None:
    form = MASKS[name]().normal_form(*SIZES, "cpu")
    whole = form.allowed(slice(None), slice(None), slice(None), slice(None)).expand(SIZES)
    rows, keys = torch.tensor([5, 1, 2, 6]), torch.tensor([0, 3, 4, 8])
    for heads in (slice(1, 3), slice(2, 4), slice(0, 1), None):
        part = whole[:, heads or slice(None)][:, :, rows][..., keys]
        shard = form.shard(rows, keys, heads)
        assert shard.heads == part.shape[1]
        found = shard.allowed(slice(None), slice(None), slice(None), slice(None))
        assert torch.equal(found.expand(part.shape), part)
        twice = shard.shard(torch.tensor([2, 0]), torch.tensor([1, 3]), slice(0, 1))
        found = twice.allowed(slice(None), slice(None), slice(None), slice(None))
        assert torch.equal(found.expand(BATCH, 1, 2, 2), part[:, :1, [2, 0]][..., [1, 3]])
        assert twice.first_head == (heads.start if heads else 0)


@pytest.mark.parametrize("name", [name for name in MASKS if name != "dense"])
def test_a_form_keeps_its_pairs_when_the_tensors_of_its_mask_change_in_place(name: str) -> None:
    """A kernel may still read the form of an earlier call. A dense tensor is read in place: a copy would be S x S."""
    mask = MASKS[name]()
    form = mask.normal_form(*SIZES, "cpu")
    before = form.allowed(slice(None), slice(None), slice(None), slice(None)).clone()
    for tensor in mask.tensors:
        tensor.copy_(tensor.flip(-1).clamp(min=0))
    assert torch.equal(form.allowed(slice(None), slice(None), slice(None), slice(None)), before)


@pytest.mark.parametrize("name", [name for name in MASKS if name != "predicate-over-padding"])
def test_every_tensor_of_a_form_is_on_the_device_of_the_call(name: str) -> None:
    """The device "meta" stands for any other than the CPU: operators refuse to mix the two."""
    form = MASKS[name]().normal_form(*SIZES, "meta")
    found = form.allowed(slice(0, 2), slice(1, 5), slice(2, 9), slice(1, 3))
    assert found.device.type == "meta"
    assert found.shape[2:] == (4, 7)
    assert form.table.device.type == form.q_position.device.type == form.kv_position.device.type == "meta"
    assert form.shift.device.type == form.q_sequence.device.type == form.rows_allowed.device.type == "meta"
    assert form.keys_allowed.device.type == form.tiles(2, 2).device.type == "meta"
    assert form.counts([0, Q_LEN], [0, KV_LEN]).device.type == "meta"
    without_rows = MASKS["causal"]().normal_form(BATCH, HEADS, 0, KV_LEN, "meta")
    assert without_rows.tiles(2, 2).device.type == without_rows.counts([0, 0], [0, KV_LEN]).device.type == "meta"


def test_every_tensor_of_a_form_of_documents_is_on_the_device_of_the_call() -> None:
    mask = masks.documents([0, 3, 7], [0, 4, 9]) & masks.causal("bottom_right")
    form = mask.normal_form(1, HEADS, Q_LEN, KV_LEN, "meta")
    assert form.kv_position.device.type == form.q_position.device.type == form.shift.device.type == "meta"
    assert form.table.device.type == form.q_sequence.device.type == "meta"


def test_two_ranges_in_order_become_disjoint_used_ranges_with_empty_ones_last() -> None:
    bounds = [b for b in product(range(5), repeat=4) if b[1] <= b[2] or b[0] >= b[1] or b[2] >= b[3]]
    for row, tidied in zip(bounds, tidy(torch.tensor([bounds]))[0].tolist(), strict=True):
        keys = {key for n in (0, 2) for key in range(row[n], row[n + 1])}
        runs = (
            [key for key in sorted(keys) if key - 1 not in keys],
            [key + 1 for key in sorted(keys) if key + 1 not in keys],
        )
        wanted = [bound for run in zip(*runs, strict=True) for bound in run]
        assert tidied == wanted + [0] * (4 - len(wanted)), row


def test_one_range_is_kept_or_empty_at_zero() -> None:
    found = tidy(torch.tensor([[[1, 3], [2, 2], [4, 1], [0, 1]]]))
    assert found.tolist() == [[[1, 3], [0, 0], [0, 0], [0, 1]]]
    assert found.dtype == torch.int32


def test_the_overlap_of_two_ranges_has_the_keys_of_both() -> None:
    pairs = [(0, 4, 2, 6), (2, 6, 0, 4), (0, 2, 3, 5), (3, 5, 0, 2), (1, 5, 2, 3), (2, 2, 0, 4)]
    a, b = torch.tensor([[row[:2] for row in pairs]]), torch.tensor([[row[2:] for row in pairs]])
    for row, (start, stop) in zip(pairs, overlap(a, b)[0].tolist(), strict=True):
        assert stop >= start
        assert set(range(start, stop)) == set(range(*row[:2])) & set(range(*row[2:]))


@pytest.mark.parametrize("columns", [2, 4])
def test_pairs_are_counted_in_every_cell_of_a_grid(columns: int) -> None:
    choose = random.Random(columns)
    rows = [[sorted(choose.sample(range(11), columns)) for _ in range(6)] for _ in range(2)]
    cell, cuts = torch.tensor([0, 0, 1, 1, 1, 3]), torch.tensor([0, 1, 4, 4, 10])
    found = count_in_cells(torch.tensor(rows, dtype=torch.int32), cell, 4, cuts)
    wanted = torch.zeros(2, 4, 4, dtype=torch.int64)
    for b, row, c in product(range(2), range(6), range(4)):
        keys = {key for n in range(0, columns, 2) for key in range(rows[b][row][n], rows[b][row][n + 1])}
        wanted[b, cell[row], c] += len(keys & set(range(int(cuts[c]), int(cuts[c + 1]))))
    assert torch.equal(found, wanted)
    assert count_in_cells(torch.zeros(2, 0, 2), cell[:0], 3, cuts).tolist() == [[[0] * 4] * 3] * 2
    assert count_in_cells(torch.zeros(2, 6, 2), cell, 4, cuts[:1]).shape == (2, 4, 0)


@pytest.mark.parametrize("name", ["causal", "predicate", "two-unions"])
@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 5), (5, 0), (0, 0)])
def test_a_form_without_queries_or_keys_has_no_pairs(name: str, q_len: int, kv_len: int) -> None:
    form = MASKS[name]().normal_form(2, 3, q_len, kv_len, "cpu")
    counts = form.counts([0, q_len], [0, kv_len // 2, kv_len])
    assert counts.shape[-2:] == (1, 2)
    assert counts.dim() == 4
    assert (counts.dtype, int(counts.sum()), form.pairs) == (torch.int64, 0, 0)
    assert form.keys_allowed.tolist() == [False] * kv_len
    assert form.rows_allowed.shape[-1] == q_len
    assert form.rows_allowed.dtype == torch.bool
    assert not form.rows_allowed.any()
    assert form.tiles(2, 2).shape[-2:] == (-(-q_len // 2), -(-kv_len // 2))
    assert form.hull(slice(None), slice(None)) == (0, 0)
    assert not form.covers(slice(None), slice(0, 0), slice(0, 0))


def test_a_block_is_covered_if_one_range_of_each_row_contains_its_keys() -> None:
    everything = slice(None)
    form = masks.causal("top_left").normal_form(1, 1, 4, 4, "cpu")
    assert form.covers(everything, slice(2, 4), slice(0, 3))
    assert form.covers(everything, slice(0, 4), slice(0, 1))
    assert not form.covers(everything, slice(1, 4), slice(0, 3))
    window = masks.window(1, 0, "top_left").normal_form(1, 1, 4, 4, "cpu")
    assert window.covers(everything, slice(2, 3), slice(1, 3))
    assert not window.covers(everything, slice(2, 4), slice(1, 3))
    lengths = masks.lengths([4, 2]).normal_form(2, 1, 4, 4, "cpu")
    assert lengths.covers(slice(0, 1), everything, slice(0, 4))
    assert not lengths.covers(slice(1, 2), everything, slice(0, 4))
    assert not lengths.covers(slice(0, 2), everything, slice(0, 4))
    for name in ("two-ranges", "predicate"):
        assert not MASKS[name]().normal_form(*SIZES, "cpu").covers(everything, slice(0, 1), slice(0, 1)), name
    assert lengths.hull(slice(1, 2), everything) == (0, 2)


def test_documents_of_more_query_blocks_than_the_table_are_refused() -> None:
    mask = masks.blocks(4, 4, torch.zeros(2, 1, 2, 1, dtype=torch.int64)) & masks.documents([0, 8, 17], [0, 8, 17])
    with pytest.raises(InputError) as caught:
        mask.normal_form(1, 1, 17, 17, "cpu")
    must = "have a block table for 3 query blocks, of 4 queries, per document"
    assert caught.value.argument == "mask"
    assert str(caught.value) == f"mask must {must}, got 2 query blocks"
    fits = masks.blocks(4, 4, torch.zeros(2, 1, 2, 1, dtype=torch.int64)) & masks.documents([0, 8, 15], [0, 8, 15])
    assert fits.normal_form(1, 1, 15, 15, "cpu").pairs == 8 * 4 + 7 * 4


def test_joining_a_mask_that_is_full_or_has_another_alignment() -> None:
    joined = masks.window(None, None, "top_left") | masks.prefix(3)
    assert joined.is_full
    assert joined.align == "top_left"
    with pytest.raises(
        InputError, match=r"mask must have one alignment, got window\(.*\) \| causal\(.*\) & prefix\(2\)"
    ):
        masks.window(3, 0, "top_left") | masks.sinks(2, align="bottom_right")
    causal = masks.causal("top_left") | masks.sinks(2)
    assert (causal.left, causal.right, causal.parts) == (None, 0, ())
    prefixed = masks.causal("top_left") | masks.prefix(2)
    assert len(prefixed.parts) == 1, "a prefix lets rows see keys after their own"


@pytest.mark.parametrize("name", ["lengths", "dense"])
def test_taking_a_part_leaves_the_band(name: str) -> None:
    part = masks.lengths([3, 4]) if name == "lengths" else masks.dense(torch.ones(1, 1, 4, 4, dtype=torch.bool))
    _, rest = (masks.window(3, 1, "top_left") & part).take(name)
    assert (rest.align, rest.left, rest.right, rest.parts) == ("top_left", 3, 1, ())


def test_ids_in_runs_are_exact_ranges_beside_left_padding() -> None:
    """Ranges of ids are of raw keys; the rest of the mask counts from each sequence's first key."""
    mask = masks.lengths([4, 3], [5, 5], kv_start=[1, 2], q_start=[0, 0]) & masks.document_ids([0, 0, 1, 1, 2])
    form = mask.normal_form(2, 1, 5, 5, "cpu")
    assert form.exact
    keys = [[1], [1], [2, 3], [2, 3], [4]], [[], [], [2, 3], [2, 3], [4]]
    for b in range(2):
        ranges = [list(range(start, stop)) for start, stop in form.ranges[b].tolist()]
        assert ranges == keys[b]


def test_an_id_that_no_key_has_leaves_the_ranges_exact() -> None:
    form = masks.document_ids([0, 5, 1, -1, 3], [0, 0, 1, 2, 4]).normal_form(1, 1, 5, 5, "cpu")
    assert form.exact
    assert form.ranges.tolist() == [[[0, 2], [0, 0], [2, 3], [0, 0], [0, 0]]]


def test_the_ranges_of_two_unions_end_where_the_second_ends() -> None:
    form = (
        (masks.window(1, 3, "top_left") | masks.prefix(2)) & (masks.window(3, 0, "top_left") | masks.prefix(1))
    ).normal_form(1, 1, 6, 9, "cpu")
    assert form.ranges.amax(-1).tolist() == [[1, 2, 3, 4, 5, 6]]


def test_no_batch_elements_give_empty_boolean_pairs_of_a_predicate() -> None:
    form = MASKS["predicate-over-padding"]().normal_form(*SIZES, "cpu")
    found = form.extras[0].pairs(slice(1, 1), slice(0, 1), slice(0, 2), slice(0, 2))
    assert found.dtype == torch.bool
    assert found.shape[0] == 0


def test_a_tree_of_a_pack_names_the_parent_that_is_not_before_its_child() -> None:
    mask = masks.documents([0, 2, 4]) & masks.tree([-1, 0, 1, 1])
    with pytest.raises(InputError) as caught:
        mask.normal_form(1, 1, 4, 4, "cpu")
    assert caught.value.argument == "parents"
    assert "got 1 for query 0" in str(caught.value)
    assert caught.value.hint == "in a pack, indices start at 0 in every document"


@pytest.mark.parametrize("name", MASKS)
def test_tiles_are_the_same_in_blocks_of_rows_of_any_size(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    form = MASKS[name]().normal_form(*SIZES, "cpu")
    allowed = form.allowed(slice(None), slice(None), slice(None), slice(None)).expand(SIZES)
    right = [
        [tile.any(-1).any(-1).int() + tile.all(-1).all(-1).int() for tile in rows.split(4, -1)]
        for rows in allowed.split(2, 2)
    ]
    expected = torch.stack([torch.stack(row, -1) for row in right], 2)
    for pairs in (1, 64, 1 << 22):
        monkeypatch.setattr("undivided.masks.normal_form.pairs.BLOCK_PAIRS", pairs)
        assert torch.equal(form.tiles(2, 4).expand(expected.shape).int(), expected)


@pytest.mark.parametrize("name", MASKS)
def test_the_mask_of_a_slice_of_a_call_has_the_pairs_of_that_slice(name: str) -> None:
    mask = MASKS[name]()
    whole = mask.normal_form(*SIZES, "cpu").allowed(*([slice(None)] * 4)).expand(SIZES)
    for sequences, heads in (
        ((0, 3), (0, 2)),
        ((0, 3), (0, 3)),
        ((0, 3), (2, 4)),
        ((1, 3), (0, 4)),
        ((2, 3), (1, 2)),
        ((0, 1), (3, 4)),
    ):
        part = slice_mask(mask, CallSlice(BATCH, sequences, HEADS, heads), with_origin=False)
        right = whole[slice(*sequences), slice(*heads)]
        form = part.normal_form(right.shape[0], right.shape[1], Q_LEN, KV_LEN, "cpu")
        assert torch.equal(form.allowed(*([slice(None)] * 4)).expand(right.shape), right), (sequences, heads)
    assert slice_mask(mask, CallSlice(BATCH, (0, BATCH), HEADS, (0, HEADS)), with_origin=True) is mask


def test_a_slice_of_a_slice_keeps_the_numbers_by_which_dropout_draws() -> None:
    half = slice_mask(masks.causal(), CallSlice(4, (2, 4), 8, (4, 8)), with_origin=True)
    quarter = slice_mask(half, CallSlice(2, (1, 2), 4, (1, 3)), with_origin=True)
    (origin,) = (part for part in quarter.parts if isinstance(part, Origin))
    assert (origin.sequence, origin.head) == (3, 5)
    assert not any(isinstance(p, Origin) for p in slice_mask(half, CallSlice(2, (1, 2), 4, (1, 3)), False).parts)


def test_a_shard_of_a_slice_keeps_the_numbers_by_which_dropout_draws() -> None:
    half = slice_mask(masks.causal(), CallSlice(4, (2, 4), 8, (0, 8)), with_origin=True)
    shard = half.normal_form(2, 8, 3, 3, "cpu").shard(torch.tensor([1]), torch.tensor([0, 1]))
    assert shard.sequence_number.tolist() == [[2], [3]]


def test_a_joined_mask_has_one_first_head() -> None:
    first, second = (masks.causal().with_first_head(n) for n in (1, 2))
    with pytest.raises(InputError) as caught:
        first & second
    assert str(caught.value).startswith("mask must have one first head, got ")
    assert caught.value.hint == "call with_first_head on the joined mask"


def test_the_first_head_of_a_mask_is_at_least_0() -> None:
    mask = masks.causal()
    assert mask.with_first_head(0) is mask
    (origin,) = (part for part in mask.with_first_head(1).parts if isinstance(part, Origin))
    assert (origin.sequence, origin.head) == (0, 1)
    with pytest.raises(InputError, match="first_head must be at least 0, got -1"):
        mask.with_first_head(-1)


@pytest.mark.parametrize(("side", "sizes"), [("q", (1, 1, 2**31, 1)), ("kv", (1, 1, 1, 2**31))])
def test_a_length_beyond_32_bits_is_refused_by_its_side(side: str, sizes: tuple[int, int, int, int]) -> None:
    with pytest.raises(InputError, match=f"be for a {side} length of at most 2147483647"):
        masks.causal("top_left").check(*sizes, packed=False, device=torch.device("cpu"))
    masks.causal("top_left").check(*(min(n, 2**31 - 1) for n in sizes), packed=False, device=torch.device("cpu"))


def test_a_mask_by_lengths_of_a_pack_is_an_error_that_names_documents() -> None:
    with pytest.raises(InputError, match="mask must describe packed tokens by documents, got lengths"):
        masks.lengths([3]).check(1, 1, 4, 4, packed=True, device=torch.device("cpu"))

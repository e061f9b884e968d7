"""Masks of equal arguments are one object while the tensors of the arguments have not changed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import undivided
from undivided import InputError, masks
from undivided.masks import Mask, _kept

OFFSETS = torch.tensor([0, 3, 5])
LENGTHS, STARTS = torch.tensor([3, 5]), torch.tensor([1, 0])
IDS = torch.tensor([0, 0, 1, 1, -1])

BUILDERS: dict[str, Callable[[], Mask]] = {
    "lengths": lambda: masks.lengths(LENGTHS),
    "lengths of queries": lambda: masks.lengths(LENGTHS, q=LENGTHS),
    "lengths with starts": lambda: masks.lengths(LENGTHS, kv_start=STARTS),
    "documents": lambda: masks.documents(OFFSETS),
    "documents with room": lambda: masks.documents(OFFSETS, total_q=7),
    "ids of one row": lambda: masks.document_ids(IDS),
    "ids of rows": lambda: masks.document_ids(IDS[None], IDS[None]),
    "prefix": lambda: masks.prefix(2),
    "prefix of each sequence": lambda: masks.prefix(LENGTHS),
    "sinks": lambda: masks.sinks(2),
    "chunks": lambda: masks.chunks(2, "top_left"),
    "chunks with offset": lambda: masks.chunks(2, offset=STARTS),
    "intersection": lambda: masks.causal() & masks.documents(OFFSETS),
    "other intersection": lambda: masks.documents(OFFSETS) & masks.window(2, 0),
    "union": lambda: masks.window(2, 0) | masks.sinks(1),
    "other union": lambda: masks.prefix(1) | masks.causal(),
    "three parts": lambda: masks.lengths(LENGTHS) & masks.chunks(2) & masks.causal("top_left"),
}


@pytest.fixture(autouse=True)
def nothing_kept() -> None:
    """Otherwise the masks of other tests may fill the memory in the midst of one."""
    _kept._recent.clear()


def test_equal_bands_are_one_object() -> None:
    assert masks.causal() is masks.causal()
    assert masks.causal("top_left") is not masks.causal()
    assert masks.window(3, 0) is masks.window(torch.tensor(3).item(), 0)
    assert masks.window(3, 0) is not masks.window(3, 1)
    assert masks.window(None, 0) is masks.causal()


@pytest.mark.parametrize("name", [name for name in BUILDERS if name != "ids of rows"])
def test_masks_of_the_same_arguments_are_one_object(name: str) -> None:
    assert BUILDERS[name]() is BUILDERS[name]()


def test_masks_of_different_arguments_are_different_objects() -> None:
    built = [build() for build in BUILDERS.values()]
    assert len({id(mask) for mask in built}) == len(built)
    assert masks.lengths(LENGTHS.clone()) is not masks.lengths(LENGTHS)
    assert masks.lengths(LENGTHS, STARTS).tensors[1] is STARTS
    assert masks.lengths(STARTS, LENGTHS).tensors[1] is LENGTHS


def test_masks_of_views_that_are_made_anew_are_one_object() -> None:
    """Each layer that passed ``cu_seqlens[:4]`` checked it and computed its ranges, ten times as long as the call."""
    assert masks.lengths(LENGTHS[:1]) is masks.lengths(LENGTHS[:1])
    assert masks.documents(OFFSETS[:2]) is masks.documents(OFFSETS[:2])
    others = [LENGTHS[:1], LENGTHS[1:], LENGTHS.view(torch.int32)[::2], torch._neg_view(-LENGTHS)]
    assert len({masks.lengths(view) for view in others}) == 4
    for view in others[:2]:
        assert masks.lengths(view).tensors[0].tolist() == view.tolist()


def test_a_tensor_at_the_place_of_one_that_moved_gives_a_mask_of_its_own() -> None:
    memory = bytearray(16)
    moved = torch.frombuffer(memory, dtype=torch.int64)
    moved[:] = torch.tensor([3, 5])
    first = masks.lengths(moved)
    moved.data = moved.data.clone()
    other = torch.frombuffer(memory, dtype=torch.int64)
    other[:] = torch.tensor([2, 4])
    assert masks.lengths(other) is not first
    assert masks.lengths(other).tensors[0].tolist() == [2, 4]


def _add(tensor: Tensor) -> None:
    tensor += 1


def _write_through_data(tensor: Tensor) -> None:
    tensor.data[0] += 1


def _write_through_numpy(tensor: Tensor) -> None:
    tensor.numpy()[1] += 2


def _shorten(tensor: Tensor) -> None:
    tensor.data = tensor.data[:1]


def _convert(tensor: Tensor) -> None:
    tensor.data = tensor.data.to(torch.int32)


@pytest.mark.parametrize("change", [_add, _write_through_data, _write_through_numpy, _shorten, _convert])
@pytest.mark.parametrize("more", [lambda: masks.FULL, lambda: masks.causal("top_left")], ids=["alone", "joined"])
def test_a_changed_tensor_gives_a_new_mask_of_the_new_values(
    change: Callable[[Tensor], None], more: Callable[[], Mask]
) -> None:
    lengths = torch.tensor([3, 4])
    q = torch.randn(2, 7, 2, 8)
    before = masks.lengths(lengths) & more()
    undivided.attention(q, q, q, layout="bshd", mask=before)
    change(lengths)
    after = masks.lengths(lengths) & more()
    assert after is not before
    count = lengths.shape[0]
    expected = masks.lengths(lengths.tolist()) & more()
    assert after.tensors[0].dtype == lengths.dtype
    out = undivided.attention(q[:count], q[:count], q[:count], layout="bshd", mask=after)
    torch.testing.assert_close(
        out, undivided.attention(q[:count], q[:count], q[:count], layout="bshd", mask=expected), rtol=0, atol=0
    )


def test_a_tensor_that_became_wrong_is_refused_again() -> None:
    offsets = torch.tensor([0, 3, 5])
    masks.documents(offsets)
    offsets[1] = 9
    with pytest.raises(InputError, match="never decrease"):
        masks.documents(offsets)


def test_arguments_that_are_equal_in_python_only_are_still_refused() -> None:
    masks.prefix(1), masks.chunks(size=4)
    wrong: Any = True
    with pytest.raises(InputError, match="n must be an int"):
        masks.prefix(wrong)
    wrong = "size"
    with pytest.raises(InputError, match="size must be an int"):
        masks.chunks(wrong, 4)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="kv"):
        masks.lengths(1.0)  # type: ignore[arg-type]


def test_lengths_of_one_tensor_may_be_joined_whether_they_are_one_object_or_not() -> None:
    large = torch.full((4096,), 3)  # of this size no mask is found again
    for lengths in (LENGTHS, large):
        once = masks.lengths(lengths)
        assert (once & masks.causal("top_left") & masks.lengths(lengths)).parts == once.parts
        with pytest.raises(InputError, match="describe its sequences once"):
            once & masks.lengths(lengths.clone())


@pytest.mark.parametrize(
    ("build", "shape", "dtype"),
    [
        (masks.document_ids, (1, 4096), torch.int64),
        (lambda t: masks.document_ids(t[:, :8]), (1, 4096), torch.int64),
        (lambda t: masks.lengths(LENGTHS) & masks.dense(t), (1, 1, 4, 4), torch.bool),
        (lambda t: masks.dense(t) & masks.lengths(LENGTHS), (1, 1, 4, 4), torch.bool),
        (lambda t: masks.causal() & masks.predicate(lambda b, h, i, j: i + j >= t), (), torch.int64),
        (lambda t: masks.lengths(LENGTHS) & masks.predicate(lambda b, h, i, j: i + j >= t), (), torch.int64),
    ],
    ids=["large", "view of a large one", "dense", "dense first", "predicate of a band", "predicate of lengths"],
)
def test_large_tensors_and_those_of_other_masks_are_not_held(
    build: Callable[[Tensor], Mask], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    tensor = torch.zeros(shape, dtype=dtype)
    reference = weakref.ref(tensor)
    build(tensor)
    del tensor
    gc.collect()
    assert reference() is None


def test_a_band_in_a_compiled_function_may_have_a_symbolic_width() -> None:
    def layer(x: torch.Tensor, width: int) -> torch.Tensor:
        return undivided.attention(x, x, x, layout="bshd", mask=masks.window(width, 0))

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    x = torch.randn(1, 9, 2, 16)
    for width in (2, 3, 5):
        torch.testing.assert_close(compiled(x, width), layer(x, width))

"""Masks move to a device, are copied, pickled, and passed to compiled graphs, each with its own tensors."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from undivided import masks
from undivided.errors import InputError
from undivided.masks import FULL, Mask
from undivided.masks.normal_form import copies

causal, window, lengths, documents, prefix = (masks.causal, masks.window, masks.lengths, masks.documents, masks.prefix)


def everywhere(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q == q


SAME = torch.tensor([2, 3])


@pytest.mark.parametrize(
    "mask",
    [
        FULL,
        causal(),
        window(2, None, "bottom_right") & prefix(3),
        lengths(SAME, SAME) & causal(),
        documents([0, 2], [0, 3], [0, 4], [0, 5], 6, 7),
        masks.chunks(2, "top_left", [-1]),
        window(0, 1) | prefix([4]),
    ],
    ids=repr,
)
def test_flatten_and_unflatten_give_the_mask_back(mask: Mask) -> None:
    spec, tensors = mask.flatten()
    again = Mask.unflatten(spec, tensors)
    assert repr(again) == repr(mask)
    assert again.structure == mask.structure
    assert again.flatten()[0] == spec
    numbers: list[int] = []
    spec, tensors = mask.flatten(numbers)
    assert repr(Mask.unflatten(spec, tensors, numbers)) == repr(mask)
    for one, other in zip(mask.tensors, again.tensors, strict=True):
        assert one is other


MOVED = {
    "every-pair": masks.FULL,
    "shared-lengths": causal() & lengths(n := torch.tensor([2, 3]), n),
    "documents": documents([0, 2, 5]) & causal(),
    "dense": masks.dense(torch.rand(1, 1, 5, 5) < 0.5),
    "predicate": masks.predicate(lambda b, h, q, k: q >= k),
}


@pytest.mark.parametrize("name", MOVED)
def test_a_mask_moves_to_a_device_with_its_tensors(name: str) -> None:
    mask = MOVED[name]
    moved = mask.to(torch.device("meta"))
    assert [t.device.type for t in moved.tensors] == ["meta"] * len(mask.tensors)
    assert moved.structure == mask.structure
    assert [t.shape for t in moved.tensors] == [t.shape for t in mask.tensors]
    assert mask.to("cpu") is mask
    assert all(t.device.type == "cpu" for t in mask.tensors)


def test_a_moved_mask_keeps_the_longest_document() -> None:
    """Otherwise a kernel on a GPU waits to read the longest document."""
    moved = documents([0, 2, 5], [0, 1, 2]).to("meta")
    assert moved.document_sizes == (2, 3, 1)
    n = torch.tensor([2, 3])
    (shared,) = (causal() & lengths(n, n)).to("meta").tensors
    assert shared.shape == (2,)


@pytest.mark.parametrize("device", ["tpu", 3.5, None])
def test_a_mask_cannot_move_to_an_invalid_device(device: Any) -> None:
    with pytest.raises(InputError, match=r"device must be a torch\.device or its name, got"):
        causal().to(device)


def test_a_released_predicate_is_not_found_again() -> None:
    mask = masks.predicate(lambda b, h, q, k: q >= k)
    spec, _ = mask.flatten()
    assert Mask.unflatten(spec, []).intervals(1, 1).tolist() == [[[0, 1]]]
    del mask
    gc.collect()
    with pytest.raises(InputError, match="mask must be kept alive"):
        Mask.unflatten(spec, [])


def test_copies_do_not_contain_cached_values() -> None:
    mask = causal("top_left") & lengths(torch.tensor([1, 3])) & masks.predicate(everywhere)
    dense = mask.to_dense(2, 1, 3, 3)
    for copied in (copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):
        assert "_entries" not in copied.__dict__
        assert torch.equal(copied.to_dense(2, 1, 3, 3), dense)
        copied.tensors[0].fill_(0)
        assert not copied.to_dense(2, 1, 3, 3).any()
    assert torch.equal(mask.to_dense(2, 1, 3, 3), dense)


class TestNumbersOnTheCpuForAnotherDevice:
    """A CUDA graph cannot record a copy from ordinary memory of the CPU. The meta device stands for a GPU."""

    def test_a_capture_gets_the_copy_that_was_made_before(self, monkeypatch: pytest.MonkeyPatch) -> None:
        numbers, meta = torch.tensor([3, 5]), torch.device("meta")
        before = copies.int64_copy(numbers, meta)
        monkeypatch.setattr(copies, "is_captured", lambda: True)
        assert copies.int64_copy(numbers, meta) is before
        assert copies.on_device(before, meta) is before

    def test_changed_numbers_are_copied_again(self) -> None:
        numbers, meta = torch.tensor([3, 5]), torch.device("meta")
        before = copies.int64_copy(numbers, meta)
        numbers.add_(1)
        after = copies.int64_copy(numbers, meta)
        assert after is not before
        assert copies.int64_copy(numbers, meta) is after

    def test_a_copy_of_a_capture_is_not_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its memory holds nothing before a replay."""
        numbers, meta = torch.tensor([3, 5]), torch.device("meta")
        monkeypatch.setattr(copies, "is_captured", lambda: True)
        first = copies.int64_copy(numbers, meta)
        assert copies.int64_copy(numbers, meta) is not first

    def test_a_tree_on_the_cpu_is_copied_before_the_capture(self, monkeypatch: pytest.MonkeyPatch) -> None:
        moved: list[str] = []
        to = torch.Tensor.to

        def told(tensor: Tensor, *arguments: Any, **named: Any) -> Tensor:
            moved.extend([tensor.device.type] * (torch.device("meta") in arguments))
            return to(tensor, *arguments, **named)

        monkeypatch.setattr(torch.Tensor, "to", told)
        for captured in (False, True):
            monkeypatch.setattr(copies, "is_captured", lambda captured=captured: captured)
            lengths_on_gpu = (torch.tensor(numbers, device="meta") for numbers in ([9, 7], [4, 4]))
            mask = TREE & lengths(*lengths_on_gpu)
            mask.normal_form(2, 1, 4, 16, "meta")
            assert ("cpu" in moved) is not captured
            moved.clear()


TREE = masks.tree([-1, 0, 0, 1])

"""A mask follows its tensors: results are cached until one changes in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import undivided
from undivided import masks
from undivided.errors import InputError
from undivided.masks import Mask
from undivided.request import normalise

CPU = torch.device("cpu")


causal, window, lengths, documents, prefix = (masks.causal, masks.window, masks.lengths, masks.documents, masks.prefix)


def test_ranges_are_cached_until_a_tensor_changes_in_place() -> None:
    n = torch.tensor([1, 2])
    mask = lengths(n) & prefix(9)
    first = mask.normal_form(2, 1, 2, 3, CPU)
    assert mask.normal_form(2, 1, 2, 3, CPU) is first
    assert mask.normal_form(2, 1, 2, 4, CPU) is not first
    n.add_(1)
    assert mask.normal_form(2, 1, 2, 3, CPU).ranges[:, 0].tolist() == [[0, 2], [0, 3]]


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda t: masks.document_ids(t), lambda t: t.fill_(-1)),
        (lambda t: causal() | prefix(t[0, :1]), lambda t: t.fill_(2)),
        (lambda t: window(0, 0) & masks.chunks(2, offset=t[0, :1]), lambda t: t.add_(1)),
        (lambda t: masks.dense(t.view(3, 1).bool()), lambda t: t.view(3, 1).bool()),
    ],
    ids=["ids", "prefix-view", "offset-view", "dense-of-a-copy"],
)
def test_a_mask_has_the_current_values_of_its_tensors(
    make: Callable[[Tensor], Mask], change: Callable[[Tensor], object]
) -> None:
    t = torch.tensor([[0, 1, 1]])
    mask = make(t)
    mask.to_dense(1, 1, 3, 3)
    change(t)
    assert torch.equal(mask.to_dense(1, 1, 3, 3), make(t).to_dense(1, 1, 3, 3))


def test_a_change_of_a_captured_tensor_changes_a_predicate() -> None:
    limit = torch.tensor(1)
    mask = masks.predicate(lambda b, h, q, k: k < limit)
    assert mask.intervals(1, 4).tolist() == [[[0, 1]]]
    limit.fill_(3)
    assert mask.intervals(1, 4).tolist() == [[[0, 3]]]


class Limit(torch.nn.Module):
    """A predicate whose tensor is an attribute: a buffer, read through a method or a property."""

    def __init__(self, limit: Tensor) -> None:
        super().__init__()
        self.register_buffer("limit", limit)

    @property
    def bound(self) -> Tensor:
        return self.limit  # type: ignore[no-any-return]

    def forward(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return k < self.bound


def by_default(limit: Tensor) -> Callable[..., Tensor]:
    def before(b: Tensor, h: Tensor, q: Tensor, k: Tensor, limit: Tensor = limit) -> Tensor:
        return k < limit

    return before


def by_object(limit: Tensor) -> Callable[..., Tensor]:
    one = Limit(limit)
    return lambda b, h, q, k: k < one.limit


def by_dict(limit: Tensor) -> Callable[..., Tensor]:
    one = {"limit": limit}
    return lambda b, h, q, k: k < one["limit"]


@pytest.mark.parametrize(
    "make",
    [by_default, by_object, by_dict, Limit, lambda limit: Limit(limit).forward],
    ids=["default", "object", "dict", "module", "method"],
)
def test_a_change_of_an_indirectly_captured_tensor_changes_a_predicate(make: Callable[[Tensor], Any]) -> None:
    """Only closures, globals and partials were tracked: a method's `self` was not, and its old ranges were used."""
    limit = torch.tensor(1)
    mask = masks.predicate(make(limit))
    assert mask.intervals(1, 4).tolist() == [[[0, 1]]]
    limit.fill_(3)
    assert mask.intervals(1, 4).tolist() == [[[0, 3]]]


def test_a_predicate_may_close_over_another_tensor_later() -> None:
    """A new tensor in the memory of the old one has its id, and a new one's version."""
    limit = torch.tensor(1)
    mask = masks.predicate(lambda b, h, q, k: k < limit)
    for n in (1, 3, 2, 4):
        limit = torch.tensor(n)
        assert mask.intervals(1, 4).tolist() == [[[0, n]]]


def test_values_are_checked_again_after_a_change_in_place() -> None:
    n = torch.tensor([1, 2])
    mask = lengths(n)
    mask.check(2, 1, 4, 4, packed=False, device=CPU)
    n[0] = -1
    with pytest.raises(InputError, match="kv must be at least 0"):
        mask.check(2, 1, 4, 4, packed=False, device=CPU)
    n[0] = 9
    with pytest.raises(InputError, match="at most 4"):
        mask.check(2, 1, 4, 4, packed=False, device=CPU)


def in_numpy(tensor: Tensor) -> Tensor:
    """The tensor in the memory of an array."""
    return torch.from_numpy(tensor.numpy().copy())


UNCOUNTED = {
    "from-numpy": lambda tensor, new: tensor.numpy().__setitem__(..., new.numpy()),
    "data": lambda tensor, new: tensor.data.copy_(new),
    "data-of-a-view": lambda tensor, new: tensor.view(-1).data.copy_(new.view(-1)),
}
"""Writes to a tensor that PyTorch's version counter does not count."""

MASKS_OF_TENSORS: dict[str, tuple[Callable[[Tensor], Mask], Any, Any]] = {
    "lengths": (lambda t: lengths(t), [3, 6], [6, 2]),
    "starts": (lambda t: lengths([3, 4], kv_start=t), [0, 1], [2, 2]),
    "ids": (lambda t: masks.document_ids(t), [[0, 0, 0, 1, 1, 1]], [[0, 1, 0, 1, -1, 1]]),
    "prefix": (lambda t: causal() | prefix(t), [1, 4], [5, 2]),
    "offset": (lambda t: masks.chunks(3, offset=t), [0, 1], [2, 2]),
    "tree": (lambda t: masks.tree(t), [[-1, 0, 1, 2, 3, 4]], [[-1, -1, 0, 1, 0, 2]]),
    "blocks": (lambda t: masks.blocks(3, 2, t), [[[[0, 1], [2, -1]]]], [[[[2, -1], [0, 2]]]]),
    "dense": (lambda t: masks.dense(t.bool()), [[1, 0, 0, 0, 1, 0]] * 6, [[0, 1, 1, 0, 0, 1]] * 6),
    "predicate": (lambda t: masks.predicate(lambda b, h, q, k: k < t[b]), [2, 5], [6, 1]),
}


@pytest.mark.parametrize("write", UNCOUNTED)
@pytest.mark.parametrize("kind", MASKS_OF_TENSORS)
def test_changes_that_no_version_counts_are_seen(kind: str, write: str) -> None:
    """Arrays of NumPy and `.data` share memory and leave the version as it is: the old ranges were used."""
    pytest.importorskip("numpy")
    make, before, after = MASKS_OF_TENSORS[kind]
    dtype = torch.bool if kind == "dense" else torch.int32
    tensor, q = in_numpy(torch.tensor(before, dtype=dtype)), torch.randn(2, 6, 2, 8)
    mask = make(tensor)
    old = undivided.attention(q, q, q, layout="bshd", mask=mask)
    UNCOUNTED[write](tensor, torch.tensor(after, dtype=dtype))
    new = undivided.attention(q, q, q, layout="bshd", mask=mask)
    assert torch.equal(new, undivided.attention(q, q, q, layout="bshd", mask=make(tensor.clone())))
    assert not torch.equal(new, old)


def test_values_that_numpy_wrote_are_checked() -> None:
    pytest.importorskip("numpy")
    offsets, q = in_numpy(torch.tensor([0, 3, 5])), torch.randn(5, 2, 8)
    mask = documents(offsets)
    undivided.attention(q, q, q, layout="thd", mask=mask)
    offsets.numpy()[:] = 0, 9, 5
    with pytest.raises(InputError, match="cu_seqlens_q must"):
        undivided.attention(q, q, q, layout="thd", mask=mask)


def test_a_large_array_of_numpy_is_read_at_every_call() -> None:
    pytest.importorskip("numpy")
    allowed, q = in_numpy(torch.eye(160).bool()), torch.randn(1, 160, 2, 8)
    mask = masks.dense(allowed)
    torch.testing.assert_close(undivided.attention(q, q, q, layout="bshd", mask=mask), q)
    allowed.numpy()[:] = True
    torch.testing.assert_close(
        undivided.attention(q, q, q, layout="bshd", mask=mask), undivided.attention(q, q, q, layout="bshd")
    )


def test_a_row_of_a_large_tensor_is_compared_by_its_own_values() -> None:
    table = torch.zeros(100, 100, dtype=torch.int64)
    mask = lengths(table[3, :2])
    before = mask.state()
    table[4] = 1
    assert mask.state() == before
    table.data[3] = 1
    assert mask.state() != before


@pytest.mark.parametrize("write", UNCOUNTED)
def test_a_backward_refuses_a_mask_that_numpy_changed(write: str) -> None:
    pytest.importorskip("numpy")
    n, q = in_numpy(torch.tensor([3, 6])), torch.randn(2, 6, 2, 8, requires_grad=True)
    out = undivided.attention(q, q, q, layout="bshd", mask=lengths(n))
    UNCOUNTED[write](n, torch.tensor([6, 2]))
    with pytest.raises(RuntimeError, match="were changed in place"):
        out.sum().backward()


def test_alignment_is_compared_again_after_a_change_in_place() -> None:
    q, kv = torch.tensor([1, 2]), torch.tensor([1, 2])
    mask = causal() & lengths(kv, q)
    assert mask.resolved_align(2, 2, 2) == "both"
    q[0] = 0
    with pytest.raises(InputError, match="align must"):
        mask.resolved_align(2, 2, 2)


def test_a_form_keeps_the_positions_of_the_values_it_was_built_from() -> None:
    n = torch.tensor([1, 2])
    form = (causal("bottom_right") & lengths(n)).normal_form(2, 1, 1, 3, CPU)
    n.zero_()
    assert form.shift.tolist() == [[0], [1]]
    start = torch.tensor([1, 0])
    form = lengths([1, 2], kv_start=start).normal_form(2, 1, 1, 3, CPU)
    start.zero_()
    assert form.kv_position.tolist() == [[-1, 0, 1], [0, 1, 2]]


@pytest.mark.parametrize("mask", [lengths([9]), lengths([9], kv_start=[2]), documents([0, 9])], ids=repr)
def test_ranges_stay_within_the_keys_even_if_values_could_not_be_checked(mask: Mask) -> None:
    """Lengths on a GPU are not checked: wrong ones must not make a kernel access memory out of bounds."""
    ranges = mask.normal_form(1, 1, 2, 4, CPU).ranges  # as attention does; unlike intervals(), without checks
    assert int(ranges.min()) >= 0
    assert int(ranges.max()) == 4


@pytest.mark.parametrize("ask", ["intervals", "to_dense", "draw"])
def test_methods_of_a_mask_check_the_sizes_too(ask: str) -> None:
    sizes = (1, 1, 2, 4) if ask == "to_dense" else (2, 4)
    with pytest.raises(InputError, match="at most 4"):
        getattr(lengths([9]), ask)(*sizes)


@pytest.mark.parametrize("mask", [causal() & prefix(4), lengths([5])], ids=repr)
def test_ranges_of_the_caller_are_not_those_of_calls(mask: Mask) -> None:
    """Masks without tensors share their ranges in the whole process: a write to them changed all of these."""
    q = torch.randn(1, 6, 1, 8)
    before = undivided.attention(q, q, q, layout="bshd", mask=mask, backend="reference")
    mask.intervals(6, 6).zero_()
    assert torch.equal(undivided.attention(q, q, q, layout="bshd", mask=mask, backend="reference"), before)


def test_inference_tensors_have_no_version_and_are_never_cached() -> None:
    with torch.inference_mode():
        n = torch.tensor([1])
        mask = lengths(n)
        mask.check(1, 1, 1, 3, packed=False, device=CPU)
        assert mask.intervals(1, 3).tolist() == [[[0, 1]]]
        n.add_(1)
        assert mask.intervals(1, 3).tolist() == [[[0, 2]]]
        n.fill_(9)
        with pytest.raises(InputError, match="at most 3"):
            mask.check(1, 1, 1, 3, packed=False, device=CPU)


def test_forms_built_in_inference_mode_can_be_used_in_training() -> None:
    with torch.inference_mode():
        form = causal().normal_form(1, 1, 5, 5, CPU)
    assert not form.ranges.is_inference()
    assert not causal().normal_form(1, 1, 5, 5, CPU).ranges.is_inference()


def test_masks_without_tensors_share_their_ranges() -> None:
    first = (causal("top_left") & prefix(3)).normal_form(1, 1, 6, 6, CPU)
    assert (causal("top_left") & prefix(3)).normal_form(1, 1, 6, 6, CPU) is first
    assert (causal("top_left") & prefix(4)).normal_form(1, 1, 6, 6, CPU) is not first
    assert (causal("bottom_right") & prefix(3)).normal_form(1, 1, 6, 7, CPU).shift.tolist() == [[1] * 6]
    assert (causal("top_left") & prefix(3)).normal_form(1, 1, 6, 7, CPU).shift.tolist() == [[0] * 6]


def test_the_entries_of_one_mask_is_bounded() -> None:
    mask = lengths([1])
    for size in range(1, 100):
        mask.normal_form(1, 1, size, size, CPU)
    assert len(mask.__dict__["_entries"]) <= 64


def test_a_result_in_use_is_kept_when_others_are_removed() -> None:
    mask = causal()
    used = mask.cached("used", object)
    for size in range(500):
        mask.cached(size, object)
        assert mask.cached("used", object) is used


def test_a_form_is_cached_once_for_a_device_and_its_name() -> None:
    mask = lengths([1])
    assert mask.normal_form(1, 1, 2, 2, "cpu") is mask.normal_form(1, 1, 2, 2, torch.device("cpu"))


def test_calls_of_a_dozen_lengths_with_one_mask_prepare_it_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[object] = []
    with_mask = normalise._with_mask
    monkeypatch.setattr(normalise, "_with_mask", lambda *arguments: (built.append(1), with_mask(*arguments))[1])
    tensors = [torch.randn(1, 2, 3 + length, 16) for length in range(12)]
    for _ in range(3):
        for q in tensors:
            undivided.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert len(built) <= len(tensors)

"""Hints for tensors of a wrong shape: the change that is suggested makes the tensor fit."""

from __future__ import annotations

import pytest
import torch

from undivided import InputError, attention, masks, scaled_dot_product_attention
from undivided.arguments.shapes import broadcast_hint

SIZES = (2, 6, 5, 7)  # batch elements, heads, queries, keys

# a wrong shape, and which axis of [batch, heads, queries, keys] each of its axes is; None: it describes key heads
AXES: dict[str, tuple[tuple[int, ...], tuple[int | None, ...]]] = {
    "keys-per-batch-element": ((2, 7), (0, 3)),
    "pairs-per-batch-element": ((2, 5, 7), (0, 2, 3)),
    "keys-per-head": ((2, 6, 7), (0, 1, 3)),
    "queries-last": ((7, 5), (3, 2)),
    "queries-last-per-head": ((6, 7, 5), (1, 3, 2)),
    "queries-last-of-four": ((2, 6, 7, 5), (0, 1, 3, 2)),
    "heads-first": ((6, 2, 5, 7), (1, 0, 2, 3)),
    "heads-after-queries": ((2, 5, 6, 7), (0, 2, 1, 3)),
    "heads-last": ((2, 5, 7, 6), (0, 2, 3, 1)),
    "key-heads": ((2, 3, 5, 7), (0, None, 2, 3)),
}


@pytest.mark.parametrize("name", AXES)
def test_the_suggested_change_puts_every_axis_in_its_place(name: str) -> None:
    shape, axes = AXES[name]
    hint = broadcast_hint(shape, SIZES, "tensor{}")
    assert hint is not None
    change = hint.removeprefix("did you mean ").removesuffix("?")
    indices = torch.meshgrid(*(torch.arange(size) for size in SIZES), indexing="ij")
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape)
    changed = eval(change, {"tensor": tensor}).expand(SIZES)
    # two query heads per key head
    expected = tensor[tuple(indices[1] // 2 if axis is None else indices[axis] for axis in axes)]
    assert torch.equal(changed, expected)


def test_a_shape_that_no_single_change_fits_has_no_hint() -> None:
    assert broadcast_hint((3, 8, 5, 7), SIZES, "tensor{}") is None
    assert broadcast_hint((1, 2, 6, 5, 7), SIZES, "tensor{}") is None


def test_one_wrong_size_is_named() -> None:
    assert broadcast_hint((5, 9), SIZES, "tensor{}") == "it is for 9 keys, and the call has 7"
    assert broadcast_hint((2, 6, 4, 7), SIZES, "tensor{}") == "it is for 4 queries, and the call has 5"
    assert broadcast_hint((2, 8, 5, 7), SIZES, "tensor{}") == "it is for 8 heads, and the call has 6"
    assert broadcast_hint((3, 6, 5, 7), SIZES, "tensor{}") == "it is for 3 batch elements, and the call has 2"


def test_masks_and_biases_of_every_entry_point_have_the_hint() -> None:
    q, k = torch.zeros(2, 5, 6, 8), torch.zeros(2, 7, 3, 8)
    padding = torch.ones(2, 7, dtype=torch.bool)
    with pytest.raises(InputError) as caught:
        attention(q, k, k, layout="bshd", mask=masks.dense(padding))
    assert caught.value.hint == "did you mean masks.dense(tensor[:, None, None])?"
    attention(q, k, k, layout="bshd", mask=masks.dense(padding[:, None, None]))
    with pytest.raises(InputError) as caught:
        attention(q, k, k, layout="bshd", bias=torch.zeros(2, 7))
    assert caught.value.hint == "did you mean bias[:, None, None]?"
    heads_first = (x.transpose(1, 2) for x in (q, k.repeat_interleave(2, 2), k.repeat_interleave(2, 2)))
    with pytest.raises(InputError) as caught:
        scaled_dot_product_attention(*heads_first, attn_mask=padding)
    assert caught.value.hint == "did you mean attn_mask[:, None, None]?"

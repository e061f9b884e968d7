"""Masks whose tensors were created in inference mode: cached like any other, and changes in place are seen."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import undivided
from undivided import masks
from undivided.masks import Mask

BUILD = {
    "lengths": (lambda t: masks.lengths(t), [3, 5, 2]),
    "documents": (lambda t: masks.documents(t), [0, 4, 6]),
    "sinks": (lambda t: masks.sinks(t), [3, 1, 2]),
    "captured": (lambda t: masks.predicate(lambda b, h, q, k: k < t[b]), [3, 1, 2]),
}


def built(name: str) -> tuple[Tensor, Mask]:
    make, values = BUILD[name]
    with torch.inference_mode():
        tensor = torch.tensor(values, dtype=torch.int32)
    assert tensor.is_inference()
    return tensor, make(tensor)


@pytest.mark.parametrize("name", BUILD)
def test_a_result_is_built_once(name: str) -> None:
    _, mask = built(name)
    calls: list[int] = []
    for _ in range(3):
        with torch.inference_mode():
            mask.cached("key", lambda: calls.append(1) or len(calls))  # type: ignore[func-returns-value]
    assert len(calls) == 1


@pytest.mark.parametrize("name", ["lengths", "sinks", "captured"])
def test_a_change_in_place_is_seen(name: str) -> None:
    tensor, mask = built(name)
    q = torch.randn(3, 6, 2, 8)
    with torch.inference_mode():
        for values in ([3, 5, 2], [1, 6, 2], [6, 1, 1]):
            tensor.copy_(torch.tensor(values, dtype=torch.int32))
            fresh = BUILD[name][0](torch.tensor(values))
            got = undivided.attention(q, q, q, layout="bshd", mask=mask)
            assert torch.equal(got, undivided.attention(q, q, q, layout="bshd", mask=fresh))


def test_a_large_tensor_is_not_compared() -> None:
    """Comparing it would cost more than building the result."""
    with torch.inference_mode():
        mask = masks.dense(torch.ones(200, 200, dtype=torch.bool))
    assert mask.state() is None


def test_a_tensor_whose_memory_was_freed_is_an_input_error() -> None:
    q = torch.randn(3, 6, 2, 8)
    for name in ("lengths", "sinks"):
        tensor, mask = built(name)
        tensor.untyped_storage().resize_(0)
        assert mask.state() is None
        with torch.inference_mode(), pytest.raises(undivided.InputError, match="bytes in memory"):
            undivided.attention(q, q, q, layout="bshd", mask=mask)


def test_a_zero_tensor_without_memory_is_not_compared() -> None:
    with torch.inference_mode():
        mask = masks.dense(torch._efficientzerotensor((4, 4), dtype=torch.bool))
    assert mask.state() is None

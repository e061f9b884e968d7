"""ALiBi's usual slopes: their numbers, and when a tensor of them is recognised."""

from __future__ import annotations

import pytest
import torch

import undivided
from undivided.request.slopes import are_usual, usual_slopes


@pytest.mark.parametrize("make", [undivided.alibi_slopes, usual_slopes], ids=["alibi_slopes", "usual_slopes"])
@pytest.mark.parametrize(
    ("heads", "exponents"),
    [
        (1, [8]),
        (2, [4, 8]),
        (3, [4, 8, 2]),
        (6, [2, 4, 6, 8, 1, 3]),
        (8, range(1, 9)),
        (12, [*range(1, 9), 0.5, 1.5, 2.5, 3.5]),
    ],
)
def test_the_slopes_are_those_of_the_paper(make: object, heads: int, exponents: list[float]) -> None:
    found = make(heads)  # type: ignore[operator]
    assert found.dtype == torch.float32
    assert found.tolist() == pytest.approx([2.0**-n for n in exponents], rel=1e-6)


def test_the_usual_slopes_are_one_tensor_until_it_is_changed() -> None:
    first = usual_slopes(5)
    assert usual_slopes(5) is first
    first.mul_(2)
    assert not are_usual(first)
    assert are_usual(usual_slopes(5))
    assert usual_slopes(5).tolist() == undivided.alibi_slopes(5).tolist()


def test_slopes_of_the_same_numbers_from_elsewhere_are_not_recognised() -> None:
    slopes = usual_slopes(7)
    assert are_usual(slopes.view(7))
    assert are_usual(undivided.alibi_slopes(7))
    for other in (slopes.clone(), slopes[:6], slopes.expand(2, 7), torch.tensor(slopes.tolist())):
        assert not are_usual(other)


@pytest.mark.parametrize("make", [undivided.alibi_slopes, usual_slopes], ids=["alibi_slopes", "usual_slopes"])
def test_the_slopes_are_on_the_requested_device(make: object) -> None:
    assert make(3, "meta").device.type == "meta"  # type: ignore[operator]

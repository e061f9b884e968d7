"""Bands are one object for equal arguments."""

from __future__ import annotations

import torch

import undivided
from undivided import masks


def test_equal_bands_are_one_object() -> None:
    assert masks.causal() is masks.causal()
    assert masks.causal("top_left") is not masks.causal()
    assert masks.window(3, 0) is masks.window(torch.tensor(3).item(), 0)
    assert masks.window(3, 0) is not masks.window(3, 1)
    assert masks.window(None, 0) is masks.causal()


def test_a_band_in_a_compiled_function_may_have_a_symbolic_width() -> None:
    def layer(x: torch.Tensor, width: int) -> torch.Tensor:
        return undivided.attention(x, x, x, layout="bshd", mask=masks.window(width, 0))

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    x = torch.randn(1, 9, 2, 16)
    for width in (2, 3, 5):
        torch.testing.assert_close(compiled(x, width), layer(x, width))

"""The kernels get pointers to placeholders for tensors that a call does not have; they neither read nor write there."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import undivided
from undivided import masks
from undivided.backends.triton import inputs

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.1])},
    "sinks": {"sinks": torch.tensor([0.5, 0.1])},
    "bias": {"bias": torch.ones(1, 2, 40, 40)},
    "dropout": {"dropout_p": 0.3, "dropout_seed": 4},
    "softcap": {"softcap": 3.0},
}
LEAVES = ("alibi", "sinks", "bias")
"""Options that may have a gradient."""


@pytest.fixture
def fences(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Memory around the placeholders, all NaN in floating point."""
    around: list[Tensor] = []

    @functools.cache
    def placeholder(dtype: torch.dtype, device: torch.device) -> Tensor:
        around.append(torch.full((1 << 16,), -1, dtype=torch.uint8, device=device))
        return around[-1].view(dtype)[: 1 << 10]

    monkeypatch.setattr(inputs, "_placeholder", placeholder)
    return around


@pytest.mark.parametrize(
    ("name", "leaf"),
    [(name, leaf) for name in OPTIONS for leaf in ("q", "k", "v", "all")] + [(name, "option") for name in LEAVES],
)
def test_nothing_is_written_to_a_tensor_that_a_call_does_not_have(name: str, leaf: str, fences: list[Tensor]) -> None:
    """A gradient may be needed of some tensors alone: ALiBi slopes are mostly constants."""
    tensors: dict[str, Tensor] = {name: torch.randn(2, 40, 2, 16) for name in "qkv"}
    option = {key: value.clone() if isinstance(value, Tensor) else value for key, value in OPTIONS[name].items()}
    given = {**tensors, **option}
    chosen = {"all": [*tensors.values(), *option.values()], "option": list(option.values())}.get(leaf)
    leaves = [tensors[leaf]] if chosen is None else [value for value in chosen if isinstance(value, Tensor)]
    for tensor in leaves:
        tensor.requires_grad_()
    gradients = []
    for backend in ("triton", "reference"):
        out = undivided.attention(**given, layout="bshd", mask=masks.causal(), backend=backend)
        gradients.append(torch.autograd.grad(out.square().sum(), leaves))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert fences
    assert all(bool((fence == 255).all()) for fence in fences)

"""Tensors whose values are not at their pointers: negated views, zeros without memory, and rows that overlap."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import undivided
from undivided import masks

BACKENDS = ["native", "torch_flash", "reference", "triton"]
NAMES = ["q", "k", "v", "bias", "sinks", "alibi_slopes"]


def _tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 16, 16) for _ in range(3))
    return {
        "q": q,
        "k": k,
        "v": v,
        "bias": torch.randn(2, 16, 16),
        "sinks": torch.randn(2),
        "alibi_slopes": torch.rand(2),
    }


def _results(
    backend: str | None, tensors: dict[str, Tensor], grad: Tensor | None = None, **options: Any
) -> list[Tensor]:
    leaves = {name: tensor.detach().requires_grad_(grad is not None) for name, tensor in tensors.items()}
    out = undivided.attention(**leaves, layout="bhsd", backend=backend, **options)
    return [out] if grad is None else [out, *torch.autograd.grad(out, list(leaves.values()), grad)]


def _same(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("backend", "name"),
    # torch_flash has no gradients of the others
    [(backend, name) for backend in BACKENDS for name in NAMES if backend != "torch_flash" or name in NAMES[:3]],
)
@pytest.mark.parametrize("lazy", [torch._neg_view, lambda t: torch._efficientzerotensor(t.shape)], ids=["negated", "0"])
def test_lazy_tensors_are_read_as_they_are(name: str, backend: str, lazy: Any) -> None:
    given = _tensors()
    tensors = {each: given[each] for each in ("q", "k", "v", name)}
    grad = torch.randn(1, 2, 16, 16)
    changed = tensors | {name: lazy(tensors[name])}
    plain = changed | {name: torch.zeros_like(tensors[name]) + changed[name]}
    _same(_results(backend, changed, grad), _results(backend, plain, grad))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lazy", [torch._neg_view, lambda t: torch._efficientzerotensor(t.shape)], ids=["negated", "0"])
def test_lazy_gradients_of_the_output(backend: str, lazy: Any) -> None:
    tensors = {name: tensor for name, tensor in _tensors().items() if name in "qkv"}
    grad = lazy(torch.randn(1, 2, 16, 16))
    _same(_results(backend, tensors, grad), _results(backend, tensors, torch.zeros(1, 2, 16, 16) + grad))


@pytest.mark.parametrize("backend", [None, *BACKENDS])
@pytest.mark.parametrize("mask", [None, masks.causal(), masks.window(3, 0)], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_windows_of_a_signal_overlap(dtype: torch.dtype, mask: Any, backend: str | None) -> None:
    torch.manual_seed(0)
    windows = torch.randn(1, 1, 23, dtype=dtype).unfold(-1, 16, 1)
    if undivided.explain(windows, windows, windows, layout="bhsd", mask=mask, backend=backend).chosen is None:
        return  # refused
    copies = windows.contiguous()
    grad = torch.randn(1, 1, 8, 16, dtype=dtype)
    found, expected = (
        _results(backend, {"q": each, "k": each, "v": each}, grad, mask=mask) for each in (windows, copies)
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(
            one, other, rtol=2e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-2 * dtype.itemsize
        )

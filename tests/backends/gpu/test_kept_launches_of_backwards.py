"""Kept launches of backwards of the `triton` backend: repeated ones give the gradients of first ones.

There is no GPU, so Triton's interpreter runs the kernels, in place of a compiler that returns kernels to launch again.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from interpreted_launches import kinds_of_calls

import undivided
from undivided import masks
from undivided.backends import triton
from undivided.backends.triton import kept_launches
from undivided.kernels.triton import config
from undivided.request.normalise import normalise
from undivided.request.request import Request, Tensors
from undivided.verification import inputs
from undivided.verification.cases import CASES, Case


@pytest.fixture
def backwards(
    runs: list[kept_launches.ForwardLaunches], monkeypatch: pytest.MonkeyPatch
) -> list[kept_launches.BackwardLaunches]:
    """As `runs`, with the launches of every backward that ran one."""
    found: list[kept_launches.BackwardLaunches] = []
    find = kept_launches.find_gradients

    def noted(*arguments: Any) -> kept_launches.BackwardLaunches | None:
        kept = find(*arguments)
        if kept is not None:
            found.append(kept)
        return kept

    monkeypatch.setattr(kept_launches, "find_gradients", noted)
    return found


def differentiable_cases() -> dict[str, Case]:
    """The cases of `kinds_of_calls` that have gradients."""
    cases = {name: (case, inputs.build(case, case.dtypes[0])) for name, case in kinds_of_calls().items()}
    return {name: case for name, (case, built) in cases.items() if built.arguments["q"].requires_grad}


def scaled(given: Tensors, factor: float) -> Tensors:
    """Other memory, other values, the same strides."""
    copies = Tensors._make(None if t is None else copy.deepcopy(t.detach()) for t in given)
    for tensor in copies:
        if tensor is not None:
            tensor *= factor
    return copies


@pytest.mark.parametrize("name", differentiable_cases())
def test_a_repeated_backward_has_the_bits_of_a_first_one(
    name: str, backwards: list[kept_launches.BackwardLaunches]
) -> None:
    case = CASES[name]
    dtype = next(dtype for dtype in case.dtypes if dtype != torch.float64)
    call, given = normalise(Request.from_keywords(**inputs.build(case, dtype).arguments))

    def gradients_of(given: Tensors) -> list[torch.Tensor | None]:
        with torch.no_grad():
            result = triton.BACKEND.forward(call, given)
            return triton.BACKEND.backward(call, given, result, result.out.cos(), None)

    gradients_of(given)
    assert not backwards
    second, home = scaled(given, -1.5), kept_launches._kept(call)
    found = gradients_of(second)
    serves = not call.mask.parts or call.normal_form(given.q).exact
    assert bool(backwards) == (home is not None and serves)
    if home:
        home.clear()
    for actual, expected in zip(found, gradients_of(second), strict=True):
        assert (actual is None) == (expected is None)
        if actual is not None and expected is not None:
            assert torch.equal(actual, expected)
            assert actual.stride() == expected.stride()


def causal_gradients(
    q: torch.Tensor, k: torch.Tensor, grad_out: torch.Tensor, backend: str, mask: masks.Mask, **options: Any
) -> tuple[torch.Tensor, ...]:
    leaves = [t.detach().requires_grad_() for t in (q, k)]
    out = undivided.attention(leaves[0], leaves[1], leaves[1], layout="bshd", mask=mask, backend=backend, **options)
    return torch.autograd.grad(out, leaves, grad_out)


@pytest.mark.parametrize("change", ["strides", "no last axis", "alignment", "values"])
def test_a_backward_reads_its_own_gradient(change: str, backwards: list[kept_launches.BackwardLaunches]) -> None:
    q, k, mask = torch.randn(1, 40, 4, 16), torch.randn(1, 40, 2, 16), masks.causal()
    dense = torch.randn(1, 40, 4, 16)
    for _ in range(2):
        causal_gradients(q, k, dense, "triton", mask)
    assert len(backwards) == 1
    other = {
        "strides": torch.randn(1, 4, 40, 16).transpose(1, 2),
        "no last axis": torch.randn(1, 40, 4, 1).expand(-1, -1, -1, 16),
        "alignment": torch.randn(dense.numel() + 1)[1:].view(dense.shape),
        "values": torch.randn_like(dense),
    }[change]
    for _ in range(2):
        found = causal_gradients(q, k, other, "triton", mask)
        for actual, expected in zip(found, causal_gradients(q, k, other, "reference", mask), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert len(backwards) == {"strides": 2, "no last axis": 1, "alignment": 2, "values": 3}[change]


def test_other_gradients_have_other_launches(backwards: list[kept_launches.BackwardLaunches]) -> None:
    """Which of q, k and v need one decides what is launched."""
    q, k, mask = torch.randn(1, 40, 4, 16), torch.randn(1, 40, 2, 16), masks.causal()
    wanted = [(True, True), (True, False), (False, True)]
    for round in range(2):
        for needs in wanted:
            leaves = [t.detach().requires_grad_(need) for t, need in zip((q, k), needs, strict=True)]
            grads = []
            for backend in ("triton", "reference"):
                out = undivided.attention(leaves[0], leaves[1], k, layout="bshd", mask=mask, backend=backend)
                grads.append(torch.autograd.grad(out, [t for t in leaves if t.requires_grad], torch.ones_like(out) * 2))
            for actual, expected in zip(*grads, strict=True):
                torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        assert len(backwards) == 3 * round


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_layer_has_the_gradient_of_its_own_sinks(
    dtype: torch.dtype, backwards: list[kept_launches.BackwardLaunches]
) -> None:
    mask = masks.causal()
    for n in range(3):
        leaves = [torch.randn(1, 40, 4, 16), torch.randn(1, 40, 2, 16), (torch.randn(4) + n).to(dtype)]
        q, k, sinks = (leaf.requires_grad_() for leaf in leaves)
        grads = []
        for backend in ("triton", "reference"):
            out = undivided.attention(q, k, k, layout="bshd", mask=mask, sinks=sinks, backend=backend)
            grads.append(torch.autograd.grad(out.square().sum(), (q, k, sinks)))
        for actual, expected in zip(*grads, strict=True):
            rtol = 1e-2 if actual.dtype == torch.bfloat16 else 1e-4
            torch.testing.assert_close(actual, expected, rtol=rtol, atol=1e-4)
    assert len(backwards) == 2


def test_the_gradient_of_an_lse_keeps_no_launches(backwards: list[kept_launches.BackwardLaunches]) -> None:
    q = torch.randn(1, 40, 2, 16, requires_grad=True)
    for _ in range(2):
        out, lse = undivided.attention(q, q, q, layout="bshd", backend="triton", return_lse=True)
        (out.sum() + lse.sum()).backward()
    assert not backwards


def test_tensor_descriptors_of_a_backward_are_those_of_its_call(
    backwards: list[kept_launches.BackwardLaunches],
) -> None:
    tile, mask = config.INTERPRETED._replace(descriptors=True), masks.causal()
    with config.trial("rows", tile), config.trial("keys", tile):
        for _ in range(3):
            q, k, grad_out = torch.randn(1, 40, 4, 16), torch.randn(1, 40, 2, 16), torch.randn(1, 40, 4, 16)
            found = causal_gradients(q, k, grad_out, "triton", mask)
            for actual, expected in zip(found, causal_gradients(q, k, grad_out, "reference", mask), strict=True):
                torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert len(backwards) == 2
    described = [one for found in backwards for kept in found.launches for one in kept.descriptors.values()]
    assert len(described) == 2 * 4
    assert all(one.base is None for one in described)


def test_a_backward_keeps_no_memory_of_a_call(backwards: list[kept_launches.BackwardLaunches]) -> None:
    q, k, mask = torch.randn(1, 40, 4, 16), torch.randn(1, 40, 2, 16), masks.causal()
    for _ in range(2):
        causal_gradients(q, k, torch.ones_like(q), "triton", mask)
    (found,) = backwards
    values = [value for one in found.launches for value in one.launch.arguments]
    assert all(value.numel() == 1 for value in values if isinstance(value, torch.Tensor))
    assert all({*one.tensors} <= {"tiles", "ranges", "columns"} for one in found.launches)

"""A backward for a batch of incoming gradients equals a Python loop over them, whichever way PyTorch makes the
batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import undivided
from undivided import masks

Batched = Callable[[Tensor, Sequence[Tensor], Tensor], Sequence[Tensor]]
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": masks.causal("bottom_right")},
    "window-and-empty-row": {"mask": masks.window(1, 0, "bottom_right") & masks.lengths([4, 0], [3, 2])},
    "bias-sinks-slopes": {"bias": (2, 3, 4), "sinks": (2,), "alibi_slopes": (2,), "mask": masks.causal("top_left")},
    "dropout": {"dropout_p": 0.4, "dropout_seed": 3},
}
BACKENDS = (None, "reference", "torch_flash")


def case(name: str, backend: str | None, layout: Any = "bhsd") -> tuple[Callable[..., Tensor], list[Tensor]]:
    """A function of its inputs, and the inputs: q, k, v and whatever else has a gradient."""
    options = dict(KINDS[name])
    shapes = {n: options.pop(n) for n in ("bias", "sinks", "alibi_slopes") if n in options}
    generator = torch.Generator().manual_seed(1)
    sizes = [(2, 2, n, 2) for n in (3, 4, 4)] + list(shapes.values())
    inputs = [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in sizes]

    def run(*x: Tensor) -> Tensor:
        others = dict(zip(shapes, x[3:], strict=True))
        return undivided.attention(*x[:3], layout=layout, backend=backend, **options, **others)

    return run, inputs


def cases(chosen_is_slow: bool = False) -> list[Any]:
    """Every kind of problem with the chosen backend (None) and with named ones. Here the reference or torch_flash is
    chosen: where that is slow, the named ones stand for it unless the slow tests run."""
    return [
        pytest.param(
            name, backend, id=f"{name}-{backend}", marks=[pytest.mark.slow] * (chosen_is_slow and backend is None)
        )
        for name in KINDS
        for backend in BACKENDS
        if not (backend == "torch_flash" and name in ("bias-sinks-slopes", "dropout"))
    ]


@pytest.fixture(autouse=True)
def pytorchs_own_fallback() -> Any:
    """Where PyTorch's flash operator recorded itself, PyTorch loops over its backward and says that this is slow."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop")
        yield


def by_is_grads_batched(out: Tensor, inputs: Sequence[Tensor], upstream: Tensor) -> Sequence[Tensor]:
    return torch.autograd.grad(out, inputs, upstream, is_grads_batched=True, retain_graph=True)


def by_vmap(out: Tensor, inputs: Sequence[Tensor], upstream: Tensor) -> Sequence[Tensor]:
    return torch.vmap(lambda g: torch.autograd.grad(out, inputs, g, retain_graph=True))(upstream)


def by_nested_vmap(out: Tensor, inputs: Sequence[Tensor], upstream: Tensor) -> Sequence[Tensor]:
    pairs = torch.stack((upstream, 2 * upstream))
    each = torch.vmap(torch.vmap(lambda g: torch.autograd.grad(out, inputs, g, retain_graph=True)))(pairs)
    return [g[1] / 2 for g in each]


WAYS: dict[str, Batched] = {"is_grads_batched": by_is_grads_batched, "vmap": by_vmap, "vmap-of-vmap": by_nested_vmap}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize(("name", "backend"), cases())
def test_a_batch_of_gradients_equals_a_loop(name: str, backend: str | None, way: Batched) -> None:
    run, inputs = case(name, backend)
    out = run(*inputs)
    upstream = torch.randn(5, *out.shape, dtype=out.dtype)
    loop = [torch.autograd.grad(out, inputs, g, retain_graph=True) for g in upstream]
    found = way(out, inputs, upstream)
    torch.testing.assert_close(list(found), [torch.stack(parts) for parts in zip(*loop, strict=True)])


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_the_log_sum_exp_has_batched_gradients_too(way: Batched) -> None:
    _, inputs = case("plain", None)
    _, lse = undivided.attention(*inputs, layout="bhsd", return_lse=True)
    upstream = torch.randn(5, *lse.shape, dtype=lse.dtype)
    loop = [torch.autograd.grad(lse, inputs[:2], g, retain_graph=True) for g in upstream]
    found = way(lse, inputs[:2], upstream)
    torch.testing.assert_close(list(found), [torch.stack(parts) for parts in zip(*loop, strict=True)])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "backend"), cases())
def test_gradcheck_with_batched_gradients(name: str, backend: str | None) -> None:
    run, inputs = case(name, backend)
    assert torch.autograd.gradcheck(run, inputs, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(run, inputs, check_batched_grad=True)


@pytest.mark.parametrize("layout", ["bshd", "sbhd"])
def test_in_other_layouts(layout: str) -> None:
    inputs = [torch.randn(2, 3, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]

    def run(*x: Tensor) -> Tensor:
        return undivided.attention(*x, layout=layout, mask=masks.causal())

    assert torch.autograd.gradcheck(run, inputs, check_batched_grad=True)


def test_packed_documents() -> None:
    inputs = [torch.randn(7, 2, 2, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    mask = masks.documents([0, 3, 7]) & masks.causal()

    def run(*x: Tensor) -> Any:
        return undivided.attention(*x, layout="thd", mask=mask, return_lse=True)

    assert torch.autograd.gradcheck(run, inputs, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(run, inputs, check_batched_grad=True)


@pytest.mark.parametrize(("name", "backend"), cases(chosen_is_slow=True))
def test_jacobians_and_hessians(name: str, backend: str | None) -> None:
    run, inputs = case(name, backend)
    q, others = inputs[0], [t.detach() for t in inputs[1:]]

    def of_q(x: Tensor) -> Tensor:
        return run(x, *others)

    def loss(x: Tensor) -> Tensor:
        return of_q(x).sin().sum()

    functional = torch.autograd.functional
    jacobian = functional.jacobian(of_q, q)
    torch.testing.assert_close(functional.jacobian(of_q, q, vectorize=True), jacobian)
    torch.testing.assert_close(torch.func.jacrev(of_q)(q), jacobian)
    hessian = functional.hessian(loss, q)
    torch.testing.assert_close(functional.hessian(loss, q, vectorize=True), hessian)
    recorded = functional.jacobian(of_q, q, vectorize=True, create_graph=True)
    (mine,) = torch.autograd.grad(recorded.square().sum(), q)
    (loops,) = torch.autograd.grad(functional.jacobian(of_q, q, create_graph=True).square().sum(), q)
    torch.testing.assert_close(mine, loops)


@pytest.mark.parametrize("way", ["is_grads_batched", "vmap"])
def test_a_batch_of_second_derivatives_may_be_derived_again(way: str) -> None:
    run, inputs = case("causal", "reference")
    (first,) = torch.autograd.grad(run(*inputs).sin().sum(), inputs[0], create_graph=True)
    upstream = torch.randn(3, *first.shape, dtype=first.dtype)

    def each(g: Tensor) -> Tensor:
        return torch.autograd.grad(first, inputs[1], g, create_graph=True)[0]

    if way == "vmap":
        second = torch.vmap(each)(upstream)
    else:
        (second,) = torch.autograd.grad(first, inputs[1], upstream, is_grads_batched=True, create_graph=True)
    loop = torch.stack([each(g) for g in upstream])
    torch.testing.assert_close(second, loop)
    third, of_loop = (torch.autograd.grad(t.square().sum(), inputs, retain_graph=True) for t in (second, loop))
    torch.testing.assert_close(third, of_loop)

"""Derivatives of every order and mode: exact, or an error; never silent zeros."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from brute_force import attend, causal, error, whole
from torch import Tensor
from torch.autograd import forward_ad

import undivided
from undivided import masks

# torch's own forward mode scripts its decompositions when it is first used


BACKENDS = ("reference", "torch_flash")


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal-gqa": {"mask": masks.causal("bottom_right"), "kv_heads": 1},
    "window": {"mask": masks.window(1, 0, "bottom_right")},
    "lengths-with-an-empty-row": {"mask": masks.lengths([4, 0], [3, 2])},
    "dense": {"mask": masks.dense(torch.tensor([[True, False, True, True], [False] * 4, [True] * 4]))},
    "bias": {"bias": (2, 1, 3, 4)},
    "alibi": {"alibi_slopes": (2, 2), "mask": masks.causal("bottom_right")},
    "sinks-softcap": {"sinks": (2,), "softcap": 1.5},
    "value-dim-dropout": {"v_dim": 3, "dropout_p": 0.3, "dropout_seed": 3},
}


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64).to(dtype)


def problem(name: str, backend: str | None = None, lse: bool = True) -> tuple[Callable[..., Any], list[Tensor]]:
    """(function of its inputs, inputs): [2, 2, 3 or 4, 2] tensors, and whatever of bias, slopes and sinks there is."""
    case = dict(KINDS[name])
    kv_heads, v_dim = case.pop("kv_heads", 2), case.pop("v_dim", 2)
    names = [n for n, value in case.items() if isinstance(value, tuple)]
    inputs = [random(2, 2, 3, 2, seed=1), random(2, kv_heads, 4, 2, seed=2), random(2, kv_heads, 4, v_dim, seed=3)]
    inputs += [random(*case[n], seed=4).abs() for n in names]

    def run(*x: Tensor) -> Any:
        arguments = {**case, **dict(zip(names, x[3:], strict=True))}
        found = undivided.attention(*x[:3], layout="bhsd", backend=backend, return_lse=lse, **arguments)
        if not lse:
            return found
        return found[0], found[1].masked_fill(found[1] == -math.inf, 0.0)

    return run, inputs


def leaves(inputs: list[Tensor]) -> list[Tensor]:
    return [t.clone().requires_grad_() for t in inputs]


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_double_backward_is_that_of_finite_differences_lse_included(name: str) -> None:
    run, inputs = problem(name)
    assert torch.autograd.gradgradcheck(run, leaves(inputs))


@pytest.mark.parametrize("name", ["plain", "causal-gqa", "window", "lengths-with-an-empty-row", "dense"])
def test_double_backward_works_after_the_flash_forward(name: str) -> None:
    run, inputs = problem(name, "torch_flash", lse=False)
    assert torch.autograd.gradgradcheck(run, leaves(inputs))


def test_double_backward_of_packed_documents() -> None:
    mask = masks.documents([0, 2, 5], padded_q=[0, 3, 6]) & masks.causal()

    def run(*x: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = undivided.attention(*x, layout="thd", mask=mask, return_lse=True)
        return out, lse.masked_fill(lse == -math.inf, 0.0)

    assert torch.autograd.gradgradcheck(run, [random(6, 2, 2, seed=s).requires_grad_() for s in range(3)])


@pytest.mark.parametrize("layout", ["bshd", "sbhd"])
def test_double_backward_in_other_layouts(layout: str) -> None:
    x = [random(3, 3, 2, 2, seed=s).requires_grad_() for s in range(3)]
    run = lambda *t: undivided.attention(*t, layout=layout, mask=masks.causal())  # type: ignore[call-overload]  # noqa: E731
    assert torch.autograd.gradgradcheck(run, x)


@pytest.mark.parametrize("wanted", ["q", "k", "v"])
def test_pytorchs_recorded_operator_has_second_derivatives_in_one_input(wanted: str) -> None:
    x = [random(2, 3, 2, 4, seed=s).requires_grad_(name == wanted) for s, name in enumerate("qkv")]

    def run(*t: Tensor) -> Tensor:
        return undivided.attention(*t, layout="bshd", mask=masks.causal(), backend="torch_flash")

    assert "ScaledDotProductFlashAttention" in run(*x).grad_fn.next_functions[0][0].name()  # type: ignore[union-attr]
    assert torch.autograd.gradgradcheck(run, x)


def test_pytorchs_recorded_operator_keeps_nothing_after_its_backward() -> None:
    """The hook for the second derivative reads the tensors that the node saved, and keeps none itself."""
    x = [random(1, 4, 2, 4, seed=s).requires_grad_() for s in range(3)]
    inputs = [t * 2 for t in x]
    held = [weakref.ref(t) for t in inputs]
    out = undivided.attention(*inputs, layout="bshd", backend="torch_flash")
    del inputs
    torch.autograd.grad(out.sum(), x)
    assert [ref() for ref in held] == [None] * 3


@pytest.mark.parametrize("same", [False, True], ids=["q-k-v", "one-tensor-thrice"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_third_derivatives_are_exact(backend: str, same: bool) -> None:
    """They were once silently wrong: the double backward was marked once-differentiable, and autograd bypassed it."""
    x = [random(1, 2, 4, 2, seed=s).requires_grad_() for s in range(1 if same else 3)]

    def third(out: Tensor) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(out.sin().sum(), x, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), x, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in second), x)

    q, k, v = x * 3 if same else x
    got = third(undivided.attention(q, k, v, layout="bhsd", mask=masks.causal(), backend=backend))
    for a, b in zip(got, third(attend(q, k, v, whole(1, 4, 4), [causal()])[0]), strict=True):
        assert error(a, b) < 1e-10


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gradient_penalty_trains_every_input(backend: str) -> None:
    q, k, v = (random(1, 2, 4, 2, seed=s).requires_grad_() for s in range(3))

    def penalty(out: Tensor) -> tuple[Tensor, ...]:
        grads = torch.autograd.grad(out.sin().sum(), (q, k, v), create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in grads), (q, k, v))  # type: ignore[arg-type]

    got = penalty(undivided.attention(q, k, v, layout="bhsd", mask=masks.causal(), backend=backend))
    want = penalty(attend(q, k, v, whole(1, 4, 4), [causal()])[0])
    for name, a, b in zip("qkv", got, want, strict=True):
        assert error(a, b) < 1e-11, name


def numeric_jvp(run: Callable[..., Any], inputs: list[Tensor], tangents: list[Tensor]) -> list[Tensor]:
    step = 1e-5
    with torch.no_grad():
        up, down = (run(*(x + s * t for x, t in zip(inputs, tangents, strict=True))) for s in (step, -step))
    return [(a - b) / (2 * step) for a, b in zip(up, down, strict=True)]


@pytest.mark.parametrize("name", KINDS)
def test_forward_mode_is_that_of_finite_differences(name: str) -> None:
    run, inputs = problem(name)
    tangents = [random(*t.shape, seed=7) for t in inputs]
    want = numeric_jvp(run, inputs, tangents)
    with forward_ad.dual_level():
        outputs = run(*(forward_ad.make_dual(x, t) for x, t in zip(inputs, tangents, strict=True)))
        got = [forward_ad.unpack_dual(out).tangent for out in outputs]
    _, by_func = torch.func.jvp(run, tuple(inputs), tuple(tangents))
    for a, b, c in zip(got, by_func, want, strict=True):
        assert a is not None, "no tangent: silent zeros"
        assert error(a, c) < 1e-7
        assert error(b, a) < 1e-14


@pytest.mark.parametrize("which", ["q", "k", "v", "bias", "sinks", "alibi_slopes"])
def test_the_tangent_of_any_single_input_is_used(which: str) -> None:
    extras = {"bias": random(3, 3, seed=4), "sinks": random(2, seed=5), "alibi_slopes": random(2, seed=6)}
    inputs = dict(zip("qkv", (random(1, 2, 3, 2, seed=s) for s in range(3)), strict=True)) | extras

    def run(x: Tensor) -> Tensor:
        given = {**inputs, which: x}
        rest = {n: given[n] for n in extras} if which in extras else {}
        return undivided.attention(given["q"], given["k"], given["v"], layout="bhsd", **rest)  # type: ignore[call-overload,no-any-return]

    tangent = random(*inputs[which].shape, seed=8)
    (want,) = numeric_jvp(lambda x: [run(x)], [inputs[which]], [tangent])
    with forward_ad.dual_level():
        got = forward_ad.unpack_dual(run(forward_ad.make_dual(inputs[which], tangent))).tangent
    assert got is not None
    assert float(got.norm()) > 0
    assert error(got, want) < 1e-7


def test_forward_over_reverse_gives_the_hessian_vector_product() -> None:
    run, inputs = problem("causal-gqa", lse=False)
    q, rest = inputs[0], inputs[1:]
    objective = lambda x: run(x, *rest).square().sum()  # noqa: E731
    tangent = random(*q.shape, seed=7)
    _, got = torch.func.jvp(torch.func.grad(objective), (q,), (tangent,))
    leaf = q.clone().requires_grad_()
    (first,) = torch.autograd.grad(objective(leaf), leaf, create_graph=True)
    (want,) = torch.autograd.grad((first * tangent).sum(), leaf)
    assert error(got, want) < 1e-12


@pytest.mark.parametrize("name", ["plain", "causal-gqa", "bias", "sinks-softcap", "alibi"])
def test_func_grad_equals_backward(name: str) -> None:
    run, inputs = problem(name)

    def objective(*x: Tensor) -> Tensor:
        out, lse = run(*x)
        return (out.sin().sum() + lse.cos().sum()).sum()  # type: ignore[no-any-return]

    got = torch.func.grad(objective, argnums=tuple(range(len(inputs))))(*inputs)
    x = leaves(inputs)
    for a, b in zip(got, torch.autograd.grad(objective(*x), x), strict=True):
        assert error(a, b) < 1e-13


@pytest.mark.parametrize("mask", [None, masks.causal(), masks.window(1, 1)], ids=["full", "causal", "window"])
def test_vmap_equals_a_loop(mask: masks.Mask | None) -> None:
    q, k, v = (random(3, 2, 2, 4, 2, seed=s) for s in range(3))
    run = lambda *x: undivided.attention(*x, layout="bhsd", mask=mask)  # noqa: E731
    want = torch.stack([run(*x) for x in zip(q, k, v, strict=True)])
    assert error(torch.func.vmap(run)(q, k, v), want) < 1e-14
    shared = torch.func.vmap(run, in_dims=(0, None, None))(q, k[0], v[0])
    assert error(shared, torch.stack([run(x, k[0], v[0]) for x in q])) < 1e-14


def test_vmap_over_the_bias() -> None:
    q, bias = random(2, 2, 4, 8), random(3, 4, 4)

    def run(b: Tensor) -> Tensor:
        return undivided.attention(q, q, q, layout="bhsd", bias=b)

    assert error(torch.func.vmap(run)(bias), torch.stack([run(b) for b in bias])) < 1e-14


def test_a_mask_first_used_under_one_transform_works_in_the_next() -> None:
    """Its cached ranges were tensors of a transform that had ended, and the next transform failed on them."""
    x = random(1, 7, 1, 2)

    def run(y: Tensor) -> Tensor:
        return undivided.attention(y, y, y, layout="bshd", mask=masks.causal())

    torch.func.hessian(lambda y: run(y).square().sum())(x)
    assert torch.func.jacrev(run)(x).shape == (1, 7, 1, 2, 1, 7, 1, 2)
    ranges = masks.causal().normal_form(1, 1, 7, 7, "cpu").ranges
    assert not torch._C._functorch.is_functorch_wrapped_tensor(ranges)


def test_gradients_of_each_sample_through_vmap() -> None:
    q, k, v = (random(3, 2, 4, 2, seed=s) for s in range(3))

    def loss(*x: Tensor) -> Tensor:
        return undivided.attention(*(t[None] for t in x), layout="bhsd").square().sum()

    got = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(q, k, v)
    for n in range(3):
        x = [t[n].clone().requires_grad_() for t in (q, k, v)]
        for a, b in zip(got, torch.autograd.grad(loss(*x), x), strict=True):
            assert error(a[n], b) < 1e-13


def test_a_jacobian_by_forward_mode_equals_one_by_reverse_mode() -> None:
    run, inputs = problem("window", lse=False)
    f = lambda q: run(q, *inputs[1:])  # noqa: E731
    assert error(torch.func.jacfwd(f)(inputs[0]), torch.func.jacrev(f)(inputs[0])) < 1e-12


def test_the_gradient_through_lse_alone_reaches_queries_and_keys_and_no_values() -> None:
    q, k, v = (random(1, 2, 3, 2, seed=s).requires_grad_() for s in range(3))
    _, lse = undivided.attention(q, k, v, layout="bhsd", return_lse=True)
    _, want = attend(q, k, v)
    got = torch.autograd.grad(lse.sin().sum(), (q, k, v), allow_unused=True, materialize_grads=True)
    expected = torch.autograd.grad(want.sin().sum(), (q, k))
    for a, b in zip(got, expected, strict=False):
        assert error(a, b) < 1e-12
    assert bool((got[2] == 0).all())


def test_the_gradient_through_lse_is_refused_by_a_backend_that_has_none() -> None:
    q = random(1, 2, 3, 2).requires_grad_()
    with pytest.raises(undivided.NoBackendError, match="the gradient through the log-sum-exp"):
        undivided.attention(q, q, q, layout="bhsd", return_lse=True, backend="torch_flash")
    with torch.no_grad():
        undivided.attention(q, q, q, layout="bhsd", return_lse=True, backend="torch_flash")

"""What autograd keeps between forward and backward, and what happens if it changes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from brute_force import attend, error
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import undivided
from undivided import masks
from undivided.backends.reference import Reference

# torch's own forward mode scripts its decompositions when it is first used


BACKENDS = ("reference", "torch_flash")


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64).to(dtype)


def changed_in_place() -> dict[str, tuple[masks.Mask, Tensor]]:
    n, ids = torch.tensor([3, 2]), torch.tensor([[0, 0, 1], [0, 1, 1]])
    limit = torch.tensor(2)
    seen, first = torch.ones(3, 3, dtype=torch.bool), torch.tensor([1, 2])
    return {
        "lengths": (masks.lengths(n, n), n),
        "document_ids": (masks.document_ids(ids), ids),
        "dense": (masks.dense(seen), seen),
        "prefix": (masks.causal() | masks.prefix(first), first),
        "predicate": (masks.predicate(lambda b, h, q, k: k < limit), limit),
    }


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", changed_in_place())
def test_a_mask_changed_in_place_between_forward_and_backward_raises(name: str, backend: str) -> None:
    mask, tensor = changed_in_place()[name]
    q = random(2, 2, 3, 2).requires_grad_()
    out = undivided.attention(q, q, q, layout="bhsd", mask=mask, backend=backend)
    tensor.zero_()
    with pytest.raises(RuntimeError, match="were changed in place between forward and backward"):
        out.sum().backward()


def test_pages_changed_in_place_between_forward_and_backward_raise() -> None:
    pages, pool = torch.tensor([[0, 1]], dtype=torch.int32), random(4, 4, 2, 2)
    q = random(1, 3, 2, 2).requires_grad_()
    out = undivided.attention(q, pool, pool, layout="bshd", mask=masks.lengths([6]), pages=pages)
    pages += 2
    with pytest.raises(RuntimeError, match="changed in place between forward and backward"):
        out.sum().backward()


@pytest.mark.parametrize("create_graph", [False, True], ids=["last", "more-to-come"])
def test_a_mask_changed_in_place_before_the_double_backward_raises(create_graph: bool) -> None:
    n = torch.tensor([3, 2])
    q = random(2, 2, 3, 2).requires_grad_()
    out = undivided.attention(q, q, q, layout="bhsd", mask=masks.lengths(n, n))
    (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    n.fill_(1)
    with pytest.raises(RuntimeError, match="were changed in place"):
        torch.autograd.grad(grad.square().sum(), q, create_graph=create_graph)


def test_autocast_does_not_reach_into_higher_derivatives_and_forward_mode() -> None:
    y = [random(1, 2, 4, 8, seed=s, dtype=torch.bfloat16).requires_grad_() for s in range(3)]

    def second(tensors: list[Tensor]) -> Tensor:
        out = undivided.attention(*tensors, layout="bhsd", backend="reference")
        (first,) = torch.autograd.grad(out.float().square().sum(), tensors[0], create_graph=True)
        return torch.autograd.grad(first.float().square().sum(), tensors[1])[0]

    def tangent(tensors: list[Tensor]) -> Tensor:
        run = lambda q: undivided.attention(q, *tensors[1:], layout="bhsd")  # noqa: E731
        return torch.func.jvp(run, (tensors[0],), (torch.ones_like(tensors[0]),))[1]  # type: ignore[no-any-return]

    for run in (second, tangent):
        plain = run(y)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(run(y), plain), run


@pytest.mark.parametrize("which", range(3), ids=["q", "k", "v"])
def test_an_input_changed_in_place_between_forward_and_backward_raises(which: int) -> None:
    x = [random(2, 2, 3, 2, seed=s).requires_grad_() for s in range(3)]
    changed = [t * 1 for t in x]
    out = undivided.attention(*changed, layout="bhsd")
    with torch.no_grad():
        changed[which].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_retained_graph_gives_the_same_gradients_twice_and_a_freed_one_raises(backend: str) -> None:
    x = [random(2, 2, 3, 2, seed=s).requires_grad_() for s in range(3)]
    out = undivided.attention(*x, layout="bhsd", mask=masks.causal(), backend=backend)
    first = torch.autograd.grad(out.sum(), x, retain_graph=True)
    for a, b in zip(first, torch.autograd.grad(out.sum(), x), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(out.sum(), x)


@pytest.mark.parametrize("wanted", ["q", "k", "v", "qk", "kv"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_inputs_that_need_no_gradient_get_none_and_the_others_the_same(backend: str, wanted: str) -> None:
    inputs = [random(2, 2, 3, 2, seed=s) for s in range(3)]
    all_grads = {}
    for names in ("qkv", wanted):
        x = [t.clone().requires_grad_(n in names) for n, t in zip("qkv", inputs, strict=True)]
        undivided.attention(*x, layout="bhsd", mask=masks.causal(), backend=backend).sin().sum().backward()
        all_grads[names] = dict(zip("qkv", (t.grad for t in x), strict=True))
    for name in "qkv":
        got, want = all_grads[wanted][name], all_grads["qkv"][name]
        if name in wanted:
            assert got is not None
            assert error(got, want) < 1e-13  # type: ignore[arg-type]
        else:
            assert got is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_tensor_as_query_key_and_value_sums_its_three_gradients(backend: str) -> None:
    x = random(1, 2, 4, 2).requires_grad_()
    (got,) = torch.autograd.grad(undivided.attention(x, x, x, layout="bhsd", backend=backend).sin().sum(), x)
    (want,) = torch.autograd.grad(attend(x, x, x)[0].sin().sum(), x)
    assert error(got, want) < 1e-12


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_expanded_incoming_gradient_is_read_by_its_strides(backend: str) -> None:
    x = [random(2, 2, 3, 2, seed=s).requires_grad_() for s in range(3)]
    out = undivided.attention(*x, layout="bhsd", backend=backend)
    expanded = random(2, 1, 1, 1).expand_as(out)
    got = torch.autograd.grad(out, x, expanded, retain_graph=True)
    for a, b in zip(got, torch.autograd.grad(out, x, expanded.contiguous()), strict=True):
        assert error(a, b) < 1e-14


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["saved-tensor-hooks", "reentrant"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_checkpoint_gives_the_same_gradients(backend: str, use_reentrant: bool) -> None:
    x = [random(2, 2, 3, 2, seed=s).requires_grad_() for s in range(3)]
    run = lambda *t: undivided.attention(*t, layout="bhsd", mask=masks.causal(), backend=backend)  # noqa: E731
    want = torch.autograd.grad(run(*x).sin().sum(), x)
    checkpoint(run, *x, use_reentrant=use_reentrant).sin().sum().backward()
    for t, b in zip(x, want, strict=True):
        assert torch.equal(t.grad, b)  # type: ignore[arg-type]


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
@pytest.mark.parametrize("is_saved", [True, False], ids=["saved", "recomputed"])
def test_a_selective_checkpoint_may_save_the_result_of_attention(
    is_saved: bool, dropout_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator in the list of what is saved runs once; otherwise again in the backward pass."""
    calls = 0
    forward = Reference.forward

    def counted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        return forward(*arguments)

    def run(*t: Tensor) -> Tensor:
        options: dict[str, Any] = {"layout": "bhsd", "mask": masks.causal(), "dropout_p": dropout_p}
        out: Tensor = undivided.attention(*(2 * one for one in t), backend="reference", **options)
        return out.sin()

    x = [random(2, 2, 3, 2, seed=s).requires_grad_() for s in range(3)]
    torch.manual_seed(0)
    want = torch.autograd.grad(run(*x).sum(), x)
    saved = [torch.ops.undivided.attention.default if is_saved else torch.ops.aten.mm.default]
    contexts = functools.partial(create_selective_checkpoint_contexts, saved)
    monkeypatch.setattr(Reference, "forward", counted)
    torch.manual_seed(0)
    out = checkpoint(run, *x, use_reentrant=False, context_fn=contexts)
    assert calls == 1
    for a, b in zip(torch.autograd.grad(out.sum(), x), want, strict=True):
        assert torch.equal(a, b)
    assert calls == (1 if is_saved else 2)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_no_graph_is_built_without_gradients(mode: Callable[[], Any]) -> None:
    q = random(1, 2, 3, 2).requires_grad_()
    with mode():
        out, lse = undivided.attention(q, q, q, layout="bhsd", return_lse=True)
    assert not out.requires_grad
    assert not lse.requires_grad
    with mode():
        assert "backward" not in undivided.explain(q, q, q, layout="bhsd").problem.features


def test_a_mask_first_used_while_serving_still_trains() -> None:
    mask = masks.causal() & masks.lengths([3, 2], [3, 2])
    q = random(2, 2, 3, 2)
    with torch.inference_mode():
        undivided.attention(q, q, q, layout="bhsd", mask=mask, backend="reference")
    x = q.clone().requires_grad_()
    undivided.attention(x, x, x, layout="bhsd", mask=mask, backend="reference").sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("backend", ["native", "reference", "torch_flash"])
def test_hooks_may_return_saved_tensors_with_other_strides(backend: str) -> None:
    """The kernels read contiguous rows, and gave garbage for others."""
    q = random(1, 3, 40, 8, dtype=torch.float32).requires_grad_()

    def output() -> Tensor:
        return undivided.attention(q, q, q, layout="bhsd", mask=masks.causal(), backend=backend).square().sum()

    (want,) = torch.autograd.grad(output(), q)
    with saved_tensors_hooks(lambda t: t.mT.contiguous().mT if t.dim() > 1 else t, lambda t: t):
        out = output()
    torch.testing.assert_close(torch.autograd.grad(out, q)[0], want)


def test_hooks_that_return_another_dtype_raise() -> None:
    q = random(1, 3, 40, 8, dtype=torch.float32).requires_grad_()
    with saved_tensors_hooks(torch.Tensor.half, lambda t: t):
        out = undivided.attention(q, q, q, layout="bhsd", backend="native")
    with pytest.raises(RuntimeError, match="a hook for saved tensors returned q in"):
        out.sum().backward()

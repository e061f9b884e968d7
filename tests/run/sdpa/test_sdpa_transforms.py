"""scaled_dot_product_attention under autocast, torch.func, meta tensors, torch.compile and torch.fx."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sdpa_calls import BFLOAT, DOUBLE, HALF, SINGLE, math, ours, qkv
from torch import Tensor, nn

import undivided
from undivided.errors import InputError

# torch's own forward mode scripts its decompositions when it is first used


@pytest.mark.parametrize("mask_dtype", [None, SINGLE, HALF, BFLOAT], ids=str)
def test_autocast_casts_as_pytorch_does(mask_dtype: torch.dtype | None) -> None:
    q, k, v = qkv(grad=True)
    mask = None if mask_dtype is None else (1000 + 3 * torch.randn(3, 5)).to(mask_dtype)  # bfloat16 has steps of 4
    with torch.autocast("cpu", dtype=BFLOAT):
        mine, theirs = ours(q, k.to(BFLOAT), v, mask), math(q, k.to(BFLOAT), v, mask)
    assert mine.dtype == theirs.dtype == BFLOAT
    assert (mine - theirs).norm() <= 0.01 * theirs.norm()
    (grad,) = torch.autograd.grad(mine.sum(), [q])
    assert grad.dtype == SINGLE


def test_autocast_leaves_float64_alone() -> None:
    q, k, v = qkv(dtype=DOUBLE)
    with torch.autocast("cpu", dtype=BFLOAT):
        out = ours(q, k, v, torch.zeros(3, 5, dtype=DOUBLE))
    torch.testing.assert_close(out, math(q, k, v))


@pytest.mark.parametrize("masked", ["none", "bool", "added", "bool of each"])
def test_vmap(masked: str) -> None:
    q, k, v = qkv()
    mask = {"none": None, "bool": torch.rand(3, 5) < 0.6, "added": torch.randn(3, 5)}.get(masked)
    if masked == "bool of each":
        mask = torch.rand(2, 1, 3, 5) < 0.6
        each = torch.vmap(ours)(q, k, v, mask)
    else:
        each = torch.vmap(lambda *x: ours(*x, attn_mask=mask))(q, k, v)
    torch.testing.assert_close(each, math(q, k, v, mask))


def test_per_sample_gradients() -> None:
    q, k, v = qkv(dtype=DOUBLE)
    mask = torch.rand(3, 5) < 0.6

    def loss(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda q, k, v: function(q, k, v, mask).square().sum()

    mine = torch.vmap(torch.func.grad(loss(ours), argnums=(0, 1, 2)))(q, k, v)
    theirs = torch.func.grad(loss(math), argnums=(0, 1, 2))(q, k, v)
    torch.testing.assert_close(mine, theirs)


def test_forward_mode() -> None:
    q, k, v = qkv(dtype=DOUBLE)
    bias = torch.randn(3, 5, dtype=DOUBLE)
    tangents = tuple(torch.randn_like(t) for t in (q, k, v, bias))
    mine = torch.func.jvp(ours, (q, k, v, bias), tangents)
    torch.testing.assert_close(mine, torch.func.jvp(math, (q, k, v, bias), tangents))


def test_second_derivatives() -> None:
    inputs = [torch.randn(1, 2, n, 2, dtype=DOUBLE, requires_grad=True) for n in (2, 3, 3)]
    bias = torch.randn(2, 3, dtype=DOUBLE, requires_grad=True)
    assert torch.autograd.gradgradcheck(ours, (*inputs, bias))


def test_meta_tensors_give_shape_and_dtype() -> None:
    q, k, v = (t.to("meta", HALF) for t in qkv())
    mask = torch.ones(3, 5, dtype=torch.bool, device="meta")
    for out in (ours(q, k, v, mask), ours(q, k, v, is_causal=True), ours(q[0], k[0], v[0])):
        assert (out.device.type, out.dtype, out.shape[-3:]) == ("meta", HALF, (4, 3, 8))


META_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "bool": {"attn_mask": torch.ones(3, 5, dtype=torch.bool, device="meta")},
    "added": {"attn_mask": torch.zeros(3, 5, device="meta")},
}


@pytest.mark.parametrize("options", META_OPTIONS.values(), ids=META_OPTIONS)
def test_meta_tensors_have_every_derivative(options: dict[str, Any]) -> None:
    q, k, v = (t.to("meta").requires_grad_() for t in qkv())

    def loss(q: Tensor) -> Tensor:
        return ours(q, k, v, **options).square().sum()

    (first,) = torch.autograd.grad(loss(q), q, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), q)
    assert first.shape == second.shape == torch.func.grad(loss)(q).shape == q.shape
    assert torch.func.jvp(loss, (q,), (q,))[1].shape == ()


COMPILED: dict[str, Callable[..., Tensor]] = {
    "plain": lambda q, k, v, m: ours(q, k, v),
    "causal": lambda q, k, v, m: ours(q, k, v, is_causal=True, scale=0.3),
    "bool": lambda q, k, v, m: ours(q, k, v, m > 0),
    "added": lambda q, k, v, m: ours(q, k, v, m),
    "3d": lambda q, k, v, m: ours(q[0], k[0], v[0], m),
    "one-key-head": lambda q, k, v, m: ours(q, k[:, :1], v[:, :1]),
    "5d": lambda q, k, v, m: ours(q[None], k[None], v, m),
    "lower-right": lambda q, k, v, m: ours(q, k, v, torch.ones(3, 5, dtype=torch.bool).tril(2)),
}


DERIVED: dict[str, Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]]] = {
    "grad": lambda attend: torch.func.grad(lambda q: attend(q).square().sum()),
    "jvp": lambda attend: lambda q: torch.func.jvp(attend, (q,), (q,))[1],
    "vmap": lambda attend: torch.func.vmap(attend, randomness="same"),
}


@pytest.mark.parametrize("derive", DERIVED.values(), ids=DERIVED)
def test_torch_func_in_a_compiled_function_drops_as_in_eager_mode(
    derive: Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]],
) -> None:
    torch._dynamo.reset()
    function = derive(lambda q: ours(q, q, q, dropout_p=0.5))
    q = qkv()[0]
    results = []
    for call in (function, torch.compile(function, backend="aot_eager", fullgraph=True)):
        torch.manual_seed(0)
        results.append(call(q))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("call", COMPILED.values(), ids=COMPILED)
def test_compiled_whole(call: Callable[..., Tensor]) -> None:
    torch._dynamo.reset()
    inputs = [*qkv(grad=True), torch.randn(3, 5, requires_grad=True)]
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    found = [compiled(*inputs), call(*inputs)]
    torch.testing.assert_close(*found)
    mine, eager = (torch.autograd.grad(out.sin().sum(), inputs, allow_unused=True) for out in found)
    torch.testing.assert_close(mine[:3], eager[:3])


@pytest.mark.parametrize("name", ["sdpa", "attention"])
def test_vmap_draws_dropout_for_each_element_or_for_all(name: str) -> None:
    """Drawing a seed in place was refused with randomness="different"."""

    def attend(q: Tensor) -> Tensor:
        if name == "sdpa":
            return undivided.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
        return undivided.attention(q, q, q, layout="bhsd", dropout_p=0.5)

    q = torch.randn(1, 1, 2, 8, 16).expand(2, -1, -1, -1, -1)
    first, second = torch.vmap(attend, randomness="different")(q)
    assert not torch.equal(first, second)
    first, second = torch.vmap(attend, randomness="same")(q)
    assert torch.equal(first, second)


class _Direct(nn.Module):
    """A module that calls our function without a replacement."""

    def __init__(self) -> None:
        super().__init__()
        self.k = nn.Parameter(torch.randn(2, 4, 7, 8))

    def forward(self, q: Tensor, mask: Tensor) -> Tensor:
        return undivided.scaled_dot_product_attention(q, self.k, self.k, attn_mask=mask)


def test_torch_fx_records_the_call() -> None:
    module, q, mask = _Direct(), torch.randn(2, 4, 5, 8), torch.rand(5, 7) > 0.3
    graph = torch.fx.symbolic_trace(module)
    assert undivided.scaled_dot_product_attention in [node.target for node in graph.graph.nodes]
    torch.testing.assert_close(copy.deepcopy(graph)(q, mask), module(q, mask))


def test_torch_fx_records_a_call_whose_mask_alone_is_an_input() -> None:
    q, mask = torch.randn(2, 4, 5, 8), torch.rand(5, 5) > 0.3
    graph = torch.fx.symbolic_trace(lambda mask: undivided.scaled_dot_product_attention(q, q, q, mask))
    torch.testing.assert_close(graph(mask), undivided.scaled_dot_product_attention(q, q, q, mask))


def test_attention_under_torch_fx_names_what_records_it() -> None:
    with pytest.raises(InputError, match=r"q must be a torch\.Tensor, got Proxy\n  HINT: torch\.fx\.symbolic_trace"):
        torch.fx.symbolic_trace(lambda q: undivided.attention(q, q, q, layout="bshd"))

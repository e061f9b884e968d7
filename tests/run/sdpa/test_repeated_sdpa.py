"""Repeated calls of `scaled_dot_product_attention` run what an earlier one has prepared, and give the same results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as pytorchs
from torch.utils.flop_counter import FlopCounterMode

import undivided
from undivided.errors import InputError
from undivided.run.prepare import prepare
from undivided.run.sdpa import repeated
from undivided.sdpa import scaled_dot_product_attention

SIZES = 2, 2, 16, 16


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch) -> dict[object, Any]:
    """The calls that are kept; what earlier tests have kept is forgotten."""
    calls: dict[object, Any] = {}
    monkeypatch.setattr(repeated, "_calls", calls)
    return calls


def draw(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*(sizes or SIZES)).to(dtype)


def close(found: Tensor, expected: Tensor) -> None:
    tolerance = 1e-5 if expected.dtype in (torch.float32, torch.float64) else 2e-2
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


CALLS: dict[str, Callable[..., tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]]] = {
    "plain": lambda dtype: ((draw(dtype=dtype), draw(dtype=dtype), draw(dtype=dtype)), {}),
    "causal": lambda dtype: ((draw(dtype=dtype), draw(dtype=dtype), draw(dtype=dtype)), {"is_causal": True}),
    "scale": lambda dtype: ((draw(dtype=dtype), draw(dtype=dtype), draw(dtype=dtype)), {"scale": 0.5}),
    "grouped": lambda dtype: (
        (draw(2, 4, 16, 16, dtype=dtype), draw(dtype=dtype), draw(dtype=dtype)),
        {"enable_gqa": True},
    ),
    "one query": lambda dtype: ((draw(2, 2, 1, 16, dtype=dtype), draw(dtype=dtype), draw(dtype=dtype)), {}),
    "other values": lambda dtype: (
        (draw(dtype=dtype), draw(dtype=dtype), draw(2, 2, 16, 8, dtype=dtype)),
        {"is_causal": True},
    ),
    "heads last": lambda dtype: (
        tuple(draw(2, 16, 2, 16, dtype=dtype).transpose(1, 2) for _ in range(3)),  # type: ignore[dict-item]
        {},
    ),
    "strided": lambda dtype: ((draw(dtype=dtype), draw(2, 2, 32, 16, dtype=dtype)[:, :, ::2], draw(dtype=dtype)), {}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("make", CALLS.values(), ids=CALLS)
def test_other_tensors_in_other_memory(
    make: Callable[..., tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]], dtype: torch.dtype
) -> None:
    """The memory of one call is that of the next if the allocator likes; tensors are also changed in place."""
    for _ in range(3):
        tensors, options = make(dtype)
        for _ in range(2):
            found, expected = scaled_dot_product_attention(*tensors, **options), pytorchs(*tensors, **options)
            close(found, expected)
            assert found.stride() == expected.stride() or dtype == torch.float64
            for tensor in tensors:
                tensor.normal_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("needs", ["q", "k", "v", "qkv"])
@pytest.mark.parametrize("make", CALLS.values(), ids=CALLS)
def test_gradients_of_other_tensors(
    make: Callable[..., tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]], needs: str, dtype: torch.dtype
) -> None:
    for _ in range(3):
        tensors, options = make(dtype)
        leaves = [t.detach().requires_grad_(name in needs) for name, t in zip("qkv", tensors, strict=True)]
        needed = [t for t in leaves if t.requires_grad]
        found, expected = (f(*leaves, **options) for f in (scaled_dot_product_attention, pytorchs))
        close(found, expected)
        assert found.stride() == expected.stride() or dtype == torch.float64
        weight = torch.randn_like(expected)
        for a, b in zip(*(torch.autograd.grad(out, needed, weight) for out in (found, expected)), strict=True):
            close(a, b)
        with torch.no_grad():
            assert not scaled_dot_product_attention(*leaves, **options).requires_grad


def some_of(*sizes: int) -> Tensor:
    """Boolean; every row has a key."""
    allowed = torch.rand(sizes) < 0.6
    allowed[..., 0] = True
    return allowed


MASKS: dict[str, Callable[[torch.dtype], Tensor]] = {
    "pairs": lambda dtype: some_of(16, 16),
    "pairs of each head": lambda dtype: some_of(2, 2, 16, 16),
    "padding": lambda dtype: torch.arange(16).expand(2, 1, 1, 16) < torch.tensor([9, 16])[:, None, None, None],
    "some keys": lambda dtype: some_of(2, 1, 1, 16),
    "every second column": lambda dtype: some_of(16, 32)[:, ::2],
    "numbers": lambda dtype: draw(16, 16, dtype=dtype),
    "numbers of each head": lambda dtype: draw(2, 16, 16, dtype=dtype),
    "numbers per row": lambda dtype: draw(2, 1, 16, 1, dtype=dtype),
    "fp32 numbers": lambda dtype: draw(2, 2, 16, 16),
    "transposed numbers": lambda dtype: draw(16, 16, dtype=dtype).t(),
}


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The requests that were prepared."""
    seen: list[object] = []

    def spied(request: Any, policy: Any) -> Any:
        seen.append(request)
        return prepare(request, policy)

    monkeypatch.setattr("undivided.sdpa.prepare", spied)
    return seen


@pytest.mark.parametrize("is_causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("make", MASKS.values(), ids=MASKS)
def test_other_tensors_with_one_mask(
    make: Callable[[torch.dtype], Tensor], dtype: torch.dtype, is_causal: bool, prepared: list[object]
) -> None:
    mask, causal = make(dtype), torch.ones(16, 16, dtype=torch.bool).tril()
    for heads_last in (False, True):
        for _ in range(3):
            q, k, v = (draw(2, 16, 2, 16, dtype=dtype).transpose(1, 2) for _ in range(3))
            if not heads_last:
                q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
            found = scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal)
            if mask.dtype == torch.bool:
                close(found, pytorchs(q, k, v, mask & causal if is_causal else mask))
            else:  # PyTorch reads a mask of fp32 beside q of fp64 as if it were of fp64
                bias = mask.to(dtype)
                close(found, pytorchs(q, k, v, bias.masked_fill(~causal, -torch.inf) if is_causal else bias))
            mask.copy_(make(dtype))  # a bias, or the mask of a small problem, is read anew in each call
    if undivided.explain(q, k, v, layout="bhsd").backend.name == "native":
        assert len(prepared) == 2


@pytest.mark.parametrize(
    ("name", "needs"),
    [(name, needs) for name in MASKS for needs in ("", "q", "kv", "m", "qm") if "m" not in needs or "numbers" in name],
)
def test_gradients_of_other_tensors_with_one_mask(name: str, needs: str, prepared: list[object]) -> None:
    mask = MASKS[name](torch.float32)
    mask.requires_grad_("m" in needs)
    for _ in range(3):
        leaves = [draw().requires_grad_(name in needs) for name in "qkv"]
        needed = [t for t in (*leaves, mask) if t.requires_grad]
        found, expected = (f(*leaves, mask) for f in (scaled_dot_product_attention, pytorchs))
        close(found, expected)
        if needed:
            weight = torch.randn_like(expected)
            for a, b in zip(*(torch.autograd.grad(out, needed, weight) for out in (found, expected)), strict=True):
                close(a, b)
    if undivided.explain(*leaves, layout="bhsd").backend.name == "native":
        assert len(prepared) == 1


@pytest.mark.parametrize("make", [make for name, make in MASKS.items() if "numbers" not in name])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_new_mask_in_each_call(
    make: Callable[[torch.dtype], Tensor], dtype: torch.dtype, prepared: list[object]
) -> None:
    for call in range(4):
        q, k, v, mask = draw(dtype=dtype), draw(dtype=dtype), draw(dtype=dtype), make(dtype)
        if call == 3:
            mask.fill_(False)
        elif call:  # sequence 0 has NaN in keys that it does not see
            mask = mask & (torch.arange(mask.shape[-1]) < 14)
            k[0, :, 14:] = v[0, :, 14:] = torch.nan
        found = scaled_dot_product_attention(q, k, v, mask)
        close(found, pytorchs(q, k.nan_to_num(), v.nan_to_num(), mask))
        assert not found.isnan().any()
    if undivided.explain(q, k, v, layout="bhsd").backend.name == "native":
        assert len(prepared) <= 2  # `&` has made a contiguous mask of a view


def test_a_bias_that_lost_its_memory() -> None:
    q, k, v, bias = draw(), draw(), draw(), draw(16, 16)
    for _ in range(2):
        scaled_dot_product_attention(q, k, v, bias)
    bias.untyped_storage().resize_(8)
    with pytest.raises(InputError, match="memory"):
        scaled_dot_product_attention(q, k, v, bias)


def test_a_mask_that_does_not_fit_after_one_that_does() -> None:
    q, k, v, mask = draw(), draw(), draw(), some_of(16, 16)
    for _ in range(2):
        scaled_dot_product_attention(q, k, v, mask)
    with pytest.raises(InputError, match="attn_mask must broadcast"):
        scaled_dot_product_attention(q[:, :, :5], k, v, mask)
    with pytest.raises(InputError, match="attn_mask must broadcast"):
        scaled_dot_product_attention(q, k, v, mask[:5])


def test_second_derivatives_of_a_repeated_call() -> None:
    for _ in range(3):
        leaves = [draw(1, 1, 3, 4, dtype=torch.float64).requires_grad_() for _ in range(3)]
        assert torch.autograd.gradgradcheck(scaled_dot_product_attention, leaves)
        leaves = [draw(1, 1, 3, 4).requires_grad_() for _ in range(3)]
        found = []
        for function in (scaled_dot_product_attention, lambda *t: (t[0] @ t[1].mT / 2).softmax(-1) @ t[2]):
            (first,) = torch.autograd.grad(function(*leaves).square().sum(), leaves[:1], create_graph=True)
            found.append(torch.autograd.grad(first.square().sum(), leaves))
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_calls_are_kept_by_sizes_and_options(kept: dict[object, Any]) -> None:
    for make in CALLS.values():
        for _ in range(3):
            tensors, options = make(torch.float32)
            scaled_dot_product_attention(*tensors, **options)
    if undivided.explain(draw(), draw(), draw(), layout="bhsd").backend.name != "native":
        pytest.skip("the native kernel is not built")
    assert len(kept) == len(CALLS)
    for _ in range(2):
        scaled_dot_product_attention(draw().requires_grad_(), draw(), draw())
        scaled_dot_product_attention(draw(), draw().requires_grad_(), draw())
    assert len(kept) == len(CALLS) + 2


def test_the_decision_and_the_policy_are_those_of_the_call(kept: dict[object, Any]) -> None:
    q, k, v = draw(), draw(), draw()
    for _ in range(2):
        scaled_dot_product_attention(q, k, v)
        with undivided.use_backends("reference"):
            scaled_dot_product_attention(q, k, v)
            decision = undivided.last_decision()
            assert decision is not None
            assert decision.backend.name == "reference"
        with sdpa_kernel(SDPBackend.MATH):
            scaled_dot_product_attention(q, k, v)
            decision = undivided.last_decision()
            assert decision is not None
            assert decision.backend.family == "math"
        undivided.attention(q, k, v, layout="bhsd", backend="reference")
        scaled_dot_product_attention(q, k, v)
        decision = undivided.last_decision()
        assert decision is not None
        assert decision.policy.forced is None


def gradients(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    leaf = v.clone().requires_grad_()
    out = scaled_dot_product_attention(q, k, leaf)
    (found,) = torch.autograd.grad(out.sum(), leaf)
    close(found.sum(2), torch.full((2, 2, 16), 16.0))
    return out.detach()


def tangent(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out, derivative = torch.func.jvp(lambda t: scaled_dot_product_attention(q, k, t), (v,), (torch.ones_like(v),))
    close(derivative, torch.ones_like(v))
    return out


def flops(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with FlopCounterMode(display=False) as counter:
        out = scaled_dot_product_attention(q, k, v)
    assert counter.get_total_flops() > 0
    return out


def autocast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        out = scaled_dot_product_attention(q, k, v)
    assert out.dtype == torch.bfloat16
    return out.float()


def lazily_negated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    for place in range(3):
        tensors = [torch._neg_view(-t) if n == place else t for n, t in enumerate((q, k, v))]
        close(scaled_dot_product_attention(*tensors), pytorchs(q, k, v))
    return scaled_dot_product_attention(q, k, torch._neg_view(-v))


def compiled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    torch.compiler.reset()
    out = torch.compile(lambda *t: scaled_dot_product_attention(*t), backend="eager", fullgraph=True)(q, k, v)
    torch.compiler.reset()
    return out


@pytest.mark.parametrize("needed", [False, True], ids=["without gradients", "with gradients"])
@pytest.mark.parametrize("call", [gradients, tangent, flops, autocast, lazily_negated, compiled])
def test_calls_that_something_else_sees_are_prepared_as_usual(call: Callable[..., Tensor], needed: bool) -> None:
    q, k, v = draw().requires_grad_(needed), draw(), draw()
    scaled_dot_product_attention(q, k, v)
    tolerance = 0.05 if call is autocast else 1e-5
    torch.testing.assert_close(call(q, k, v).detach(), pytorchs(q, k, v).detach(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "options",
    [{"dropout_p": "0"}, {"dropout_p": -1.0}, {"is_causal": 1}, {"enable_gqa": None}, {"scale": "1"}],
    ids=str,
)
def test_wrong_arguments_after_right_ones(options: dict[str, Any]) -> None:
    q, k, v = draw(), draw(), draw()
    scaled_dot_product_attention(q, k, v)
    with pytest.raises(InputError, match=next(iter(options))):
        scaled_dot_product_attention(q, k, v, **options)


@pytest.mark.parametrize("needed", [False, True], ids=["without gradients", "with gradients"])
@pytest.mark.parametrize("heads_last", [False, True], ids=["bhsd", "bshd"])
@pytest.mark.parametrize("calls", [0, 1], ids=["first", "repeated"])
@pytest.mark.parametrize("name", ["query", "key", "value", "attn_mask"])
def test_a_tensor_that_lost_its_memory(name: str, calls: int, heads_last: bool, needed: bool) -> None:
    """PyTorch makes no view of such a tensor: where one was needed, its error named no argument."""
    tensors = {n: draw(2, 16, 2, 16).transpose(1, 2) for n in ("query", "key", "value")}
    if not heads_last:
        tensors = {n: t.contiguous() for n, t in tensors.items()}
    tensors = {n: t.requires_grad_(needed) for n, t in (tensors | {"attn_mask": draw(16, 16)}).items()}
    for _ in range(calls):
        scaled_dot_product_attention(**tensors)
    tensors[name].untyped_storage().resize_(8)
    with pytest.raises(InputError, match=f"^({name}|{name[0]}) must have its .* bytes in memory"):
        scaled_dot_product_attention(**tensors)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize(
    "convert",
    [Tensor.to_sparse, Tensor.to_mkldnn, lambda x: torch.nested.nested_tensor(list(x))],
    ids=["sparse", "onednn", "nested"],
)
def test_a_layout_without_strides_after_a_dense_one(convert: Callable[[Tensor], Tensor], place: int) -> None:
    tensors = [draw(), draw(), draw()]
    scaled_dot_product_attention(*tensors)
    tensors[place] = convert(tensors[place])
    with pytest.raises(InputError, match="be a dense"):
        scaled_dot_product_attention(*tensors)


def test_dropout_after_a_call_without() -> None:
    q, k, v = draw(), draw(), draw()
    without = scaled_dot_product_attention(q, k, v)
    assert not torch.equal(scaled_dot_product_attention(q, k, v, dropout_p=0.5), without)

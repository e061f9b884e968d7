"""Repeated calls of the operator of compiled graphs run what an earlier one has prepared, and give the same results."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import undivided
from undivided import masks
from undivided.errors import InputError
from undivided.masks import _kept
from undivided.run import compile, repeated_operator

pytestmark = pytest.mark.skipif(
    undivided.explain(*(torch.zeros(1, 1, 1, 16),) * 3, layout="bhsd").backend.name != "native",
    reason="the native kernel is not built",
)


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The calls that were prepared; what earlier tests have kept is forgotten."""
    seen: list[object] = []

    def spied(args: Any) -> Any:
        seen.append(args)
        return prepare(args)

    prepare = compile._prepare
    monkeypatch.setattr(compile, "_prepare", spied)
    repeated_operator._calls.clear()
    return seen


@pytest.fixture(autouse=True)
def _forget_graphs() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def draw(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*(sizes or (2, 9, 4, 16))).to(dtype)


def formula(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None = None, bias: Tensor | float = 0.0) -> Tensor:
    q, k, v = (t.transpose(1, 2).double() for t in (q, k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5 + bias
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


CAUSAL = torch.ones(9, 9, dtype=torch.bool).tril()
CALLS: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
    "plain": (lambda q, k, v: undivided.attention(q, k, v, layout="bshd"), formula),
    "causal": (
        lambda q, k, v: undivided.attention(q, k, v, layout="bshd", mask=masks.causal()),
        lambda q, k, v: formula(q, k, v, CAUSAL),
    ),
    "window": (
        lambda q, k, v: undivided.attention(q, k, v, layout="bshd", mask=masks.window(2, 0)),
        lambda q, k, v: formula(q, k, v, CAUSAL & ~CAUSAL.tril(-3)),
    ),
    "scale": (
        lambda q, k, v: undivided.attention(q, k, v, layout="bshd", scale=0.5),
        lambda q, k, v: formula(q * 0.5 * q.shape[-1] ** 0.5, k, v),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CALLS)
def test_other_tensors(name: str, dtype: torch.dtype, prepared: list[object]) -> None:
    function, expected = CALLS[name]
    compiled = torch.compile(function, backend="eager", fullgraph=True)
    for _ in range(3):
        q, k, v = (draw(dtype=dtype) for _ in range(3))
        with torch.no_grad():
            found = compiled(q, k, v)
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(found.double(), expected(q, k, v), rtol=tolerance, atol=tolerance)
        assert found.is_contiguous()
        assert found.dtype == dtype
    assert len(prepared) == 1


def test_a_bias_is_read_in_each_call(prepared: list[object]) -> None:
    compiled = torch.compile(
        lambda q, k, v, bias: undivided.attention(q, k, v, layout="bshd", bias=bias), backend="eager"
    )
    bias = draw(9, 9)
    for _ in range(3):
        q, k, v = draw(), draw(), draw()
        torch.testing.assert_close(
            compiled(q, k, v, bias).double(), formula(q, k, v, bias=bias.double()), rtol=1e-5, atol=1e-5
        )
        bias.normal_()
    assert len(prepared) == 1


@pytest.mark.parametrize("function", [masks.dense, lambda allowed: masks.dense(allowed) & masks.causal()])
def test_a_small_mask_is_read_anew_if_it_changes(function: Callable[[Tensor], Any], prepared: list[object]) -> None:
    compiled = torch.compile(
        lambda q, k, v, allowed: undivided.attention(q, k, v, layout="bshd", mask=function(allowed)), backend="eager"
    )
    allowed = torch.rand(1, 1, 9, 9) < 0.6
    allowed[..., 0] = True
    for count in (2, 4, 6):
        for _ in range(4):
            q, k, v = draw(), draw(), draw()
            expected = formula(q, k, v, allowed if function is masks.dense else allowed & CAUSAL)
            torch.testing.assert_close(compiled(q, k, v, allowed).double(), expected, rtol=1e-5, atol=1e-5)
        assert len(prepared) == count
        allowed[0, 0, 3, 1 + count] = ~allowed[0, 0, 3, 1 + count]


def test_calls_go_with_the_mask(prepared: list[object]) -> None:
    compiled = torch.compile(
        lambda q, k, v, allowed: undivided.attention(q, k, v, layout="bshd", mask=masks.dense(allowed)), backend="eager"
    )
    _kept._recent.clear()
    allowed = torch.ones(1, 1, 9, 9, dtype=torch.bool)
    for _ in range(3):
        compiled(draw(), draw(), draw(), allowed)
    assert len(prepared) == 2
    prepared.clear()
    (mask,) = [mask for _, _, mask in _kept._recent.values() if mask.kinds == {"dense"}]
    calls = weakref.ref(mask.cached("calls of the operator", dict))
    gc.collect()
    gc.disable()
    try:
        _kept._recent.clear()
        del mask
        assert calls() is None
    finally:
        gc.enable()


def test_lengths_that_change(prepared: list[object]) -> None:
    compiled = torch.compile(
        lambda q, k, v, n: undivided.attention(q, k, v, layout="bshd", mask=masks.lengths(kv=n)), backend="eager"
    )
    lengths = torch.tensor([4, 9])
    for step in range(3):
        for _ in range(4):
            q, k, v = draw(), draw(), draw()
            allowed = (torch.arange(9) < lengths[:, None])[:, None, None]
            torch.testing.assert_close(
                compiled(q, k, v, lengths).double(), formula(q, k, v, allowed), rtol=1e-5, atol=1e-5
            )
        assert len(prepared) == 2 * (step + 1)
        lengths[0] += 1


def test_sizes_and_strides_that_differ_are_prepared(prepared: list[object]) -> None:
    compiled = torch.compile(CALLS["causal"][0], backend="eager", dynamic=True)
    for length in (9, 7, 9, 7):
        q, k, v = (draw(2, length, 4, 16) for _ in range(3))
        torch.testing.assert_close(
            compiled(q, k, v).double(), formula(q, k, v, CAUSAL[:length, :length]), rtol=1e-5, atol=1e-5
        )
        k = draw(2, 4, length, 16).transpose(1, 2)
        torch.testing.assert_close(
            compiled(q, k, v).double(), formula(q, k, v, CAUSAL[:length, :length]), rtol=1e-5, atol=1e-5
        )
    assert len(prepared) == 4


def test_a_policy_that_changes_takes_effect() -> None:
    compiled = torch.compile(CALLS["plain"][0], backend="eager")
    q, k, v = draw(), draw(), draw()
    for name in ("native", "reference", "native", "torch_flash"):
        for _ in range(2):
            with undivided.use_backends(name):
                torch.testing.assert_close(compiled(q, k, v).double(), formula(q, k, v), rtol=1e-5, atol=1e-5)
            decision = undivided.last_decision()
            assert decision is not None
            assert decision.backend.name == name


def test_autocast_and_gradients_after_a_plain_call() -> None:
    compiled = torch.compile(CALLS["plain"][0], backend="aot_eager")
    q, k, v = draw(), draw(), draw()
    for _ in range(2):
        compiled(q, k, v)
    with torch.autocast("cpu", torch.bfloat16):
        found = compiled(q, k, v)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), formula(q, k, v), rtol=2e-2, atol=2e-2)
    leaf = v.clone().requires_grad_()
    for _ in range(2):
        (gradient,) = torch.autograd.grad(compiled(q, k, leaf).sum(), leaf)
        torch.testing.assert_close(gradient.sum(1), torch.full((2, 4, 16), 9.0))


def test_a_tensor_that_lost_its_memory() -> None:
    compiled = torch.compile(CALLS["plain"][0], backend="eager")
    q, k, v = draw(), draw(), draw()
    for _ in range(2):
        compiled(q, k, v)
    k.untyped_storage().resize_(8)
    with pytest.raises(InputError, match="memory"):
        compiled(q, k, v)

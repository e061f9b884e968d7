"""`undivided.scaled_dot_product_attention` is PyTorch's: the same results and gradients, its switches, and clear
errors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sdpa_calls import BFLOAT, DOUBLE, HALF, SHAPES, SINGLE, Case, math, ours, qkv
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from undivided.errors import InputError

# torch's own forward mode scripts its decompositions when it is first used


def outputs(function: Callable[..., Tensor], case: Case, dtype: torch.dtype) -> list[Tensor]:
    """The result and the gradients of everything that has one, computed in `dtype`."""
    inputs = [t if t.dtype == torch.bool else t.to(dtype) for t in case.inputs()]
    if case.mask_kind == "float32" and dtype == case.dtype:
        inputs[3:] = [mask.to(SINGLE) for mask in inputs[3:]]
    leaves = [t.requires_grad_() for t in inputs if t.is_floating_point()]
    out = function(*inputs, **case.options)
    gradients = torch.autograd.grad(out, leaves, upstream(out, case).to(out.dtype))
    return [out.detach(), *gradients]


def upstream(out: Tensor, case: Case) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(out.shape, generator=generator, dtype=DOUBLE).to(case.dtype)


ROUNDINGS = {HALF: 1, BFLOAT: 1, SINGLE: 16, DOUBLE: 16}
"""Half types: of the result. Others: the handful of sums, products and an exp that any order of operations has."""


def assert_is_pytorchs(case: Case, reference: Callable[..., Tensor] = math) -> None:
    """Our error against float64 is at most twice PyTorch's own in this dtype plus a few roundings.

    Relative to the norm of the result; to that of the incoming gradient where everything cancels (a single key, say).
    """
    truth = outputs(reference, case, DOUBLE)
    floor = upstream(truth[0], case).double().norm()
    for exact, mine, theirs in zip(
        truth, outputs(ours, case, case.dtype), outputs(reference, case, case.dtype), strict=True
    ):
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
        rounding = ROUNDINGS[case.dtype] * torch.finfo(case.dtype).eps * max(exact.norm(), floor)
        assert (mine - exact).norm() <= 2 * (theirs - exact).norm() + rounding, case


@pytest.mark.parametrize("dtype", [HALF, BFLOAT, SINGLE, DOUBLE], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["every-pair", "causal"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_rank_and_broadcast(shape: Case, causal: bool, dtype: torch.dtype) -> None:
    assert_is_pytorchs(replace(shape, dtype=dtype, is_causal=causal))


MASKS = [(), (7,), (5, 7), (1, 7), (5, 1), (1, 1), (3, 5, 7), (1, 5, 7), (2, 3, 5, 7), (2, 1, 5, 7), (2, 1, 1, 7)]


@pytest.mark.parametrize("kind", ["bool", "with -inf", "added", "float32"])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_every_rank_of_mask(mask: tuple[int, ...], kind: str) -> None:
    assert_is_pytorchs(replace(SHAPES["4d"], mask=mask, mask_kind=kind))


IN_FIVE = [(2, 3, 2, 3, 5), (1, 1, 2, 3, 5), (2, 1, 1, 3, 5), (1, 3, 2, 1, 5), (3, 1, 3, 5), (2, 3, 5), (3, 5), (5,)]


@pytest.mark.parametrize("kind", ["bool", "added"])
@pytest.mark.parametrize("mask", IN_FIVE, ids=str)
def test_every_rank_of_mask_in_five_dimensions(mask: tuple[int, ...], kind: str) -> None:
    assert_is_pytorchs(replace(SHAPES["5d"], mask=mask, mask_kind=kind))


def joined(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **options: Any) -> Tensor:
    """PyTorch's definition with the causal part joined to the mask by hand."""
    causal = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
    both = mask & causal if mask.dtype == torch.bool else mask.masked_fill(~causal, -torch.inf)
    return math(query, key, value, both, **{**options, "is_causal": False})


@pytest.mark.parametrize("kind", ["bool", "with -inf", "added", "float32"])
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("shape", ["4d", "gqa", "3d"])
def test_a_mask_and_is_causal_both_apply(shape: str, mask: tuple[int, ...], kind: str) -> None:
    """PyTorch's CPU kernel accepts both up to 2.13, and programs rely on it: here every dtype and rank is tested, with
    gradients."""
    case = SHAPES[shape]
    heads, q_len, kv_len = case.query[-3], case.query[-2], case.key[-2]
    sizes = (case.query[0], heads, q_len, kv_len)[-len(mask) :] if mask else ()
    fitting = tuple(1 if n == 1 else size for n, size in zip(mask, sizes, strict=True))
    if shape == "3d":
        fitting = fitting[-3:]
    # joining rounds the gradient of a float32 mask once more
    for dtype in (SINGLE, BFLOAT) if kind == "float32" else (SINGLE, BFLOAT, DOUBLE):
        assert_is_pytorchs(replace(case, mask=fitting, mask_kind=kind, dtype=dtype, is_causal=True), reference=joined)


@pytest.mark.parametrize("dtype", [HALF, BFLOAT, SINGLE, DOUBLE], ids=str)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_mask_and_is_causal_equal_pytorchs_kernel(kind: str, dtype: torch.dtype) -> None:
    q, k, v = qkv(grad=True, dtype=dtype)
    mask = torch.rand(3, 5) < 0.6
    mask[:, 0] = True
    if kind == "float":
        mask = torch.randn(3, 5).masked_fill(~mask, -torch.inf).to(dtype)
    mine, theirs = ours(q, k, v, mask, is_causal=True), joined(q, k, v, mask)
    with contextlib.suppress(RuntimeError):  # PyTorch 2.15 refuses both
        theirs = F.scaled_dot_product_attention(q, k, v, mask, is_causal=True)
    up = torch.randn_like(mine)
    found, expected = (torch.autograd.grad(out, (q, k, v), up) for out in (mine, theirs))
    tolerance = 4 * torch.finfo(dtype).eps
    for a, b in zip((mine, *found), (theirs, *expected), strict=True):
        assert (a - b).double().norm() <= tolerance * max(b.double().norm(), up.double().norm())


def test_a_mask_and_is_causal_are_an_error_if_only_the_math_kernel_is_allowed() -> None:
    """As in PyTorch, whose math kernel takes one of them."""
    q, k, v = qkv()
    mask = torch.ones(3, 5, dtype=torch.bool)
    with sdpa_kernel(SDPBackend.MATH):
        for function in (F.scaled_dot_product_attention, ours):
            with pytest.raises(RuntimeError, match="Explicit attn_mask should not be set when is_causal=True"):
                function(q, k, v, mask, is_causal=True)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any call that PyTorch's definition takes: shapes that broadcast, fewer heads, masks that broadcast, and the
    rest."""
    common = draw(st.lists(st.integers(1, 3), max_size=3))
    q_len, kv_len, size, value_size = (draw(st.integers(1, most)) for most in (9, 11, 9, 9))
    grouped = draw(st.booleans()) and len(common) > 0
    heads = ([draw(st.sampled_from([1, 2, 6]))], [draw(st.sampled_from([1, 2]))]) if grouped else ([], [])
    if grouped:
        heads = ([6], heads[1])
        common = common[:-1]

    def some(shape: list[int]) -> list[int]:
        kept = [draw(st.sampled_from([n, n, 1])) for n in shape]
        return kept[draw(st.integers(0, len(kept))) :] if draw(st.booleans()) else kept

    query, key, value = some(common), some(common), some(common)
    scores = [*torch.broadcast_shapes(query, key), *heads[0], q_len, kv_len]
    case = Case(
        (*query, *heads[0], q_len, size),
        (*key, *heads[1], kv_len, size),
        (*value, *heads[1], kv_len, value_size),
        dtype=draw(st.sampled_from([HALF, BFLOAT, SINGLE, DOUBLE])),
        scale=draw(st.sampled_from([None, 0.3, -0.5])),
        enable_gqa=grouped,
    )
    kind = draw(st.sampled_from(["none", "causal", "bool", "with -inf", "added", "float32"]))
    if kind in ("none", "causal"):
        return replace(case, is_causal=kind == "causal")
    return replace(case, mask=tuple(some(scores)), mask_kind=kind)


@pytest.mark.parametrize("examples", [250, pytest.param(600, marks=pytest.mark.slow)])
def test_any_call(examples: int) -> None:
    @settings(max_examples=examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(cases())
    def check(case: Case) -> None:
        assert_is_pytorchs(case)

    check()


QUERIES: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: torch.randn(2, 4, 5, 8),
    "batch-first": lambda: torch.randn(2, 5, 4, 8).transpose(1, 2),
    "sequence-first": lambda: torch.randn(5, 2, 4, 8).permute(1, 2, 0, 3),
    "part-of-a-projection": lambda: torch.randn(2, 5, 3, 4, 8).permute(2, 0, 3, 1, 4)[0],
    "rows-of-a-longer-one": lambda: torch.randn(2, 9, 4, 8).transpose(1, 2)[:, :, :5],
    "columns-first": lambda: torch.randn(2, 4, 8, 5).transpose(2, 3),
    "channels-last": lambda: torch.randn(2, 4, 5, 8).to(memory_format=torch.channels_last),
    "one-batch-element": lambda: torch.randn(1, 5, 4, 8).transpose(1, 2),
    "one-head": lambda: torch.randn(2, 5, 1, 8).transpose(1, 2),
    "sequence-first-and-one-head": lambda: torch.randn(5, 2, 1, 8).permute(1, 2, 0, 3),
    "one-row": lambda: torch.randn(2, 1, 4, 8).transpose(1, 2),
    "the-same-for-every-head": lambda: torch.randn(2, 1, 5, 8).expand(2, 4, 5, 8),
    "the-same-for-every-batch-element": lambda: torch.randn(5, 4, 8).transpose(0, 1).expand(2, 4, 5, 8),
}


@pytest.mark.parametrize("masked", [False, True], ids=["every-pair", "masked"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("query", QUERIES.values(), ids=QUERIES)
def test_the_result_lies_in_memory_as_pytorchs(query: Callable[[], Tensor], compiled: bool, masked: bool) -> None:
    """So ``out.transpose(1, 2).view(...)`` works where it does with PyTorch's, and nothing is copied."""
    torch._dynamo.reset()
    q = query().requires_grad_()
    k, v = (torch.randn(*q.shape[:2], 7, 8, requires_grad=True) for _ in range(2))
    mask = torch.rand(q.shape[0], 1, q.shape[2], 7) < 0.7 if masked else None
    function = torch.compile(ours, backend="aot_eager", fullgraph=True) if compiled else ours
    mine, theirs = function(q, k, v, mask), F.scaled_dot_product_attention(q, k, v, mask)
    torch.testing.assert_close(mine, theirs)
    axes = [n for n, size in enumerate(q.shape) if size > 1]
    assert [mine.stride(n) for n in axes] == [theirs.stride(n) for n in axes]
    grad = torch.randn_like(mine)
    gradients = torch.autograd.grad(mine, (q, k, v), grad), torch.autograd.grad(theirs, (q, k, v), grad)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("number", [False, True], ids=["bool", "-inf"])
def test_a_row_without_a_key_is_zero_and_has_no_gradient(number: bool) -> None:
    q, k, v = qkv(grad=True)
    mask = torch.ones(3, 5, dtype=torch.bool)
    mask[1] = False
    out = ours(q, k, v, torch.zeros(3, 5).masked_fill(~mask, -torch.inf) if number else mask)
    out.sum().backward()
    assert (out[:, :, 1] == 0).all()
    assert (out[:, :, 0] != 0).all()
    assert (q.grad[:, :, 1] == 0).all()
    assert q.grad.isfinite().all()


def test_what_a_boolean_mask_hides_may_be_nan() -> None:
    """PyTorch's result would be NaN: it multiplies what it masks."""
    q, k, v = qkv()
    mask = torch.tensor([True, True, True, False, False])
    clean = ours(q, k, v, mask)
    k[:, :, 3:], v[:, :, 3:] = torch.nan, torch.inf
    assert torch.equal(ours(q, k, v, mask), clean)
    assert math(q, k, v, mask).isnan().any()


def test_a_boolean_mask_is_read_again_at_every_call() -> None:
    q, k, v = qkv()
    mask = torch.ones(3, 5, dtype=torch.bool)
    ours(q, k, v, mask)
    mask[:, 2:] = False
    torch.testing.assert_close(ours(q, k, v, mask), math(q, k, v, mask))


@pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs")  # it gives zeros
@pytest.mark.parametrize("bias", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize(("q_len", "kv_len"), [(3, 5), (5, 3), (4, 4)])
def test_causal_biases_of_pytorch_are_structure(bias: Callable[..., Any], q_len: int, kv_len: int) -> None:
    q, k, v = torch.randn(1, 2, q_len, 8), torch.randn(1, 2, kv_len, 8), torch.randn(1, 2, kv_len, 8)
    diagonal = kv_len - q_len if bias is causal_lower_right else 0
    dense = torch.ones(q_len, kv_len, dtype=torch.bool).tril(diagonal)
    torch.testing.assert_close(ours(q, k, v, bias(q_len, kv_len)), math(q, k, v, dense))
    with pytest.raises(InputError, match=r"attn_mask must be for \d queries and \d keys"):
        ours(q, k, v, bias(q_len, kv_len + 1))


def weights(p: float, seed: int = 0) -> Tensor:
    """Attention weights after dropout, [2, 3, 64, 256], where all of them were 1/256."""
    torch.manual_seed(seed)
    q, k = torch.zeros(2, 3, 64, 8), torch.zeros(2, 3, 256, 8)
    return 256 * ours(q, k, torch.eye(256).expand(2, 3, 256, 256), dropout_p=p)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_drops_at_its_rate_and_scales_the_rest(p: float) -> None:
    found = weights(p)
    rate = (found == 0).double().mean().item()
    assert abs(rate - p) < 4 * (p * (1 - p) / found.numel()) ** 0.5 + 2**-16
    kept = found[found != 0]
    torch.testing.assert_close(kept, torch.full_like(kept, 1 / (1 - p)), rtol=1e-3, atol=0)


def test_dropout_follows_torchs_generator_and_is_always_applied() -> None:
    assert torch.equal(weights(0.5), weights(0.5))
    assert not torch.equal(weights(0.5), weights(0.5, seed=1))
    with torch.no_grad(), torch.inference_mode():
        assert (weights(0.5) == 0).any()
    assert (weights(1.0) == 0).all()

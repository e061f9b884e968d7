"""The thirteen rules of attention, each compared with the definition in `brute_force`: outputs and gradients.

Everything is compared in float64 unless precision is what the test is about, with errors relative to the result's norm.
"""

from __future__ import annotations

import math

import brute_force
import pytest
import torch
import torch.nn.functional as F
from brute_force import causal, error
from semantics_inputs import BACKENDS, EXACT, NAN, assert_defined, qkv, random

import undivided
from undivided import InputError, masks

EXTRAS = {
    "scale": 0.7,
    "softcap": 1.5,
    "bias": random(2, 2, 5, 5, seed=4),
    "alibi_slopes": random(2, seed=5).abs(),
    "sinks": random(2, seed=6),
    "dropout": 0.3,
}


@pytest.mark.parametrize("left_out", [None, *EXTRAS], ids=lambda name: f"without-{name}" if name else "all-at-once")
def test_scores_are_scaled_capped_biased_masked_normalised_and_dropped_in_this_order(left_out: str | None) -> None:
    features = {name: value for name, value in EXTRAS.items() if name != left_out}
    if "dropout" in features:
        del features["dropout"]
        features |= {"dropout_p": 0.3, "dropout_seed": 7}
    assert_defined(qkv(), masks.causal(), None, [causal()], **features)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", BACKENDS)
def test_scale_is_one_over_the_root_of_the_query_head_size_unless_given(backend: str) -> None:
    assert_defined(qkv(dim=9), backend=backend)
    assert_defined(qkv(dim=9), backend=backend, scale=0.05)
    assert_defined(qkv(dim=9), backend=backend, scale=-0.5)


def test_the_default_scale_follows_the_head_size_of_keys_not_of_values() -> None:
    assert_defined(qkv(dim=4, v_dim=7))


@pytest.mark.parametrize("backend", BACKENDS)
def test_bias_is_added_unscaled_wherever_it_is_broadcast(backend: str) -> None:
    for shape in ((2, 2, 5, 5), (1, 2, 5, 5), (2, 1, 1, 5), (1, 1, 5, 1), (5, 5), (5,), ()):
        assert_defined(qkv(), backend=backend, bias=random(*shape, seed=4), scale=0.25)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_half_types_round_only_the_probabilities_and_the_result(backend: str, dtype: torch.dtype) -> None:
    x = [random(1, 2, 70, 16, seed=s).mul(3 if s < 3 else 1).to(dtype) for s in (1, 2, 3)]  # sharp rows: scores near 40
    q, k, v = (t.double() for t in x)
    weights = torch.softmax(q @ k.transpose(-1, -2) / 4, -1)
    exact = weights @ v
    permitted = error((weights.to(dtype).double() @ v).to(dtype), exact)
    out = undivided.attention(*x, layout="bhsd", backend=backend)
    assert out.dtype == dtype
    assert error(out, exact) < 1.5 * permitted
    if backend == "reference":
        assert error(out, exact) < 1.05 * error(exact.to(dtype), exact), "the reference rounds the result alone"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
def test_reference_gradients_are_the_exact_ones_rounded_once(dtype: torch.dtype) -> None:
    x = [random(1, 4, 40, 16, seed=s).to(dtype).requires_grad_() for s in (1, 2, 3)]
    exact = [t.detach().double().requires_grad_() for t in x]
    cotangent = random(1, 4, 40, 16, seed=9).to(dtype)
    out = undivided.attention(*x, layout="bhsd", backend="reference")
    want = torch.softmax(exact[0] @ exact[1].transpose(-1, -2) / 4, -1) @ exact[2]
    got = torch.autograd.grad(out, x, cotangent)
    for name, a, b in zip("qkv", got, torch.autograd.grad(want, exact, cotangent.double()), strict=True):
        assert a.dtype == dtype
        assert error(a, b) < 1.1 * error(b.to(dtype), b) + 1e-6, name


@pytest.mark.parametrize("backend", BACKENDS)
def test_fp64_is_computed_in_fp64_lse_included(backend: str) -> None:
    assert_defined(qkv(), backend=backend)
    _, lse = undivided.attention(*qkv(), layout="bhsd", backend=backend, return_lse=True)
    assert lse.dtype == torch.float64
    assert error(lse, brute_force.attend(*qkv())[1]) < EXACT


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_lse_of_lower_precisions_is_fp32_and_unrounded(backend: str, dtype: torch.dtype) -> None:
    x = [t.to(dtype) for t in qkv(dim=16)]
    _, lse = undivided.attention(*x, layout="bhsd", backend=backend, return_lse=True)
    assert lse.dtype == torch.float32
    assert error(lse, brute_force.attend(*(t.double() for t in x))[1]) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=["fp32", "fp64", "fp16"])
def test_autocast_casts_as_sdpa_does(dtype: torch.dtype) -> None:
    q, k, v = (t.to(dtype) for t in qkv())
    with torch.autocast("cpu", torch.bfloat16):
        want = F.scaled_dot_product_attention(q, k, v)
        out = undivided.attention(q, k, v, layout="bhsd", backend="reference")
    assert out.dtype == want.dtype
    low = [t.to(want.dtype) for t in (q, k, v)]
    assert torch.equal(out, undivided.attention(*low, layout="bhsd", backend="reference"))


def test_autocast_accepts_different_dtypes_and_each_gradient_has_its_inputs_dtype() -> None:
    q, k, v = qkv()
    q, k, v = q.float().requires_grad_(), k.bfloat16().requires_grad_(), v.float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = undivided.attention(q, k, v, layout="bhsd")
    out.float().sum().backward()
    assert [t.grad.dtype for t in (q, k, v) if t.grad is not None] == [torch.float32, torch.bfloat16, torch.float32]


def test_different_dtypes_are_an_error_without_autocast() -> None:
    q, k, v = qkv()
    with pytest.raises(InputError, match="k must have the dtype of q"):
        undivided.attention(q, k.float(), v, layout="bhsd")


EMPTY_ROWS = masks.dense(torch.tensor([[True, False, True, True], [False] * 4, [True, True, False, True]]))


def not_the_second(b: int, h: int, i: int, j: int) -> bool:
    return bool(EMPTY_ROWS.tensors[0][0, 0, i, j])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_without_keys_gives_zero_and_zero_gradients(backend: str) -> None:
    x = qkv(q_len=3, kv_len=4)
    assert_defined(x, EMPTY_ROWS, condition=not_the_second, backend=backend)
    q = x[0].clone().requires_grad_()
    out, lse = undivided.attention(q, *x[1:], layout="bhsd", mask=EMPTY_ROWS, return_lse=True)
    assert bool((out[:, :, 1] == 0).all())
    assert bool((lse[:, :, 1] == -math.inf).all())
    (grad,) = torch.autograd.grad(out.sum(), q)
    assert bool((grad[:, :, 1] == 0).all())


def test_empty_rows_stay_zero_with_sinks_bias_and_dropout() -> None:
    assert_defined(
        qkv(q_len=3, kv_len=4),
        EMPTY_ROWS,
        condition=not_the_second,
        sinks=random(2, seed=6),
        bias=random(3, 4, seed=4),
        dropout_p=0.5,
        dropout_seed=3,
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_keys_at_all_are_decided_on_the_mask_never_on_the_logits(backend: str) -> None:
    q, k, v = qkv(q_len=3, kv_len=4)
    huge = torch.full((3, 4), -1e30, dtype=torch.float64)  # the smallest scores that are still scores
    out, lse = undivided.attention(q, k, v, layout="bhsd", bias=huge, backend=backend, return_lse=True)
    assert error(out, v.mean(2, keepdim=True).expand_as(out)) < EXACT
    assert bool((lse < -1e29).all())
    assert bool(lse.isfinite().all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bias_of_minus_infinity_is_a_masked_key(backend: str) -> None:
    bias = random(2, 2, 3, 4, seed=4)
    bias[:, :, 1] = -math.inf
    bias[0, :, 2, 1:3] = -math.inf
    assert_defined(qkv(q_len=3, kv_len=4), bias=bias, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bias_of_minus_infinity_hides_poison(backend: str) -> None:
    q, k, v = qkv(q_len=3, kv_len=4)
    bias = random(3, 4, seed=4)
    bias[:, 2] = -math.inf
    clean = undivided.attention(q, k, v, layout="bhsd", bias=bias, backend=backend)
    k[:, :, 2], v[:, :, 2] = NAN, NAN
    assert torch.equal(clean, undivided.attention(q, k, v, layout="bhsd", bias=bias, backend=backend))


def test_lse_does_not_include_sinks() -> None:
    x = qkv()
    _, without = undivided.attention(*x, layout="bhsd", return_lse=True)
    out, lse = undivided.attention(*x, layout="bhsd", sinks=random(2, seed=6), return_lse=True)
    assert error(lse, without) < EXACT
    whole_out = undivided.attention(*x, layout="bhsd")
    factor = torch.sigmoid(without - random(2, seed=6)[:, None])
    assert error(out, whole_out * factor.unsqueeze(-1)) < EXACT


@pytest.mark.parametrize("sizes", [(0, 3), (3, 0), (0, 0)], ids=["no-queries", "no-keys", "neither"])
def test_empty_sequences_are_rows_without_keys(sizes: tuple[int, int]) -> None:
    q, k, v = (t.requires_grad_() for t in qkv(q_len=sizes[0], kv_len=sizes[1]))
    out, lse = undivided.attention(q, k, v, layout="bhsd", return_lse=True)
    assert out.shape == q.shape
    assert bool((out == 0).all())
    assert bool((lse == -math.inf).all())
    for grad, t in zip(torch.autograd.grad(out.sum(), (q, k, v)), (q, k, v), strict=True):
        assert grad.shape == t.shape
        assert bool((grad == 0).all())

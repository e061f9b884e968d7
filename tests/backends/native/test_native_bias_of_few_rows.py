"""Masks and biases of few rows, which the native kernel reads row by row: decoding, and heads of few rows and keys."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import levels
import pytest
import torch
from native_oracle import ALLOWED, agree, apart, needs_library, oracle
from torch import Tensor

import undivided
from undivided import masks

pytestmark = needs_library

# (B, H, N, Sq, Sk, D): one row per key head, several heads per key head, drafts, chunks of keys, small heads
SIZES = {
    "one-row": (2, 4, 4, 1, 200, 64),
    "group-of-four": (3, 8, 2, 1, 1111, 128),
    "draft": (2, 4, 2, 3, 333, 80),
    "chunks": (1, 2, 1, 1, 9000, 32),
    "small": (2, 4, 2, 9, 14, 32),
    "small-odd": (2, 2, 2, 5, 31, 48),
}
# entries that are stored differently: each function gives a tensor of the same values
STORED: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: x,
    "keys-first": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "every-other-key": lambda x: torch.stack((x, x), -1)[..., 0],
    "one-per-row": lambda x: x[..., :1].expand(x.shape),
    "one-row": lambda x: x[..., :1, :].expand(x.shape),
    "unaligned": lambda x: torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape),
}
LEVELS = levels.here()
each_dtype = pytest.mark.parametrize("dtype", ALLOWED, ids=lambda dtype: str(dtype).removeprefix("torch."))


def operands(size: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    batch, heads, kv_heads, q_len, kv_len, dim = SIZES[size]
    q = torch.randn(batch, heads, q_len, dim).to(dtype)
    k, v = (torch.randn(batch, kv_heads, kv_len, dim).to(dtype) for _ in range(2))
    return q, k, v


def bias_of(size: str, heads: bool, dtype: torch.dtype) -> Tensor:
    """Random numbers; -inf for single keys, for 128 keys in a row, and for all keys of one row."""
    batch, query_heads, _, q_len, kv_len, _ = SIZES[size]
    bias = torch.randn(batch, query_heads if heads else 1, q_len, kv_len).to(dtype)
    bias[..., 1::7] = bias[..., 64:192] = bias[0, 0, 0] = -math.inf
    return bias


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("bias_dtype", ALLOWED, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("size", SIZES)
def test_a_bias_of_any_type_and_strides(size: str, bias_dtype: torch.dtype, stored: str) -> None:
    q, k, v = operands(size, torch.float32 if bias_dtype == torch.float32 else torch.bfloat16)
    bias = STORED[stored](bias_of(size, True, bias_dtype))
    out, lse = undivided.attention(q, k, v, layout="bhsd", bias=bias, return_lse=True, backend="native")
    extra = bias.double()
    agree(out, lse, *oracle(q, k, v, extra > -math.inf, lambda s: s + extra))


@each_dtype
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("size", SIZES)
def test_a_boolean_mask_of_any_strides(size: str, stored: str, dtype: torch.dtype) -> None:
    q, k, v = operands(size, dtype)
    allowed = STORED[stored](bias_of(size, False, torch.float32) > -math.inf)
    out = undivided.scaled_dot_product_attention(q, k, v, attn_mask=allowed, enable_gqa=True)
    want, _ = oracle(q, k, v, allowed)
    assert apart(out, want) < ALLOWED[dtype]


@each_dtype
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("level", LEVELS)
def test_every_level_adds_bias_slopes_softcap_and_sinks(level: str, size: str, dtype: torch.dtype) -> None:
    q, k, v = operands(size, dtype)
    heads = SIZES[size][1]
    given: dict[str, Any] = {
        "mask": masks.causal("bottom_right") & masks.dense(bias_of(size, False, torch.float32) > -math.inf),
        "bias": bias_of(size, True, dtype).nan_to_num(neginf=2.0),
        "alibi_slopes": torch.rand(heads),
        "softcap": 3.0,
        "sinks": torch.randn(heads),
        "layout": "bhsd",
    }
    with levels.running(level, threads=2):
        out = undivided.attention(q, k, v, backend="native", **given)
    want = undivided.attention(q.double(), k.double(), v.double(), backend="reference", **given)
    assert apart(out, want) < ALLOWED[dtype]


@each_dtype
@pytest.mark.parametrize("kind", ["mask", "bias"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("level", LEVELS)
def test_keys_that_a_mask_or_a_bias_hides_may_hold_anything(
    level: str, size: str, kind: str, dtype: torch.dtype
) -> None:
    """NaN and infinities in keys that no row sees, and in keys that only the last row of a batch element sees."""
    q, k, v = operands(size, dtype)
    bias = bias_of(size, False, dtype)
    bias[:, :, :, 3], bias[:, :, -1, 3] = -math.inf, 0.0
    bias[0, 0, 0] = -math.inf
    hidden = (bias == -math.inf).all(-2)[:, 0, None, :, None]
    k, v = (x.masked_fill(hidden, value) for x, value in ((k, math.nan), (v, -math.inf)))
    if SIZES[size][3] > 1:
        v[:, :, 3] = math.inf
    given: dict[str, Any] = {"mask": masks.dense(bias > -math.inf)} if kind == "mask" else {"bias": bias}
    with levels.running(level, threads=1):
        out = undivided.attention(q, k, v, layout="bhsd", backend="native", **given)
    want = undivided.attention(q.double(), k.double(), v.double(), layout="bhsd", backend="reference", **given)
    assert torch.equal(out.isinf(), want.isinf())
    assert torch.equal(out.isnan(), want.isnan())
    finite = want.isfinite()
    assert apart(out[finite], want[finite]) < ALLOWED[dtype]


@each_dtype
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("level", LEVELS)
def test_gradients_of_small_heads_under_a_mask_and_a_bias(level: str, stored: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(2, heads, 45, 32).to(dtype) for heads in (4, 2, 2, 4))
    bias = torch.randn(2, 4, 45, 45)
    bias[..., 1::7] = bias[0, 0, 0] = -math.inf
    given: dict[str, Any] = {
        "mask": masks.causal() & masks.dense(STORED[stored](torch.rand(2, 1, 45, 45) < 0.8)),
        "bias": STORED[stored](bias),
        "alibi_slopes": torch.rand(4),
        "layout": "bhsd",
    }

    def gradients(backend: str, of: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [x.to(of).requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(undivided.attention(*leaves, backend=backend, **given), leaves, grad.to(of))

    with levels.running(level, threads=1):
        found = gradients("native", dtype)
    allowed = 3 * ALLOWED[dtype]
    for x, want in zip(found, gradients("reference", torch.float64), strict=True):
        assert apart(x, want) < allowed

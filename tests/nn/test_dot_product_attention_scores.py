"""Scores of DotProductAttention: formats, scale, biases, ALiBi, softmax types, the largest score, dropout."""

from __future__ import annotations

import itertools
from typing import Any

import brute_force
import pytest
import torch
from torch import Tensor

import undivided
from undivided import DotProductAttention, masks
from undivided.request.slopes import usual_slopes

H, G, D = 4, 2, 8


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def cu(*lengths: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype)


def doubles(sq: int, skv: int, d_v: int = D, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of brute force, [B, H, S, D]."""
    sizes = ((H, sq, D), (G, skv, D), (G, skv, d_v))
    q, k, v = (torch.randn(batch, *size, dtype=torch.float64) for size in sizes)
    return q, k, v


def bshd(*tensors: Tensor) -> list[Tensor]:
    return [t.transpose(1, 2) for t in tensors]


def flat(out_BHSD: Tensor) -> Tensor:
    return out_BHSD.transpose(1, 2).flatten(-2)


@pytest.mark.parametrize("format", ["bshd", "sbhd"])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_formats_scale_and_value_size(format: str, scale: float | None) -> None:
    q, k, v = doubles(4, 6, d_v=5)
    module = DotProductAttention(
        H, (D, 5), G, qkv_format=format, attn_mask_type="causal_bottom_right", softmax_scale=scale
    )
    inputs = bshd(q, k, v)
    inputs = inputs if format == "bshd" else [t.transpose(0, 1) for t in inputs]
    out = module(*inputs)
    want, _ = brute_force.attend(q, k, v, rules=[brute_force.causal("bottom_right")], scale=scale)
    assert out.shape == ((2, 4, H * 5) if format == "bshd" else (4, 2, H * 5))
    assert out.is_contiguous()
    torch.testing.assert_close(out if format == "bshd" else out.transpose(0, 1), flat(want))


SHAPES = [(2, H, 4, 6), (1, H, 4, 6), (2, 1, 4, 6), (1, 1, 4, 6), (1, 1, 1, 6)]


@pytest.mark.parametrize("shape", SHAPES, ids=["bhss", "1hss", "b1ss", "11ss", "111s"])
@pytest.mark.parametrize("kind", ["pre_scale_bias", "post_scale_bias"])
def test_biases_of_every_shape_before_and_after_the_scale(kind: str, shape: tuple[int, ...]) -> None:
    q, k, v = doubles(4, 6)
    bias = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    module = DotProductAttention(H, D, G, qkv_format="bshd", attn_mask_type="no_mask", softmax_scale=0.2)
    out = module(*bshd(q, k, v), core_attention_bias_type=kind, core_attention_bias=bias)
    factor = 0.2 if kind == "pre_scale_bias" else 1.0
    want, _ = brute_force.attend(q, k, v, bias=bias * factor, scale=0.2)
    torch.testing.assert_close(out, flat(want))
    upstream = torch.randn_like(out)
    (got,), (should,) = (torch.autograd.grad(o, bias, upstream) for o in (out, flat(want)))
    torch.testing.assert_close(got, should)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_bias_before_the_scale_is_not_rounded_again(dtype: torch.dtype) -> None:
    """Its product with the scale was: with large biases six times the error of a result that is rounded once."""
    q, k, v = (t.to(dtype) for t in doubles(4, 6))
    bias = (40 * torch.randn(1, H, 4, 6)).to(dtype).requires_grad_()
    module = DotProductAttention(H, D, G, qkv_format="bshd", attn_mask_type="no_mask", softmax_scale=0.3)
    out = module(*bshd(q, k, v), core_attention_bias_type="pre_scale_bias", core_attention_bias=bias)
    scaled = bias.float() * 0.3
    want = module(*bshd(q, k, v), core_attention_bias_type="post_scale_bias", core_attention_bias=scaled)
    assert torch.equal(out, want)
    assert torch.autograd.grad(out.sum(), bias)[0].dtype == dtype


def press_slopes(heads: int) -> list[float]:
    """ALiBi slopes as in the code of the paper: recursive, for powers of two and between them."""
    if heads & (heads - 1) == 0:
        start = 2 ** (-8 / heads)
        return [start * start**i for i in range(heads)]
    power = 1 << (heads.bit_length() - 1)
    return press_slopes(power) + press_slopes(2 * power)[0::2][: heads - power]


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 8, 12, 16, 20])
def test_default_alibi_slopes(heads: int) -> None:
    torch.testing.assert_close(usual_slopes(heads), torch.tensor(press_slopes(heads)))
    torch.testing.assert_close(undivided.alibi_slopes(heads), torch.tensor(press_slopes(heads)))


@pytest.mark.parametrize("slopes", [None, "h", "bh"])
@pytest.mark.parametrize("kind", ["causal", "causal_bottom_right", "no_mask"])
def test_alibi_follows_the_diagonal_of_the_mask_type(kind: str, slopes: str | None) -> None:
    q, k, v = doubles(4, 6)
    given = None if slopes is None else torch.rand((H,) if slopes == "h" else (2, H))
    module = DotProductAttention(H, D, G, qkv_format="bshd", attn_mask_type=kind)
    out = module(*bshd(q, k, v), core_attention_bias_type="alibi", alibi_slopes=given)
    align = "top_left" if kind == "causal" else "bottom_right"
    used = torch.tensor(press_slopes(H)) if given is None else given
    rules = [brute_force.causal(align)] if "causal" in kind else []
    want, _ = brute_force.attend(q, k, v, rules=rules, slopes=used.double(), align=align)
    torch.testing.assert_close(out, flat(want))


@pytest.mark.parametrize("kind", ["vanilla", "off-by-one", "learnable"])
def test_softmax_types(kind: str) -> None:
    q, k, v = doubles(5, 5)
    module = DotProductAttention(H, D, G, qkv_format="bshd", softmax_type=kind)
    sinks = {"vanilla": None, "off-by-one": torch.zeros(H, dtype=torch.float64)}.get(kind)
    if kind == "learnable":
        assert module.softmax_offset is not None
        torch.nn.init.normal_(module.softmax_offset)
        sinks = module.softmax_offset.detach().double().requires_grad_()
    else:
        assert not list(module.parameters())
    out = module(*bshd(q, k, v))
    want, _ = brute_force.attend(q, k, v, rules=[brute_force.causal()], sinks=sinks)
    torch.testing.assert_close(out, flat(want))
    if kind == "learnable":
        upstream = torch.randn_like(out)
        out.backward(upstream)
        (should,) = torch.autograd.grad(flat(want), sinks, upstream)
        torch.testing.assert_close(module.softmax_offset.grad.double(), should, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", ["plain", "bias", "alibi", "softcap", "packed", "half"])
def test_the_largest_score_of_each_head(case: str) -> None:
    q, k, v = doubles(5, 5)
    dtype = torch.bfloat16 if case == "half" else torch.float64
    inputs = [t.to(dtype) for t in bshd(q, k, v)]
    q, k = (t.to(dtype).double() for t in (q, k))
    module = DotProductAttention(
        H, D, G, qkv_format="bshd", return_max_logit=True, softcap=1.5 if case == "softcap" else None
    )
    scores = torch.einsum("bhid,bhjd->bhij", q, k.repeat_interleave(H // G, 1)) / D**0.5
    allowed = torch.ones(2, 1, 5, 5).tril().bool()
    call: dict[str, Any] = {}
    if case == "bias":
        call = {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": torch.randn(1, H, 5, 5).double()}
        scores = scores + call["core_attention_bias"]
    elif case == "alibi":
        call = {"core_attention_bias_type": "alibi"}
        distance = (torch.arange(5)[:, None] - torch.arange(5)).abs()
        scores = scores - torch.tensor(press_slopes(H))[:, None, None] * distance
    elif case == "softcap":
        scores = 1.5 * torch.tanh(scores / 1.5)
    elif case == "packed":  # ten tokens in sequences of 2, 3 and 5, of which the first two are batch element 0
        inputs = [t.flatten(0, 1) for t in inputs]
        call = {"qkv_format": "thd", "attn_mask_type": "padding_causal", "cu_seqlens_q": cu(2, 3, 5)}
        allowed[0, :, 2:, :2] = False
    out, largest = module(*inputs, **call)
    want = scores.masked_fill(~allowed, -torch.inf).amax((0, 2, 3))
    torch.testing.assert_close(largest.double(), want, rtol=1e-5, atol=1e-6)
    assert largest.dtype == (torch.float32 if case == "half" else torch.float64)
    assert not largest.requires_grad
    assert out.shape[-1] == H * D


def test_the_largest_score_over_many_blocks_is_that_over_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from undivided.backends import reference

    module = DotProductAttention(H, D, qkv_format="bshd", window_size=(40, 0), return_max_logit=True)
    q, k, v = (torch.randn(2, 300, H, D) for _ in range(3))
    _, whole = module(q, k, v)
    monkeypatch.setattr(reference, "SCORES_PER_BLOCK", 1 << 9)
    monkeypatch.setattr(reference, "MAX_ROWS", 32)
    torch.testing.assert_close(module(q, k, v)[1], whole)


@pytest.mark.parametrize("interleave", [-3, -2])
@pytest.mark.parametrize("format", ["bshd", "sbhd", "thd"])
def test_packed_qkv_and_kv_layers_are_their_parts(format: str, interleave: int) -> None:
    tokens = (6,) if format == "thd" else (2, 6)
    module = DotProductAttention(H, D, qkv_format=format, attn_mask_type="padding_causal")
    call = {"cu_seqlens_q": cu(*((4, 2) if format == "thd" else (1, 2, 2, 1, 2, 1) if format == "sbhd" else (5, 6)))}
    q, k, v = (torch.randn(*tokens, H, D) for _ in range(3))
    want = module(q, k, v, **call)
    torch.testing.assert_close(
        module(qkv_layer=torch.stack((q, k, v), interleave), qkv_interleave_dim=interleave, **call), want
    )
    torch.testing.assert_close(
        module(q, kv_layer=torch.stack((k, v), interleave), qkv_interleave_dim=interleave, **call), want
    )


def test_dropout_is_applied_only_in_training() -> None:
    module = DotProductAttention(H, D, attention_dropout=0.5, qkv_format="bshd")
    q = torch.randn(2, 8, H, D)
    plain = DotProductAttention(H, D, qkv_format="bshd")(q, q, q)
    torch.manual_seed(1)
    dropped = module(q, q, q)
    assert not torch.equal(dropped, module(q, q, q))
    torch.manual_seed(1)
    assert torch.equal(dropped, module(q, q, q))
    torch.testing.assert_close(module.eval()(q, q, q), plain)


def test_checkpointing_gives_the_same_gradients_with_dropout_bias_and_offset() -> None:
    module = DotProductAttention(H, D, G, attention_dropout=0.3, qkv_format="bshd", softmax_type="learnable")
    q, k, v = (torch.randn(2, 6, heads, D, requires_grad=True) for heads in (H, G, G))
    bias = torch.randn(1, H, 6, 6, requires_grad=True)
    found = []
    for recompute in (False, True):
        torch.manual_seed(3)
        out = module(
            q,
            k,
            v,
            checkpoint_core_attention=recompute,
            core_attention_bias_type="post_scale_bias",
            core_attention_bias=bias,
        )
        found.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v, bias, module.softmax_offset))])
    for plain, recomputed in zip(*found, strict=True):
        torch.testing.assert_close(plain, recomputed)


def test_the_module_equals_undivided_attention() -> None:
    """The module adds no arithmetic: it equals the function bitwise, on the same backend."""
    q, k, v = (torch.randn(2, 33, heads, 64) for heads in (8, 2, 2))
    out = DotProductAttention(8, 64, 2, qkv_format="bshd", softcap=20.0)(q, k, v)
    want = undivided.attention(q, k, v, layout="bshd", mask=masks.causal(), softcap=20.0)
    assert torch.equal(out, want.flatten(-2))

"""TransformerLayer equals `plain_layer` in every format and with every option."""

from __future__ import annotations

from typing import Any

import plain_layer
import pytest
import torch
from layer_cases import (
    ENCODER,
    FORMATS,
    HEADS,
    HIDDEN,
    LENGTHS,
    OPTIONS,
    PADDING,
    cu,
    in_format,
    layer,
    split_sequences,
)
from torch import Tensor

from undivided import InputError, RotaryPositionEmbedding
from undivided.nn.blocks.mlp import ACTIVATIONS, Activation


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def check(format: str, options: dict[str, Any], rotary: bool = False, mask_type: str = "padding_causal") -> None:
    """Outputs and all gradients of two sequences of unequal length, against each sequence alone."""
    module = layer(format, self_attn_mask_type=mask_type, **options)
    plain_layer.with_random_parameters(module)
    decoder = options.get("layer_type") == "decoder"
    xs = [torch.randn(n, HIDDEN, dtype=torch.float64, requires_grad=True) for n in LENGTHS]
    encoders = [torch.randn(n, HIDDEN, dtype=torch.float64, requires_grad=True) for n in ENCODER] if decoder else []
    call: dict[str, Any] = {"cu_seqlens_q": cu(LENGTHS)}
    if decoder:
        call |= {
            "encoder_output": in_format(encoders, format, PADDING),
            "cu_seqlens_kv": cu(ENCODER),
            "enc_dec_attn_mask_type": "padding",
        }
    if rotary:
        interleaved = options.get("rotary_pos_interleaved", False)
        call["rotary_pos_emb"] = RotaryPositionEmbedding(HIDDEN // HEADS, interleaved=interleaved)(8)
    outs = split_sequences(module(in_format(xs, format, PADDING), **call), LENGTHS, format)
    state = dict(module.named_parameters())
    known = options | {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "rotary": rotary}
    wanted = []
    for n, x in enumerate(xs):
        pairs = torch.arange(len(x))[:, None] - torch.arange(len(x))
        left = options.get("window_size", (-1, 0))[0]
        allowed = (
            (pairs >= 0) & ((pairs <= left) if left >= 0 else True)
            if "causal" in mask_type
            else torch.ones_like(pairs) > 0
        )
        cross = (encoders[n], torch.ones(len(x), len(encoders[n])) > 0) if decoder else (None, None)
        wanted.append(plain_layer.layer(state, known, x, allowed, *cross))
    close(outs, wanted, rotary)
    weights = [torch.randn_like(out) for out in outs]
    inputs = [*xs, *encoders, *state.values()]
    ours, theirs = (
        torch.autograd.grad(sum((o * w).sum() for o, w in zip(of, weights, strict=True)), inputs)
        for of in (outs, wanted)
    )
    close(list(ours), list(theirs), rotary)


def close(ours: list[Tensor], theirs: list[Tensor], rotary: bool) -> None:
    """fp64; the angles of rotary embeddings and the learnable offset are fp32."""
    for a, b in zip(ours, theirs, strict=True):
        narrow = rotary or a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=1e-4 if narrow else 1e-8, atol=1e-5 if narrow else 1e-9)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_arrangement_equals_plain_layer(options: dict[str, Any], format: str) -> None:
    check(format, options)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("mask_type", ["padding", "padding_causal_bottom_right"])
def test_mask_types(mask_type: str, format: str) -> None:
    check(format, {}, mask_type=mask_type)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("before", [True, False], ids=["norm-then-turn", "turn-then-norm"])
@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "half-split"])
def test_rotary_embeddings_and_norms_in_either_order(before: bool, interleaved: bool, format: str) -> None:
    check(
        format,
        {
            "qk_norm_type": "RMSNorm",
            "qk_norm_before_rope": before,
            "rotary_pos_interleaved": interleaved,
            "num_gqa_groups": 2,
        },
        rotary=True,
    )


def test_norm_and_rotary_do_not_commute() -> None:
    """Otherwise the order above is not tested."""
    x, rope = torch.randn(1, 5, HIDDEN, dtype=torch.float64), RotaryPositionEmbedding(6)(5)
    first, second = (layer("bshd", qk_norm_type="LayerNorm", qk_norm_before_rope=before) for before in (True, False))
    plain_layer.with_random_parameters(first), plain_layer.with_random_parameters(second)
    assert not torch.allclose(first(x, rotary_pos_emb=rope), second(x, rotary_pos_emb=rope), rtol=1e-3)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation_is_its_formula(name: str) -> None:
    x = torch.linspace(-9, 9, 400, dtype=torch.float64).reshape(20, 20)[:, torch.randperm(20)].requires_grad_()
    ours, wanted = Activation(name)(x), plain_layer.activation(name, x)
    torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=1e-12)
    weight = torch.randn_like(wanted)
    grads = [torch.autograd.grad((out * weight).sum(), x)[0] for out in (ours, wanted)]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation_in_a_layer(name: str) -> None:
    check("bshd", {"activation": name})


def test_the_numbers_of_clamped_swiglu() -> None:
    check(
        "thd",
        {"activation": "clamped_swiglu", "activation_params": {"limit": 0.4, "alpha": 1.1, "glu_linear_offset": 0.3}},
    )


def test_biases_slopes_and_masks_reach_the_attention() -> None:
    """ALiBi as slopes equals ALiBi as a bias; a mask of pairs equals a bias of -inf."""
    x = torch.randn(2, 5, HIDDEN, dtype=torch.float64)
    module = layer("bshd", self_attn_mask_type="causal")
    slopes = torch.rand(HEADS)
    distance = (torch.arange(5)[:, None] - torch.arange(5)).abs()
    bias = (-slopes[:, None, None] * distance).double()[None]
    by_slopes = module(x, core_attention_bias_type="alibi", alibi_slopes=slopes)
    by_bias = module(x, core_attention_bias_type="post_scale_bias", core_attention_bias=bias)
    torch.testing.assert_close(by_slopes, by_bias, rtol=1e-6, atol=1e-7)
    before = module(x, core_attention_bias_type="pre_scale_bias", core_attention_bias=bias * (HIDDEN / HEADS) ** 0.5)
    torch.testing.assert_close(before, by_bias)
    hidden = torch.rand(2, 1, 5, 5) < 0.3
    masked = module(x, hidden, self_attn_mask_type="arbitrary")
    bias = torch.zeros(2, 1, 5, 5, dtype=torch.float64).masked_fill(hidden, -torch.inf)
    by_bias = module(
        x, self_attn_mask_type="no_mask", core_attention_bias_type="post_scale_bias", core_attention_bias=bias
    )
    torch.testing.assert_close(masked, by_bias)


def test_a_padding_mask_equals_cu_seqlens() -> None:
    x = torch.randn(2, 5, HIDDEN, dtype=torch.float64)
    module = layer("bshd", self_attn_mask_type="padding_causal")
    padding = (torch.arange(5) >= torch.tensor(LENGTHS)[:, None])[:, None, None]
    assert torch.equal(module(x, padding)[1, :3], module(x, cu_seqlens_q=cu(LENGTHS))[1, :3])


def test_padding_between_packed_sequences() -> None:
    """Rotary positions count from the padded offsets."""
    rope = RotaryPositionEmbedding(6)(9)
    module = layer("thd", self_attn_mask_type="padding_causal")
    x = torch.randn(10, HIDDEN, dtype=torch.float64)
    out = module(x, cu_seqlens_q=cu(LENGTHS), cu_seqlens_q_padded=cu((6, 4)), rotary_pos_emb=rope)
    tight = module(torch.cat((x[:5], x[6:9])), cu_seqlens_q=cu(LENGTHS), rotary_pos_emb=rope)
    torch.testing.assert_close(torch.cat((out[:5], out[6:9])), tight)


def test_a_pair_of_rotary_embeddings_is_for_queries_and_keys() -> None:
    x = torch.randn(1, 5, HIDDEN, dtype=torch.float64)
    module = layer("bshd", self_attn_mask_type="causal")
    rope, none = RotaryPositionEmbedding(6)(5), torch.zeros(5, 1, 1, 6)
    both = module(x, rotary_pos_emb=rope)
    torch.testing.assert_close(module(x, rotary_pos_emb=(rope, rope)), both)
    torch.testing.assert_close(module(x, rotary_pos_emb=(none, none)), module(x))
    assert not torch.allclose(module(x, rotary_pos_emb=(rope, none)), both, rtol=1e-3)


@pytest.mark.parametrize("shape", [(0, 5), (2, 0)], ids=["no-sequence", "no-token"])
def test_empty_inputs_give_empty_outputs(shape: tuple[int, int]) -> None:
    x = torch.randn(*shape, HIDDEN, dtype=torch.float64, requires_grad=True)
    out = layer("bshd", drop_path_rate=0.5)(x, rotary_pos_emb=RotaryPositionEmbedding(6)(5))
    out.sum().backward()
    assert out.shape == x.shape


def test_an_empty_document_and_a_tail_without_one() -> None:
    """Tokens after the last sequence, described by padded offsets, attend to nothing, and the output is finite there.

    Without padded offsets they are an error, because a forgotten sequence would give rows of 0.
    """
    module = layer("thd", self_attn_mask_type="padding_causal")
    plain_layer.with_random_parameters(module)
    x = torch.randn(7, HIDDEN, dtype=torch.float64)
    freqs = RotaryPositionEmbedding(6)(7)
    with pytest.raises(InputError, match=r"cu_seqlens_q\[-1\] of 7, the q tokens, got 5"):
        module(x, cu_seqlens_q=torch.tensor([0, 0, 5]), rotary_pos_emb=freqs)
    ends = torch.tensor([0, 0, 7])
    out = module(x, cu_seqlens_q=torch.tensor([0, 0, 5]), cu_seqlens_q_padded=ends, rotary_pos_emb=freqs)
    alone = module(x[:5], cu_seqlens_q=torch.tensor([0, 5]), rotary_pos_emb=RotaryPositionEmbedding(6)(5))
    torch.testing.assert_close(out[:5], alone)
    assert out[5:].isfinite().all()


def test_gradients_of_every_sample() -> None:
    """torch.func: vmap over grad equals a loop over samples."""
    module = layer("bshd", num_gqa_groups=2)
    parameters = dict(module.named_parameters())
    xs = torch.randn(3, 5, HIDDEN, dtype=torch.float64)

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(module, parameters, (x[None],)).square().sum()

    together = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, xs)
    for n, x in enumerate(xs):
        for name, gradient in torch.func.grad(loss)(parameters, x).items():
            torch.testing.assert_close(together[name][n], gradient)

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


@pytest.mark.parametrize("given", ["cu_seqlens_q_padded", "cu_seqlens_kv_padded"])
@pytest.mark.parametrize("kv", ["none", "same", "equal"])
@pytest.mark.parametrize("of_attention", [False, True], ids=["layer", "attention"])
def test_padded_offsets_of_either_side_serve_both(given: str, kv: str, of_attention: bool) -> None:
    """With those of the keys alone, rotary positions counted from cu_seqlens_q, and a layer ignored them."""
    module: torch.nn.Module = layer("thd", self_attn_mask_type="padding_causal")
    module = module.self_attention if of_attention else module
    x, q = torch.randn(10, HIDDEN, dtype=torch.float64), cu(LENGTHS)
    offsets = {"cu_seqlens_q": q, "cu_seqlens_kv": {"none": None, "same": q, "equal": q.clone()}[kv]}
    rope, padded = RotaryPositionEmbedding(6)(9), cu((6, 4))
    want = module(x, **offsets, cu_seqlens_q_padded=padded, cu_seqlens_kv_padded=padded, rotary_pos_emb=rope)
    out = module(x, **offsets, **{given: padded}, rotary_pos_emb=rope)
    assert torch.equal(out, want)
    with pytest.raises(InputError, match="cu_seqlens_kv_padded must be cu_seqlens_q_padded or None in self-attention"):
        module(x, **offsets, cu_seqlens_q_padded=padded, cu_seqlens_kv_padded=cu((5, 5)))


@pytest.mark.parametrize("side", ["q", "kv"])
def test_a_side_of_cross_attention_without_padded_offsets_has_no_padding(side: str) -> None:
    """Also if both sides have one cu_seqlens: positions and attention once placed the tokens differently."""
    module = layer("thd", layer_type="decoder").inter_attention
    lengths, padded = cu(LENGTHS), cu((6, 4))
    tight, loose = torch.randn(8, HIDDEN, dtype=torch.float64), torch.zeros(10, HIDDEN, dtype=torch.float64)
    loose[[0, 1, 2, 3, 4, 6, 7, 8]] = tight
    call = {"attn_mask_type": "padding", "rotary_pos_emb": RotaryPositionEmbedding(6)(9)}
    want = module(tight, encoder_output=tight, cu_seqlens_q=lengths, cu_seqlens_kv=lengths, **call)
    x, encoder = (loose, tight) if side == "q" else (tight, loose)
    call |= {"cu_seqlens_q": lengths, "cu_seqlens_kv": lengths, f"cu_seqlens_{side}_padded": padded}
    out = module(x, encoder_output=encoder, **call)
    torch.testing.assert_close(out[[0, 1, 2, 3, 4, 6, 7, 8]] if side == "q" else out, want)


PADDING_OF_DECODERS: dict[str, dict[str, Any]] = {
    "self alone": {"self_attn_mask_type": "padding_causal", "cu_seqlens_q": cu(LENGTHS)},
    "cross alone": {"enc_dec_attn_mask_type": "padding", "cu_seqlens_q": cu(LENGTHS), "cu_seqlens_kv": cu(ENCODER)},
    "self, cross by a mask": {
        "self_attn_mask_type": "padding_causal",
        "cu_seqlens_q": cu(LENGTHS),
        "enc_dec_attn_mask_type": "padding",
        "enc_dec_attn_mask": tuple(
            (torch.arange(max(of)) >= torch.tensor(of)[:, None])[:, None, None] for of in (LENGTHS, ENCODER)
        ),
    },
}


@pytest.mark.parametrize("case", PADDING_OF_DECODERS)
@pytest.mark.parametrize("format", ["sbhd", "bshd"])
def test_one_attention_of_a_decoder_may_use_cu_seqlens(case: str, format: str) -> None:
    """The other attention refused them. A sequence has the output that it has alone."""
    call = PADDING_OF_DECODERS[case]
    module = layer(format, layer_type="decoder")
    xs = [torch.randn(n, HIDDEN, dtype=torch.float64) for n in LENGTHS]
    lengths = ENCODER if "enc_dec_attn_mask_type" in call else (6, 6)
    encoders = [torch.randn(n, HIDDEN, dtype=torch.float64) for n in lengths]
    out = module(in_format(xs, format, PADDING), encoder_output=in_format(encoders, format, PADDING), **call)
    for ours, x, encoder in zip(split_sequences(out, LENGTHS, format), xs, encoders, strict=True):
        alone = module(in_format([x], format), encoder_output=in_format([encoder], format))
        torch.testing.assert_close(ours, split_sequences(alone, (len(x),), format)[0])


def test_cu_seqlens_that_no_attention_of_a_decoder_uses_are_refused() -> None:
    x = torch.randn(2, 5, HIDDEN, dtype=torch.float64)
    with pytest.raises(InputError, match="cu_seqlens_q must be None with self_attn_mask_type='causal'"):
        layer("bshd", layer_type="decoder")(x, encoder_output=x, cu_seqlens_q=cu(LENGTHS))


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

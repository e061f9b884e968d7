"""TransformerLayer computes what is written down in `plain_layer`, in every format, with every option, and step by step."""

# ruff: noqa: E501 (tables of messages)

from __future__ import annotations

import copy
import functools
import itertools
import pickle
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor

import plain_layer
from undivided import InferenceParams, InputError, RotaryPositionEmbedding, TransformerLayer
from undivided.nn._mlp import ACTIVATIONS, Activation

HIDDEN, FFN, HEADS = 24, 20, 4
LENGTHS, ENCODER = (5, 3), (4, 6)
PADDING = (
    7.0  # NaN times a gradient of 0 would be in the gradients of the weights, whatever the attention does
)
FORMATS = ("sbhd", "bshd", "thd")
STILL = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "params_dtype": torch.float64}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def cu(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def laid_out(sequences: list[Tensor], format: str, padding: float = torch.nan) -> Tensor:
    """Sequences [s, hidden] side by side, padded, or packed."""
    if format == "thd":
        return torch.cat(sequences)
    padded = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=padding)
    return padded if format == "bshd" else padded.transpose(0, 1)


def taken_apart(out: Tensor, lengths: tuple[int, ...], format: str) -> list[Tensor]:
    if format == "thd":
        return list(out.split(lengths))
    rows = out if format == "bshd" else out.transpose(0, 1)
    return [row[:n] for row, n in zip(rows, lengths, strict=True)]


def layer(format: str, **options: Any) -> TransformerLayer:
    return TransformerLayer(
        HIDDEN, FFN, HEADS, attn_input_format=format, **(STILL | {"layer_number": 1} | options)
    )


def check(
    format: str, options: dict[str, Any], rotary: bool = False, mask_type: str = "padding_causal"
) -> None:
    """Outputs and all gradients of two sequences of unequal length, against each alone in plain operations."""
    module = layer(format, self_attn_mask_type=mask_type, **options)
    plain_layer.shaken(module)
    decoder = options.get("layer_type") == "decoder"
    xs = [torch.randn(n, HIDDEN, dtype=torch.float64, requires_grad=True) for n in LENGTHS]
    encoders = (
        [torch.randn(n, HIDDEN, dtype=torch.float64, requires_grad=True) for n in ENCODER] if decoder else []
    )
    call: dict[str, Any] = {"cu_seqlens_q": cu(LENGTHS)}
    if decoder:
        call |= {
            "encoder_output": laid_out(encoders, format, PADDING),
            "cu_seqlens_kv": cu(ENCODER),
            "enc_dec_attn_mask_type": "padding",
        }
    if rotary:
        interleaved = options.get("rotary_pos_interleaved", False)
        call["rotary_pos_emb"] = RotaryPositionEmbedding(HIDDEN // HEADS, interleaved=interleaved)(8)
    outs = taken_apart(module(laid_out(xs, format, PADDING), **call), LENGTHS, format)
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


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped-heads": {"num_gqa_groups": 2},
    "one-kv-head": {"num_gqa_groups": 1},
    "rms-norm": {"normalization": "RMSNorm"},
    "rms-norm-zero-centred": {"normalization": "RMSNorm", "zero_centered_gamma": True},
    "layer-norm-zero-centred": {"zero_centered_gamma": True, "layernorm_epsilon": 1e-2},
    "no-bias": {"bias": False},
    "output-norm": {"output_layernorm": True},
    "output-norm-zero-centred": {
        "output_layernorm": True,
        "normalization": "RMSNorm",
        "zero_centered_gamma": True,
    },
    "post-norm-residual": {"apply_residual_connection_post_layernorm": True},
    "post-norm-residual-output-norm": {
        "apply_residual_connection_post_layernorm": True,
        "output_layernorm": True,
    },
    "parallel": {"parallel_attention_mlp": True},
    "decoder": {"layer_type": "decoder"},
    "decoder-post-norm-residual": {"layer_type": "decoder", "apply_residual_connection_post_layernorm": True},
    "decoder-output-norm": {"layer_type": "decoder", "output_layernorm": True, "num_gqa_groups": 2},
    "window": {"window_size": (1, 0)},
    "two-head-sizes": {"kv_channels": (6, 10), "num_gqa_groups": 2},
    "wide-heads": {"kv_channels": 8},
    "l2-norm": {"qk_norm_type": "L2Normalization", "qk_norm_eps": 1e-2},
    "rms-norm-of-heads": {"qk_norm_type": "RMSNorm"},
    "layer-norm-of-heads": {"qk_norm_type": "LayerNorm"},
    "off-by-one": {"softmax_type": "off-by-one"},
    "learnable": {"softmax_type": "learnable"},
    "softcap": {"softcap": 0.7},
    "scale": {"softmax_scale": 0.9},
}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_arrangement_is_what_is_written_down(options: dict[str, Any], format: str) -> None:
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
    """Else the order above would not be tested."""
    x, rope = torch.randn(1, 5, HIDDEN, dtype=torch.float64), RotaryPositionEmbedding(6)(5)
    first, second = (
        layer("bshd", qk_norm_type="LayerNorm", qk_norm_before_rope=before) for before in (True, False)
    )
    plain_layer.shaken(first), plain_layer.shaken(second)
    assert not torch.allclose(first(x, rotary_pos_emb=rope), second(x, rotary_pos_emb=rope), rtol=1e-3)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation_is_its_formula(name: str) -> None:
    x = (
        torch.linspace(-9, 9, 400, dtype=torch.float64)
        .reshape(20, 20)[:, torch.randperm(20)]
        .requires_grad_()
    )
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
        {
            "activation": "clamped_swiglu",
            "activation_params": {"limit": 0.4, "alpha": 1.1, "glu_linear_offset": 0.3},
        },
    )


def test_biases_slopes_and_masks_reach_the_attention() -> None:
    """ALiBi by its slopes and as a bias; a mask of pairs as a bias of -inf."""
    x = torch.randn(2, 5, HIDDEN, dtype=torch.float64)
    module = layer("bshd", self_attn_mask_type="causal")
    slopes = torch.rand(HEADS)
    distance = (torch.arange(5)[:, None] - torch.arange(5)).abs()
    bias = (-slopes[:, None, None] * distance).double()[None]
    by_slopes = module(x, core_attention_bias_type="alibi", alibi_slopes=slopes)
    by_bias = module(x, core_attention_bias_type="post_scale_bias", core_attention_bias=bias)
    torch.testing.assert_close(by_slopes, by_bias, rtol=1e-6, atol=1e-7)
    before = module(
        x, core_attention_bias_type="pre_scale_bias", core_attention_bias=bias * (HIDDEN / HEADS) ** 0.5
    )
    torch.testing.assert_close(before, by_bias)
    hidden = torch.rand(2, 1, 5, 5) < 0.3
    masked = module(x, hidden, self_attn_mask_type="arbitrary")
    bias = torch.zeros(2, 1, 5, 5, dtype=torch.float64).masked_fill(hidden, -torch.inf)
    by_bias = module(
        x, self_attn_mask_type="no_mask", core_attention_bias_type="post_scale_bias", core_attention_bias=bias
    )
    torch.testing.assert_close(masked, by_bias)


def test_a_padding_mask_says_what_cu_seqlens_say() -> None:
    x = torch.randn(2, 5, HIDDEN, dtype=torch.float64)
    module = layer("bshd", self_attn_mask_type="padding_causal")
    padding = (torch.arange(5) >= torch.tensor(LENGTHS)[:, None])[:, None, None]
    assert torch.equal(module(x, padding)[1, :3], module(x, cu_seqlens_q=cu(LENGTHS))[1, :3])


def test_padding_between_packed_sequences() -> None:
    """Rotary positions count from the padded offsets, where the tokens are."""
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


# ---- dropout ----


@pytest.mark.parametrize("format", FORMATS)
def test_the_same_seed_drops_the_same_entries(format: str) -> None:
    module = layer(format, hidden_dropout=0.3, attention_dropout=0.3, self_attn_mask_type="padding_causal")
    xs = [torch.randn(n, HIDDEN, dtype=torch.float64) for n in LENGTHS]
    call = {"cu_seqlens_q": cu(LENGTHS)}

    def once(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return torch.cat(taken_apart(module(laid_out(xs, format, PADDING), **call), LENGTHS, format))

    assert torch.equal(once(1), once(1))
    assert not torch.allclose(once(1), once(2))
    module.eval()
    assert torch.equal(once(1), once(2))


def test_attention_drops_the_same_weights_in_every_format() -> None:
    """Dropout is a function of sequence and positions."""
    outs = []
    xs = [torch.randn(n, HIDDEN, dtype=torch.float64) for n in LENGTHS]
    for format in FORMATS:
        torch.manual_seed(3)
        module = layer(format, attention_dropout=0.4, self_attn_mask_type="padding_causal")
        plain_layer.shaken(module)
        torch.manual_seed(4)
        out = module(laid_out(xs, format), cu_seqlens_q=cu(LENGTHS))
        outs.append(torch.cat(taken_apart(out, LENGTHS, format)))
    torch.testing.assert_close(outs[0], outs[1])
    torch.testing.assert_close(outs[0], outs[2])


@pytest.mark.parametrize("format", FORMATS)
def test_a_dropped_path_leaves_a_whole_sequence_out(format: str) -> None:
    """Each block of each sequence is there, twice as strong, or not at all; TransformerEngine drops along axis 0."""
    module = layer(format, drop_path_rate=0.5, self_attn_mask_type="padding_causal")
    plain_layer.shaken(module)
    whole = layer(format, self_attn_mask_type="padding_causal")
    whole.load_state_dict(module.state_dict())
    xs = [torch.randn(n, HIDDEN, dtype=torch.float64) for n in LENGTHS]
    x, call = laid_out(xs, format, PADDING), {"cu_seqlens_q": cu(LENGTHS)}
    attended = taken_apart(whole.self_attention(x, attn_mask_type="padding_causal", **call), LENGTHS, format)
    seen = set()
    for _ in range(40):
        out = taken_apart(module(x, **call), LENGTHS, format)
        for n, sequence in enumerate(xs):
            possible = {}
            for kept_attention, kept_mlp in itertools.product((0, 2), repeat=2):
                between = sequence + kept_attention * attended[n]
                possible[kept_attention, kept_mlp] = between + kept_mlp * whole.layernorm_mlp(between)[0]
            found = [key for key, value in possible.items() if torch.allclose(out[n], value)]
            assert len(found) == 1
            seen.add((n, *found[0]))
    assert len(seen) == 8, "each sequence has each of its four outcomes"


def test_dropping_every_path_and_none() -> None:
    x = torch.randn(2, 5, HIDDEN, dtype=torch.float64)
    assert torch.equal(layer("bshd", drop_path_rate=1.0)(x), x)
    module = layer("bshd", drop_path_rate=1.0).eval()
    assert not torch.allclose(module(x), x)


def test_hidden_dropout_keeps_the_mean() -> None:
    """Survivors are scaled by 1 / (1 - p), on each of a decoder's three blocks."""
    x = torch.zeros(1, 400, HIDDEN, dtype=torch.float64)
    module = layer("bshd", hidden_dropout=0.5)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
        module.self_attention.proj.bias.fill_(1.0)
    out = module(x)
    assert set(out.unique().tolist()) == {0.0, 2.0}
    assert 0.45 < (out == 0).double().mean() < 0.55


# ---- checkpointing, compiling, devices, copies ----


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_recomputing_the_attention_changes_nothing(p: float) -> None:
    module = layer("bshd", attention_dropout=p, num_gqa_groups=2, softmax_type="learnable")
    x = torch.randn(2, 5, HIDDEN, dtype=torch.float64, requires_grad=True)

    def run(recompute: bool) -> list[Tensor]:
        torch.manual_seed(1)
        out = module(x, checkpoint_core_attention=recompute)
        return [out, *torch.autograd.grad(out.square().sum(), [x, *module.parameters()])]

    for a, b in zip(run(True), run(False), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("format", ["bshd", "thd"])
def test_compiled_in_one_graph(format: str) -> None:
    options = {
        "num_gqa_groups": 2,
        "normalization": "RMSNorm",
        "activation": "swiglu",
        "window_size": (2, 0),
        "qk_norm_type": "RMSNorm",
    }
    module = layer(format, self_attn_mask_type="padding_causal", **options)
    xs = [torch.randn(n, HIDDEN, dtype=torch.float64) for n in LENGTHS]
    x = laid_out(xs, format, PADDING).requires_grad_()
    call = {"cu_seqlens_q": cu(LENGTHS), "rotary_pos_emb": RotaryPositionEmbedding(6)(8)}
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    results = []
    for function in (module, compiled):
        out = function(x, **call)
        results.append([out, *torch.autograd.grad(out.square().sum(), [x, *module.parameters()])])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_a_compiled_decoder_layer() -> None:
    module = layer("bshd", layer_type="decoder", drop_path_rate=0.2, hidden_dropout=0.1)
    x, encoder = (
        torch.randn(2, 5, HIDDEN, dtype=torch.float64),
        torch.randn(2, 4, HIDDEN, dtype=torch.float64),
    )
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert compiled(x, encoder_output=encoder).shape == x.shape
    module.eval()
    torch.testing.assert_close(compiled(x, encoder_output=encoder), module(x, encoder_output=encoder))


def test_made_on_the_meta_device_and_started_later() -> None:
    """Nothing is allocated; after `to_empty` and `reset_parameters` everything has its starting value."""
    init = functools.partial(torch.nn.init.constant_, val=0.5)
    options = {
        "layer_type": "decoder",
        "output_layernorm": True,
        "qk_norm_type": "LayerNorm",
        "softmax_type": "learnable",
    }
    module = layer("bshd", device="meta", init_method=init, **options)
    assert all(parameter.is_meta for parameter in module.parameters())
    x = torch.empty(2, 5, HIDDEN, dtype=torch.float64, device="meta")
    assert module(x, encoder_output=x).is_meta
    module = module.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(torch.nan)
    module.reset_parameters()
    fresh = layer("bshd", init_method=init, **options)
    for name, parameter in module.named_parameters():
        assert not parameter.isnan().any(), name
        if "proj" not in name and "fc2" not in name:
            assert torch.equal(parameter, fresh.state_dict()[name]), name
    with torch.device("meta"):
        assert layer("bshd").layernorm_mlp.fc1_weight.is_meta


def test_copies_are_the_same_layer() -> None:
    module = layer("bshd", num_gqa_groups=2, activation="clamped_swiglu", qk_norm_type="L2Normalization")
    x = torch.randn(2, 5, HIDDEN, dtype=torch.float64)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(x), module(x))
        assert str(other) == str(module)
    half = copy.deepcopy(module).bfloat16()
    assert half(x.bfloat16()).dtype == torch.bfloat16
    torch.testing.assert_close(half(x.bfloat16()).double(), module(x), rtol=0.1, atol=0.1)


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_under_autocast_the_residual_stays_wide(normalization: str) -> None:
    module = layer("bshd", params_dtype=torch.float32, normalization=normalization, qk_norm_type="RMSNorm")
    x = torch.randn(2, 5, HIDDEN)
    with torch.autocast("cpu", torch.bfloat16):
        out = module(x, rotary_pos_emb=RotaryPositionEmbedding(6)(5))
    assert out.dtype == torch.float32
    torch.testing.assert_close(
        out, module(x, rotary_pos_emb=RotaryPositionEmbedding(6)(5)), rtol=0.05, atol=0.05
    )
    out.sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_activation_checkpointing_of_the_whole_layer() -> None:
    module = layer("bshd", hidden_dropout=0.2, attention_dropout=0.2, drop_path_rate=0.2)
    x = torch.randn(3, 5, HIDDEN, dtype=torch.float64, requires_grad=True)

    def run(function: Any) -> list[Tensor]:
        torch.manual_seed(5)
        out = function(x)
        return [out, *torch.autograd.grad(out.square().sum(), [x, *module.parameters()])]

    recomputed = functools.partial(torch.utils.checkpoint.checkpoint, module, use_reentrant=False)
    for a, b in zip(run(recomputed), run(module), strict=True):
        assert torch.equal(a, b)


# ---- generation ----

STEPS = {
    "at-once": (12,),
    "one-by-one": (1,) * 12,
    "chunks": (5, 1, 4, 2),
    "prompt-then-tokens": (9, 1, 1, 1),
}
GENERATION: dict[str, dict[str, Any]] = {
    "plain": {},
    "window-grouped-swiglu": {
        "window_size": (3, 0),
        "num_gqa_groups": 2,
        "normalization": "RMSNorm",
        "activation": "swiglu",
    },
    "two-head-sizes": {"kv_channels": (6, 10), "qk_norm_type": "RMSNorm"},
    "softcap-and-sink": {
        "softcap": 5.0,
        "softmax_type": "learnable",
        "qk_norm_type": "LayerNorm",
        "qk_norm_before_rope": True,
    },
    "output-norm": {"output_layernorm": True, "rotary_pos_interleaved": True},
    "parallel": {"parallel_attention_mlp": True, "fuse_qkv_params": True},
    "post-norm-residual": {
        "apply_residual_connection_post_layernorm": True,
        "fuse_qkv_params": True,
        "qkv_weight_interleaved": False,
    },
    "bottom-right": {"self_attn_mask_type": "padding_causal_bottom_right", "window_size": (4, 0)},
}


def cache(paged: bool, groups: int = HEADS, sizes: tuple[int, int] = (6, 6)) -> InferenceParams:
    return InferenceParams(
        3, 24, groups, sizes[0], torch.float64, sizes[1], is_paged=paged, page_size=4 if paged else None
    )


@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("options", GENERATION.values(), ids=GENERATION)
def test_tokens_step_by_step_are_those_of_one_pass(
    options: dict[str, Any], steps: tuple[int, ...], format: str, paged: bool
) -> None:
    generate(options, steps, format, paged)


@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
@pytest.mark.parametrize("format", ["bshd", "thd"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_arrangement_generates(options: dict[str, Any], format: str, paged: bool) -> None:
    """A decoder layer caches its self-attention; its cross-attention sees all that the encoder gave, at every step."""
    generate(options, STEPS["chunks"], format, paged)


def generate(options: dict[str, Any], steps: tuple[int, ...], format: str, paged: bool) -> None:
    """Two layers share one InferenceParams; rotary positions go on where the cache ends."""
    options = {"self_attn_mask_type": "padding_causal"} | options
    layers = [layer(format, **(options | {"layer_number": n})).eval() for n in (1, 2)]
    for n, module in enumerate(layers):
        plain_layer.shaken(module, n)
    sizes = options.get("kv_channels", (6, 6))
    sizes = sizes if isinstance(sizes, tuple) else (sizes, sizes)
    rope = RotaryPositionEmbedding(sizes[0]).cos_sin(12)
    xs = [torch.randn(12, HIDDEN, dtype=torch.float64) for _ in range(2)]
    params = cache(paged, options.get("num_gqa_groups", HEADS), sizes)
    encoder: dict[str, Any] = {}
    if options.get("layer_type") == "decoder":
        encoders = [torch.randn(n, HIDDEN, dtype=torch.float64) for n in ENCODER]
        encoder = {
            "encoder_output": laid_out(encoders, format),
            "cu_seqlens_kv": cu(ENCODER),
            "enc_dec_attn_mask_type": "padding",
        }

    def model(x: Tensor, counts: tuple[int, ...], **call: Any) -> Tensor:
        if encoder or not call:
            call["cu_seqlens_q"] = cu(counts)
        for module in layers:
            x = module(x, rotary_pos_emb=rope, **call, **encoder)
        return x

    with torch.inference_mode():
        full = taken_apart(model(laid_out(xs, format), (12, 12)), (12, 12), format)
        found: list[list[Tensor]] = [[], []]
        start = 0
        for count in steps:
            params.pre_step(OrderedDict(a=count, b=count))
            new = laid_out([x[start : start + count] for x in xs], format)
            out = model(new, (count, count), inference_params=params)
            for n, part in enumerate(taken_apart(out, (count, count), format)):
                found[n].append(part)
            start += count
    for n in range(2):
        torch.testing.assert_close(torch.cat(found[n]), full[n], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
@pytest.mark.parametrize("format", FORMATS)
def test_sequences_come_and_go_with_unequal_numbers_of_tokens(format: str, paged: bool) -> None:
    """A ragged batch: prompts beside single tokens, one leaves, one joins, in another order."""
    module = layer(format, self_attn_mask_type="padding_causal", window_size=(5, 0), num_gqa_groups=2).eval()
    plain_layer.shaken(module)
    rope, params = RotaryPositionEmbedding(6)(24), cache(paged, 2)
    xs = {name: torch.randn(12, HIDDEN, dtype=torch.float64) for name in "abcd"}
    alone = {name: layer_alone(module, x, rope) for name, x in xs.items()}
    at = dict.fromkeys(xs, 0)
    script = [
        {"a": 5, "b": 2},
        {"a": 1, "b": 3},
        {"b": 1, "c": 7, "a": 2},
        {"c": 1, "b": 4},
        {"d": 3, "c": 1, "b": 1},
    ]
    with torch.inference_mode():
        for step in script:
            params.pre_step(OrderedDict(step))
            new = [xs[name][at[name] : at[name] + count] for name, count in step.items()]
            counts = tuple(step.values())
            call = {} if format != "thd" else {"cu_seqlens_q": cu(counts)}  # welcome, and needed by none
            out = module(laid_out(new, format), inference_params=params, rotary_pos_emb=rope, **call)
            for (name, count), part in zip(step.items(), taken_apart(out, counts, format), strict=True):
                torch.testing.assert_close(
                    part, alone[name][at[name] : at[name] + count], rtol=1e-6, atol=1e-7
                )
                at[name] += count


def layer_alone(module: TransformerLayer, x: Tensor, rope: Tensor) -> Tensor:
    """One sequence in one pass."""
    with torch.inference_mode():
        if module.attn_input_format == "thd":
            return module(x, cu_seqlens_q=cu((len(x),)), rotary_pos_emb=rope)
        axis = 0 if module.attn_input_format == "bshd" else 1
        return module(x.unsqueeze(axis), cu_seqlens_q=cu((len(x),)), rotary_pos_emb=rope).squeeze(axis)


def test_a_cache_with_masks_of_pairs_and_slopes() -> None:
    """A mask of pairs and a bias have the cached keys on their last axis; ALiBi counts distances in the sequence."""
    module = layer("bshd").eval()
    plain_layer.shaken(module)
    x = torch.randn(2, 8, HIDDEN, dtype=torch.float64)
    hidden = (torch.rand(2, 1, 8, 8) < 0.4) | torch.ones(8, 8, dtype=torch.bool).triu(1)
    bias, slopes = torch.randn(1, HEADS, 8, 8, dtype=torch.float64), torch.rand(HEADS)
    arbitrary = {"self_attn_mask_type": "arbitrary"}
    biased = {"core_attention_bias_type": "post_scale_bias"}
    alibi: dict[str, Any] = {"core_attention_bias_type": "alibi", "alibi_slopes": slopes}
    with torch.inference_mode():
        for call, pairs in (
            (arbitrary, {"attention_mask": hidden}), (biased, {"core_attention_bias": bias}), (alibi, {}),
        ):  # fmt: skip
            full, params, start = module(x, **call, **pairs), cache(True), 0
            for count in (4, 1, 3):
                stop = start + count
                params.pre_step(OrderedDict(a=count, b=count))
                part = {name: tensor[:, :, start:stop, :stop] for name, tensor in pairs.items()}
                out = module(x[:, start:stop], inference_params=params, **call, **part)
                torch.testing.assert_close(out, full[:, start:stop], rtol=1e-6, atol=1e-7)
                start = stop


# ---- errors ----

X = torch.randn(2, 5, HIDDEN)


def step(**counts: int) -> InferenceParams:
    params = InferenceParams(3, 24, HEADS, 6, torch.float32)
    params.pre_step(OrderedDict(counts))
    return params


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"attn_input_format": None}, "attn_input_format must be given (there is no default): one of 'sbhd', 'bshd', 'thd', got None\n  HINT: look at hidden_states.shape: 'bshd' if it is [batch, seq, hidden]"),
        ({"attn_input_format": "bhsd"}, "attn_input_format must be one of 'sbhd', 'bshd', 'thd', got 'bhsd'\n  HINT: look at hidden_states.shape"),
        ({"layer_type": "both"}, "layer_type must be one of 'encoder', 'decoder', got 'both'"),
        ({"num_attention_heads": 5}, "hidden_size must be divisible by num_attention_heads (5), got 24\n  HINT: kv_channels"),
        ({"num_gqa_groups": 3}, "num_gqa_groups must divide num_attention_heads (4), got 3"),
        ({"ffn_hidden_size": 0}, "ffn_hidden_size must be at least 1, got 0"),
        ({"layer_number": 0}, "layer_number must be at least 1, got 0"),
        ({"hidden_dropout": 2}, "hidden_dropout must be a number from 0 to 1, got 2"),
        ({"attention_dropout": -1}, "attention_dropout must be a number from 0 to 1, got -1"),
        ({"drop_path_rate": "0.1"}, "drop_path_rate must be a number from 0 to 1, got '0.1'"),
        ({"self_attn_mask_type": "casual"}, "self_attn_mask_type must be one of 'no_mask', 'padding', 'causal'"),
        ({"layer_type": "decoder", "enc_dec_attn_mask_type": "x"}, "enc_dec_attn_mask_type must be one of 'no_mask', 'padding'"),
        ({"layer_type": "decoder", "enc_dec_window_size": 3}, "enc_dec_window_size must be a pair (left, right), got 3"),
        ({"normalization": "BatchNorm"}, "normalization must be one of 'LayerNorm', 'RMSNorm', got 'BatchNorm'"),
        ({"layernorm_epsilon": -1e-5}, "layernorm_epsilon must be a number of at least 0, got -1e-05"),
        ({"activation": "tanh"}, "activation must be one of 'gelu', 'geglu', 'glu', 'qgelu', 'qgeglu', 'relu', 'reglu', 'srelu', 'sreglu', 'silu', 'swiglu', 'clamped_swiglu', got 'tanh'"),
        ({"activation_params": {"limit": 1.0}}, "activation_params must be None with activation='gelu'"),
        ({"activation": "clamped_swiglu", "activation_params": {"cap": 1.0}}, "activation_params must have the keys 'limit', 'alpha', 'glu_linear_offset' alone, got 'cap'"),
        ({"activation": "clamped_swiglu", "activation_params": {"limit": 0.0}}, "activation_params['limit'] must be a positive number, got 0.0"),
        ({"qk_norm_type": "l2"}, "qk_norm_type must be one of 'L2Normalization', 'RMSNorm', 'LayerNorm', got 'l2'"),
        ({"softmax_type": "sink"}, "softmax_type must be one of 'vanilla', 'off-by-one', 'learnable', got 'sink'"),
        ({"init_method": 0.02}, "init_method must be a function of a weight, or None, got 0.02\n  HINT: functools.partial"),
        ({"bias": None}, "bias must be True or False, got None"),
        ({"params_dtype": torch.int8}, "params_dtype must be a floating-point dtype or None, got torch.int8"),
        ({"seq_length": 0}, "seq_length must be at least 1, got 0"),
        ({"parallel_attention_mlp": 1}, "parallel_attention_mlp must be True or False, got 1"),
        ({"parallel_attention_mlp": True, "layer_type": "decoder"}, "parallel_attention_mlp must be False in a decoder, got True"),
        ({"parallel_attention_mlp": True, "output_layernorm": True}, "parallel_attention_mlp must be False with output_layernorm, got True"),
        ({"parallel_attention_mlp": True, "apply_residual_connection_post_layernorm": True}, "parallel_attention_mlp must be False with apply_residual_connection_post_layernorm"),
        ({"tp_size": 2}, "tp_size must be 1, got 2\n  HINT: every rank holds whole parameters"),
        ({"tp_group": object}, "tp_group must be None, got"),
        ({"sequence_parallel": True}, "sequence_parallel must be False, got True"),
        ({"set_parallel_mode": True}, "set_parallel_mode must be False, got True"),
        ({"get_rng_state_tracker": len}, "get_rng_state_tracker must be None, got"),
        ({"fuse_wgrad_accumulation": True}, "fuse_wgrad_accumulation must be False, got True\n  HINT: gradients go to .grad"),
        ({"ub_tp_comm_overlap": True}, "ub_tp_comm_overlap must be False, got True\n  HINT: there is no tensor parallel"),
        ({"ub_overlap_ag": False}, "ub_overlap_ag must be True, got False"),
        ({"ub_overlap_rs": False}, "ub_overlap_rs must be True, got False"),
        ({"ub_overlap_rs_dgrad": True}, "ub_overlap_rs_dgrad must be False, got True"),
        ({"ub_bulk_dgrad": False}, "ub_bulk_dgrad must be True, got False"),
        ({"ub_bulk_wgrad": False}, "ub_bulk_wgrad must be True, got False"),
    ],
)  # fmt: skip
def test_what_the_constructor_says_of_a_wrong_argument(options: dict[str, Any], said: str) -> None:
    given = {
        "hidden_size": HIDDEN,
        "ffn_hidden_size": FFN,
        "num_attention_heads": HEADS,
        "attn_input_format": "bshd",
    }
    with pytest.raises(InputError) as caught:
        TransformerLayer(**(given | options))
    assert str(caught.value).startswith(said)
    assert caught.value.argument == said.split(" ")[0]


BAD_CALLS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    # options, call, said
    ({}, {"hidden_states": X[0]}, "hidden_states must have 3 axes [batch, seq, hidden] in attn_input_format='bshd', got [5, 24]\n  HINT: packed sequences are 'thd'"),
    ({"attn_input_format": "thd"}, {}, "hidden_states must have 2 axes [tokens, hidden] in attn_input_format='thd', got [2, 5, 24]\n  HINT: a padded batch is"),
    ({"attn_input_format": "thd"}, {"hidden_states": X[:1]}, "hidden_states must have 2 axes [tokens, hidden] in attn_input_format='thd', got [1, 5, 24]\n  HINT: a batch of one"),
    ({}, {"hidden_states": X[..., :8]}, "hidden_states must have hidden_size (24) features, got 8 in [2, 5, 8]"),
    ({}, {"hidden_states": X.double()}, "hidden_states must have the parameters' dtype (torch.float32), got torch.float64\n  HINT: hidden_states.to(torch.float32)"),
    ({}, {"hidden_states": None}, "hidden_states must be a torch.Tensor, got None"),
    ({}, {"encoder_output": X}, "encoder_output must be None with layer_type='encoder', got Tensor\n  HINT: layer_type='decoder'"),
    ({}, {"enc_dec_attn_mask": X > 0}, "enc_dec_attn_mask must be None with layer_type='encoder'"),
    ({}, {"cu_seqlens_kv": cu(LENGTHS)}, "cu_seqlens_kv must be that of the queries, or None, with layer_type='encoder'"),
    ({}, {"cu_seqlens_q": cu(LENGTHS), "cu_seqlens_kv": cu((4, 4))}, "cu_seqlens_kv must be that of the queries, or None"),
    ({}, {"cu_seqlens_q": cu(LENGTHS)}, "cu_seqlens_q must be None with self_attn_mask_type='causal' in attn_input_format='bshd'"),
    ({}, {"self_attn_mask_type": "both"}, "self_attn_mask_type must be one of"),
    ({}, {"is_first_microbatch": True}, "is_first_microbatch must be None, got True\n  HINT: there are no FP8 weights"),
    ({}, {"rotary_pos_emb": RotaryPositionEmbedding(6)(4)}, "rotary_pos_emb must have a row for each of 5 positions, got 4"),
    ({}, {"rotary_pos_emb": RotaryPositionEmbedding(8)(5)}, "rotary_pos_emb must have an even number of channels, at most the head size"),
    ({}, {"inference_params": 1}, "inference_params must be an undivided.InferenceParams, got int"),
    ({}, {"checkpoint_core_attention": 1}, "checkpoint_core_attention must be True or False, got 1"),
    ({"attn_input_format": "thd"}, {"hidden_states": X[0]}, "self_attn_mask_type must be a padding type with attn_input_format='thd', got 'causal'"),
    ({"layer_type": "decoder"}, {}, "encoder_output must be a torch.Tensor, got None"),
    ({"layer_type": "decoder"}, {"encoder_output": torch.randn(1, 7, HIDDEN)}, "encoder_output must have the batch size of hidden_states (2) in attn_input_format='bshd', got [1, 7, 24]"),
    ({"layer_type": "decoder"}, {"encoder_output": X, "enc_dec_attn_mask_type": "padding"}, "enc_dec_attn_mask must be given, or cu_seqlens_q, with enc_dec_attn_mask_type='padding'"),
    ({"layer_type": "decoder"}, {"encoder_output": X.transpose(0, 1)}, "encoder_output must have the batch size of hidden_states (2) in attn_input_format='bshd', got [5, 2, 24]\n  HINT: encoder_output.transpose(0, 1)"),
    # a format that something else contradicts
    ({"attn_input_format": "sbhd", "self_attn_mask_type": "padding_causal"}, {"cu_seqlens_q": cu(LENGTHS)},
     "attn_input_format must agree with cu_seqlens_q (2 sequences): in 'sbhd' hidden_states [2, 5, 24] are 5 sequences of 2, got 'sbhd'\n  HINT: attn_input_format='bshd', [batch, seq, hidden], would fit"),
    ({"self_attn_mask_type": "padding"}, {"attention_mask": torch.zeros(5, 1, 1, 2, dtype=torch.bool)},
     "attn_input_format must agree with attention_mask (5 sequences, 2 tokens each): in 'bshd' hidden_states [2, 5, 24] are 2 sequences of 5, got 'bshd'\n  HINT: attn_input_format='sbhd'"),
    ({"self_attn_mask_type": "arbitrary"}, {"attention_mask": torch.zeros(1, 1, 2, 2, dtype=torch.bool)}, "attn_input_format must agree with attention_mask (2 tokens each)"),
    ({}, {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": torch.zeros(1, 4, 2, 2)}, "attn_input_format must agree with core_attention_bias (2 tokens each)"),
    ({"attn_input_format": "sbhd"}, {"inference_params": step(a=5, b=5)}, "attn_input_format must agree with inference_params (2 sequences): in 'sbhd' hidden_states [2, 5, 24] are 5 sequences of 2"),
    ({"layer_type": "decoder", "attn_input_format": "sbhd"}, {"encoder_output": torch.randn(2, 7, HIDDEN)}, "attn_input_format must agree with encoder_output [2, 7, 24]: in 'sbhd' hidden_states [2, 5, 24] are 5 sequences of 2"),
    # a cache
    ({"layer_number": None}, {"inference_params": step(a=5, b=5)}, "inference_params must come with a layer_number, got None\n  HINT: layer_number=1 at construction, 2 for the next layer"),
    ({}, {"inference_params": InferenceParams(3, 24, HEADS, 6, torch.float32)}, "inference_params must be told of the sequences before the model runs"),
    ({"attention_dropout": 0.1}, {"inference_params": step(a=5, b=5)}, "inference_params must come in evaluation mode, or without attention_dropout, got training mode\n  HINT: module.eval()"),
    ({}, {"inference_params": step(a=5, b=5), "cu_seqlens_q": cu(LENGTHS)}, "cu_seqlens_q must be those of inference_params, or None, got [0, 5, 8]\n  HINT: pre_step was told of [5, 5] new tokens"),
    ({"self_attn_mask_type": "padding"}, {"inference_params": step(a=5, b=5), "attention_mask": torch.zeros(2, 1, 1, 5, dtype=torch.bool)}, "attention_mask must be None with inference_params"),
    ({"self_attn_mask_type": "no_mask"}, {"inference_params": step(a=5, b=5), "bottom_right_diagonal": False}, "bottom_right_diagonal must not be False with inference_params"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "call", "said"), BAD_CALLS, ids=[f"{n}-{c[2][:40]}" for n, c in enumerate(BAD_CALLS)]
)
def test_what_a_call_says_of_a_wrong_argument(
    options: dict[str, Any], call: dict[str, Any], said: str
) -> None:
    module = TransformerLayer(
        HIDDEN,
        FFN,
        HEADS,
        **({"attn_input_format": "bshd", "attention_dropout": 0.0, "layer_number": 1} | options),
    )
    with torch.no_grad(), pytest.raises(InputError) as caught:
        module(**({"hidden_states": X} | call))
    assert str(caught.value).startswith(said)
    assert caught.value.argument == said.split(" ")[0]


def test_process_groups_have_their_place() -> None:
    """Without context parallelism both may be called with None, as TransformerEngine's models do."""
    module = layer("bshd", layer_type="decoder")
    module.set_context_parallel_group(None, None, None)
    module.set_tensor_parallel_group(None)
    with pytest.raises(InputError, match="tp_group must be None"):
        module.set_tensor_parallel_group(object())


def test_a_refused_call_leaves_the_cache_alone() -> None:
    """A decoder without its encoder's output is refused before its self-attention has put anything anywhere."""
    module, params = layer("bshd", layer_type="decoder").eval(), cache(False)
    params.pre_step(OrderedDict(a=5))
    with torch.inference_mode(), pytest.raises(InputError, match="encoder_output must be"):
        module(torch.randn(1, 5, HIDDEN, dtype=torch.float64), inference_params=params)
    assert not params.has_memory(1)


@pytest.mark.parametrize("shape", [(0, 5), (2, 0)], ids=["no-sequence", "no-token"])
def test_nothing_in_nothing_out(shape: tuple[int, int]) -> None:
    x = torch.randn(*shape, HIDDEN, dtype=torch.float64, requires_grad=True)
    out = layer("bshd", drop_path_rate=0.5)(x, rotary_pos_emb=RotaryPositionEmbedding(6)(5))
    out.sum().backward()
    assert out.shape == x.shape


def test_an_empty_document_and_a_tail_without_one() -> None:
    """Tokens behind the last sequence attend to nothing; what a layer makes of them is finite."""
    module = layer("thd", self_attn_mask_type="padding_causal")
    plain_layer.shaken(module)
    x = torch.randn(7, HIDDEN, dtype=torch.float64)
    out = module(x, cu_seqlens_q=torch.tensor([0, 0, 5]), rotary_pos_emb=RotaryPositionEmbedding(6)(5))
    alone = module(x[:5], cu_seqlens_q=torch.tensor([0, 5]), rotary_pos_emb=RotaryPositionEmbedding(6)(5))
    torch.testing.assert_close(out[:5], alone)
    assert out[5:].isfinite().all()


def test_gradients_of_every_sample() -> None:
    """torch.func: vmap over grad gives what a loop over samples does."""
    module = layer("bshd", num_gqa_groups=2)
    parameters = dict(module.named_parameters())
    xs = torch.randn(3, 5, HIDDEN, dtype=torch.float64)

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(module, parameters, (x[None],)).square().sum()

    together = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, xs)
    for n, x in enumerate(xs):
        for name, gradient in torch.func.grad(loss)(parameters, x).items():
            torch.testing.assert_close(together[name][n], gradient)

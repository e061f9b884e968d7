"""Generation step by step equals one pass, for every variant of a layer and both kinds of cache."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import plain_layer
import pytest
import torch
from layer_cases import ENCODER, FORMATS, HEADS, HIDDEN, OPTIONS, cache, cu, in_format, layer, split_sequences
from torch import Tensor

from undivided import InputError, RotaryPositionEmbedding, TransformerLayer


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


STEPS = {"at-once": (12,), "one-by-one": (1,) * 12, "chunks": (5, 1, 4, 2), "prompt-then-tokens": (9, 1, 1, 1)}
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


@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("options", GENERATION.values(), ids=GENERATION)
def test_tokens_step_by_step_equal_one_pass(
    options: dict[str, Any], steps: tuple[int, ...], format: str, paged: bool
) -> None:
    generate(options, steps, format, paged)


@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
@pytest.mark.parametrize("format", ["bshd", "thd"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_generation_with_every_arrangement_of_a_layer(options: dict[str, Any], format: str, paged: bool) -> None:
    """A decoder layer caches its self-attention; its cross-attention sees the whole encoder output at every step."""
    generate(options, STEPS["chunks"], format, paged)


@pytest.mark.parametrize("offsets", ["of-the-cache", "none"])
@pytest.mark.parametrize("format", FORMATS)
def test_a_decoder_takes_the_offsets_of_its_queries_from_the_cache(format: str, offsets: str) -> None:
    """The cache's own offsets have an entry for each sequence that it may hold, here one more than there are."""
    generate(OPTIONS["decoder"], STEPS["chunks"], format, True, offsets)


def generate(
    options: dict[str, Any], steps: tuple[int, ...], format: str, paged: bool, offsets: str = "of-the-call"
) -> None:
    """Two layers share one InferenceParams; rotary positions continue after the cached tokens."""
    options = {"self_attn_mask_type": "padding_causal"} | options
    layers = [layer(format, **(options | {"layer_number": n})).eval() for n in (1, 2)]
    for n, module in enumerate(layers):
        plain_layer.with_random_parameters(module, n)
    sizes = options.get("kv_channels", (6, 6))
    sizes = sizes if isinstance(sizes, tuple) else (sizes, sizes)
    rope = RotaryPositionEmbedding(sizes[0]).cos_sin(12)
    xs = [torch.randn(12, HIDDEN, dtype=torch.float64) for _ in range(2)]
    params = cache(paged, options.get("num_gqa_groups", HEADS), sizes)
    encoder: dict[str, Any] = {}
    if options.get("layer_type") == "decoder":
        encoders = [torch.randn(n, HIDDEN, dtype=torch.float64) for n in ENCODER]
        encoder = {
            "encoder_output": in_format(encoders, format),
            "cu_seqlens_kv": cu(ENCODER),
            "enc_dec_attn_mask_type": "padding",
        }

    def model(x: Tensor, counts: tuple[int, ...], **call: Any) -> Tensor:
        if encoder or not call:
            given = {"of-the-call": cu(counts), "of-the-cache": params.cu_seqlens_q, "none": None}
            call["cu_seqlens_q"] = given[offsets if "inference_params" in call else "of-the-call"]
        for module in layers:
            x = module(x, rotary_pos_emb=rope, **call, **encoder)
        return x

    with torch.inference_mode():
        full = split_sequences(model(in_format(xs, format), (12, 12)), (12, 12), format)
        found: list[list[Tensor]] = [[], []]
        start = 0
        for count in steps:
            params.pre_step(OrderedDict(a=count, b=count))
            new = in_format([x[start : start + count] for x in xs], format)
            out = model(new, (count, count), inference_params=params)
            for n, part in enumerate(split_sequences(out, (count, count), format)):
                found[n].append(part)
            start += count
    for n in range(2):
        torch.testing.assert_close(torch.cat(found[n]), full[n], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
@pytest.mark.parametrize("format", FORMATS)
def test_sequences_start_and_end_with_unequal_numbers_of_tokens(format: str, paged: bool) -> None:
    """A ragged batch of prompts and single tokens, in which sequences end, start and change their order."""
    module = layer(format, self_attn_mask_type="padding_causal", window_size=(5, 0), num_gqa_groups=2).eval()
    plain_layer.with_random_parameters(module)
    rope, params = RotaryPositionEmbedding(6)(24), cache(paged, 2)
    xs = {name: torch.randn(12, HIDDEN, dtype=torch.float64) for name in "abcd"}
    alone = {name: layer_alone(module, x, rope) for name, x in xs.items()}
    at = dict.fromkeys(xs, 0)
    script = [{"a": 5, "b": 2}, {"a": 1, "b": 3}, {"b": 1, "c": 7, "a": 2}, {"c": 1, "b": 4}, {"d": 3, "c": 1, "b": 1}]
    with torch.inference_mode():
        for step in script:
            params.pre_step(OrderedDict(step))
            new = [xs[name][at[name] : at[name] + count] for name, count in step.items()]
            counts = tuple(step.values())
            call = {} if format != "thd" else {"cu_seqlens_q": cu(counts)}  # accepted, and not required
            out = module(in_format(new, format), inference_params=params, rotary_pos_emb=rope, **call)
            for (name, count), part in zip(step.items(), split_sequences(out, counts, format), strict=True):
                torch.testing.assert_close(part, alone[name][at[name] : at[name] + count], rtol=1e-6, atol=1e-7)
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
    plain_layer.with_random_parameters(module)
    x = torch.randn(2, 8, HIDDEN, dtype=torch.float64)
    hidden = (torch.rand(2, 1, 8, 8) < 0.4) | torch.ones(8, 8, dtype=torch.bool).triu(1)
    bias, slopes = torch.randn(1, HEADS, 8, 8, dtype=torch.float64), torch.rand(HEADS)
    arbitrary = {"self_attn_mask_type": "arbitrary"}
    biased = {"core_attention_bias_type": "post_scale_bias"}
    alibi: dict[str, Any] = {"core_attention_bias_type": "alibi", "alibi_slopes": slopes}
    with torch.inference_mode():
        for call, pairs in (
            (arbitrary, {"attention_mask": hidden}),
            (biased, {"core_attention_bias": bias}),
            (alibi, {}),
        ):
            full, params, start = module(x, **call, **pairs), cache(True), 0
            for count in (4, 1, 3):
                stop = start + count
                params.pre_step(OrderedDict(a=count, b=count))
                part = {name: tensor[:, :, start:stop, :stop] for name, tensor in pairs.items()}
                out = module(x[:, start:stop], inference_params=params, **call, **part)
                torch.testing.assert_close(out, full[:, start:stop], rtol=1e-6, atol=1e-7)
                start = stop


def test_a_refused_call_does_not_change_the_cache() -> None:
    """A decoder without encoder output is refused before its self-attention changes the cache."""
    module, params = layer("bshd", layer_type="decoder").eval(), cache(False)
    params.pre_step(OrderedDict(a=5))
    with torch.inference_mode(), pytest.raises(InputError, match="encoder_output must be"):
        module(torch.randn(1, 5, HIDDEN, dtype=torch.float64), inference_params=params)
    assert not params.has_memory(1)

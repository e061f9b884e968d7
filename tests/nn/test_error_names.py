"""Errors and hints have the argument names of the module that the caller used, and name a step that helps."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from layer_cases import HEADS, HIDDEN, cu, layer

from undivided import (
    ContextParallel,
    DotProductAttention,
    InferenceParams,
    InputError,
    MultiheadAttention,
    RotaryPositionEmbedding,
    TransformerLayer,
)
from undivided.context_parallel.exchange.simulate import simulate

Q = torch.randn(6, HEADS, 6)
PADDED = "\n  HINT: pass padded tokens, in {0} 'bshd' or 'sbhd', in this call"
BIAS = {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": torch.zeros(1, HEADS, 1, 1)}
PAIRS = {"attention_mask": torch.zeros(1, 1, 5, 3, dtype=torch.bool)}


def message_of(function: Any, *args: Any, **kwargs: Any) -> str:
    with torch.no_grad(), pytest.raises(InputError) as caught:
        function(*args, **kwargs)
    error = caught.value
    first, _, hint = str(error).partition("\n  HINT: ")
    assert (first.split(" ")[0], hint) == (error.argument, error.hint or "")
    return str(error)


def cache(dtype: torch.dtype = torch.float32, format: str = "bshd") -> InferenceParams:
    params = InferenceParams(2, 16, HEADS, 6, dtype, qkv_format=format)
    params.pre_step(OrderedDict(a=2, b=3))
    return params


@pytest.mark.parametrize("format", ["bshd", "thd"])
@pytest.mark.parametrize(
    ("mask_type", "call", "expected"),
    [
        ("padding_causal", BIAS, "core_attention_bias must be None in {0} 'thd', got a tensor"),
        ("arbitrary", PAIRS, "attention_mask must consist of causal, window, sinks, chunks, prefix, tree, blocks and pages in {0} 'thd', got dense(<bool [1, 1, 5, 3]>)"),  # noqa: E501
    ],
)  # fmt: skip
def test_packed_tokens_with_a_cache_refuse_what_depends_on_pairs(
    format: str, mask_type: str, call: dict[str, Any], expected: str
) -> None:
    """The format of the cache does not matter: that of the call decides."""
    attention = DotProductAttention(HEADS, 6, qkv_format="thd", attn_mask_type=mask_type, layer_number=1)
    q = Q[:5]
    found = message_of(attention, q, q, q, inference_params=cache(format=format), **call)
    assert found == (expected + PADDED).format("qkv_format")
    module = layer("thd", self_attn_mask_type=mask_type, params_dtype=torch.float32).eval()
    found = message_of(module, torch.randn(5, HIDDEN), inference_params=cache(format=format), **call)
    assert found == (expected + PADDED).format("attn_input_format")


@pytest.mark.parametrize("format", ["bshd", "sbhd"])
def test_the_hint_for_packed_tokens_with_a_cache_helps(format: str) -> None:
    module = layer(format, self_attn_mask_type="padding_causal", params_dtype=torch.float32).eval()
    x = torch.randn(2, 3, HIDDEN)
    with torch.no_grad():
        out = module(x if format == "bshd" else x.transpose(0, 1), inference_params=cache(), **BIAS)
    assert out.isfinite().all()


@pytest.mark.parametrize(
    ("padded", "expected"),
    [
        ((2, 6), "cu_seqlens_q_padded must leave room for document 0 of length 3, got 2 slots\n  HINT: cu_seqlens_q_padded holds the offset of each document in memory, then the total"),  # noqa: E501
        ((3, 5), "cu_seqlens_q_padded must have cu_seqlens_q_padded[-1] of 6, the q tokens, got 5\n  HINT: its last offset is the number of tokens in memory, with those after the last sequence"),  # noqa: E501
    ],
)  # fmt: skip
def test_hints_for_padded_offsets_have_their_names(padded: tuple[int, ...], expected: str) -> None:
    attention = DotProductAttention(HEADS, 6, qkv_format="thd", attn_mask_type="padding")
    offsets = {"cu_seqlens_q": cu((3, 2)), "cu_seqlens_q_padded": torch.tensor([0, *padded])}
    assert message_of(attention, Q, Q, Q, **offsets) == expected


@pytest.mark.parametrize("kind", ["attention", "layer"])
def test_a_cache_of_another_dtype_is_named(kind: str) -> None:
    attention: Any = DotProductAttention(HEADS, 6, qkv_format="bshd", layer_number=1)
    call: tuple[torch.Tensor, ...] = (torch.randn(2, 3, HEADS, 6).bfloat16(),) * 3
    if kind == "layer":
        attention, call = layer("bshd", params_dtype=torch.bfloat16).eval(), (torch.randn(2, 3, HIDDEN).bfloat16(),)
    assert message_of(attention, *call, inference_params=cache()) == (
        "inference_params must have the dtype of the layer's keys (torch.bfloat16), got torch.float32\n"
        "  HINT: InferenceParams(..., dtype=torch.bfloat16)"
    )


def test_keys_that_autocast_converts_may_have_another_dtype() -> None:
    module, x = layer("bshd", params_dtype=torch.float32).eval(), torch.randn(2, 3, HIDDEN)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert module(x, inference_params=cache()).shape == x.shape


def test_angles_that_are_too_wide_are_compared_with_the_head_size() -> None:
    freqs = RotaryPositionEmbedding(8)(5)
    found = message_of(layer("bshd"), torch.randn(2, 5, HIDDEN, dtype=torch.float64), rotary_pos_emb=freqs)
    expected = "rotary_pos_emb must have an even number of channels, at most the head size (6), got 8 in [5, 1, 1, 8]"
    assert found == expected


def test_offsets_beyond_the_tokens_are_compared_with_the_hidden_states() -> None:
    module = layer("thd", self_attn_mask_type="padding")
    call = {"cu_seqlens_q": cu((4, 3)), "rotary_pos_emb": RotaryPositionEmbedding(6)(8)}
    found = message_of(module, torch.randn(5, HIDDEN, dtype=torch.float64), **call)
    assert found == "cu_seqlens_q must end at the tokens of hidden_states at most (5), got 7"


def on_ranks(module: TransformerLayer | MultiheadAttention, *call: torch.Tensor) -> str:
    def work(group: Any) -> None:
        module.set_context_parallel_group(ContextParallel(group).bind(16))
        module(*call)

    return message_of(simulate, 1, work)


def test_whole_hidden_states_over_ranks_are_named() -> None:
    x = torch.randn(2, 12, HIDDEN, dtype=torch.float64)
    expected = (
        "hidden_states must have rank 0's 16 of 16 tokens, got 12 in [2, 12, 4, 6]\n"
        "  HINT: cp.bind(q_len, kv_len, mask), then hidden_states = cp.shard(hidden_states, layout='bshd', of='q')"
    )
    assert on_ranks(layer("bshd"), x) == expected
    assert on_ranks(MultiheadAttention(HIDDEN, HEADS, qkv_format="bshd", params_dtype=torch.float64), x) == expected


def test_the_keys_of_cross_attention_over_ranks_are_those_of_the_encoder() -> None:
    module = MultiheadAttention(
        HIDDEN, HEADS, qkv_format="bshd", attention_type="cross", attn_mask_type="no_mask", params_dtype=torch.float64
    )
    x = torch.randn(2, 16, HIDDEN, dtype=torch.float64)

    def work(group: Any) -> None:
        module.set_context_parallel_group(ContextParallel(group).bind(16))
        module(x, encoder_output=x[:, :12])

    found = message_of(simulate, 1, work)
    assert found.startswith("encoder_output must have rank 0's 16 of 16 tokens, got 12")
    assert found.endswith("then encoder_output = cp.shard(encoder_output, layout='bshd', of='kv')")

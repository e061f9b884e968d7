"""MultiheadAttention with a cache."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import plain_layer
import pytest
import torch
from layer_cases import in_format, split_sequences
from torch import Tensor

import undivided
from undivided import DotProductAttention, InferenceParams, InputError, MultiheadAttention, TransformerLayer, masks

HIDDEN, HEADS, GROUPS = 24, 4, 2


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


MASK_TYPES = ("no_mask", "padding", "causal", "padding_causal", "causal_bottom_right", "padding_causal_bottom_right")


WINDOWS: dict[str, tuple[int, int] | None] = {"all": None, "window": (3, 0), "two-sided": (2, 1)}


@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
@pytest.mark.parametrize("format", ["sbhd", "bshd", "thd"])
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("kind", MASK_TYPES)
def test_every_mask_type_on_a_cache(kind: str, window: tuple[int, int] | None, format: str, paged: bool) -> None:
    """New tokens are the last of their sequences: equal to `undivided.attention` over all keys, bottom-right."""
    if "causal" in kind and window == (2, 1):
        window = (2, 0)
    module = DotProductAttention(HEADS, 6, GROUPS, 0.0, format, kind, window, layer_number=7, softmax_type="learnable")
    plain_layer.with_random_parameters(module)
    params = InferenceParams(2, 16, GROUPS, 6, torch.float64, is_paged=paged, page_size=4 if paged else None)
    seen: dict[str, list[Tensor]] = {
        name: [torch.empty(0, n, 6, dtype=torch.float64) for n in (GROUPS, GROUPS)] for name in "ab"
    }
    left, right = window or (-1, -1)
    mask = masks.window(left, 0 if "causal" in kind else right, "bottom_right")
    for counts in ((4, 2), (1, 1), (2, 5)):
        q = [torch.randn(n, HEADS, 6, dtype=torch.float64) for n in counts]
        new = [[torch.randn(n, GROUPS, 6, dtype=torch.float64) for _ in "kv"] for n in counts]
        params.pre_step(OrderedDict(zip("ab", counts, strict=True)))
        out = module(*(in_format(list(t), format) for t in (q, *zip(*new, strict=True))), inference_params=params)
        for n, name in enumerate("ab"):
            seen[name] = [torch.cat(pair) for pair in zip(seen[name], new[n], strict=True)]
            k, v = seen[name]
            wanted = undivided.attention(
                q[n][None], k[None], v[None], layout="bshd", mask=mask, sinks=module.softmax_offset, backend="reference"
            )[0].flatten(-2)
            torch.testing.assert_close(split_sequences(out, counts, format)[n], wanted)


def test_a_largest_score_is_not_returned_from_a_cache() -> None:
    params = InferenceParams(2, 16, HEADS, 6, torch.float32)
    params.pre_step({"a": 3})
    q = torch.randn(1, 3, HEADS, 6)
    module = DotProductAttention(HEADS, 6, qkv_format="bshd", return_max_logit=True)
    with pytest.raises(InputError, match="inference_params must be None with return_max_logit"):
        module(q, q, q, inference_params=params)


CROSS = {
    "no_mask": ({}, None),
    "causal": ({"mask_type": "causal"}, "attn_mask_type must not depend on the positions of the queries"),
    "causal_bottom_right": ({"mask_type": "causal_bottom_right"}, "attn_mask_type must not depend"),
    "window": ({"window": (1, 1)}, "window_size must not depend"),
    "alibi": ({"bias_type": "alibi"}, "core_attention_bias_type must not depend"),
}


@pytest.mark.parametrize("where", ["layer", "call"])
@pytest.mark.parametrize("name", CROSS)
def test_cross_attention_of_a_step_is_that_of_the_whole_or_refused(name: str, where: str) -> None:
    """A step counted its first query as position 0, so causal masks, windows and ALiBi gave other numbers."""
    options, message = CROSS[name]
    kind, window = options.get("mask_type", "no_mask"), options.get("window")
    of_mask = {"attn_mask_type": kind, "window_size": window}
    layer = MultiheadAttention(
        32,
        2,
        attention_type="cross",
        qkv_format="bshd",
        layer_number=1,
        params_dtype=torch.float64,
        attention_dropout=0.0,
        **(of_mask if where == "layer" else {"attn_mask_type": "no_mask"}),
    ).eval()
    at_call = {"core_attention_bias_type": options.get("bias_type", "no_bias")} | (of_mask if where == "call" else {})
    x, encoder = torch.randn(2, 1, 6, 32, dtype=torch.float64)
    with torch.no_grad():
        whole = layer(x, encoder_output=encoder, **at_call)
        params, parts = InferenceParams(1, 16, 2, 16, torch.float64), []
        for start, count in ((0, 4), (4, 2)):
            params.pre_step({"a": count})
            given = {"encoder_output": encoder, "inference_params": params, **at_call}
            if message is not None:
                with pytest.raises(InputError, match=message):
                    layer(x[:, start : start + count], **given)
                return
            parts.append(layer(x[:, start : start + count], **given))
    torch.testing.assert_close(torch.cat(parts, 1), whole)


def test_a_decoder_refuses_positions_in_cross_attention_before_its_cache_changes() -> None:
    layer = TransformerLayer(
        32, 64, 2, layer_type="decoder", layer_number=1, attn_input_format="bshd", enc_dec_attn_mask_type="causal"
    ).eval()
    x, params = torch.randn(1, 4, 32), InferenceParams(1, 16, 2, 16, torch.float32)
    params.pre_step({"a": 4})
    with torch.no_grad(), pytest.raises(InputError, match="enc_dec_attn_mask_type must not depend"):
        layer(x, encoder_output=x, inference_params=params)
    assert params.memory.values == 0


@pytest.mark.parametrize("device", [None, "cpu"])
def test_two_layers_with_one_number_are_refused(device: str | None) -> None:
    """The second layer replaced the keys of the first, and a step later both read its keys."""
    layers = [MultiheadAttention(HIDDEN, HEADS, qkv_format="bshd", layer_number=1).eval() for _ in range(2)]
    params = InferenceParams(1, 16, HEADS, HIDDEN // HEADS, torch.float32, device=device)
    x = torch.randn(1, 3, HIDDEN)
    with torch.no_grad():
        params.pre_step({"a": 3})
        first = layers[0](x, inference_params=params)
        with pytest.raises(InputError, match=r"layer_number must be that of one layer: .*, got 1 from two layers"):
            layers[1](x, inference_params=params)
        params.pre_step({"b": 3})
        assert torch.allclose(layers[0](x, inference_params=params), first)


def test_a_second_call_of_a_layer_in_one_step_is_refused() -> None:
    """Without `pre_step` each call replaced the token of the one before, without an error."""
    layer = MultiheadAttention(HIDDEN, HEADS, qkv_format="bshd", layer_number=1).eval()
    params = InferenceParams(1, 16, HEADS, HIDDEN // HEADS, torch.float32)
    x = torch.randn(1, 1, HIDDEN)
    with torch.no_grad():
        params.pre_step({"a": 1})
        with pytest.raises(InputError):
            layer(x, inference_params=params, attn_mask_type="wrong")
        first = layer(x, inference_params=params)  # a call that failed may be repeated
        with pytest.raises(InputError, match=r"got a second call of layer 1 in one step\n  HINT: pre_step\(\.\.\.\)"):
            layer(x, inference_params=params)
        params.truncate("a", 0)
        params.pre_step({"a": 1})
        assert torch.allclose(layer(x, inference_params=params), first)
        params.pre_step({"a": 1})
        layer(x, inference_params=params)
        assert dict(params.sequences) == {"a": 2}


@pytest.mark.parametrize(
    ("format", "call", "message"),
    [
        ("bshd", {"max_seqlen_q": 2.5}, "max_seqlen_q must be an int, got 2.5"),
        ("bshd", {"pad_between_seqs": "no"}, "pad_between_seqs must be True or False, got 'no'"),
        ("thd", {"max_seqlen_kv": -1}, "max_seqlen_kv must be at least 0, got -1"),
        ("thd", {"max_seqlen_q": 2}, "max_seqlen_q must be at least the new tokens of the longest sequence (3), got 2"),
        ("thd", {"max_seqlen_kv": 6}, "max_seqlen_kv must be at least the cached tokens of the longest sequence (7)"),
        ("thd", {"pad_between_seqs": True}, "pad_between_seqs must be False or None with inference_params, got True"),
        ("thd", {"max_seqlen_q": 3, "max_seqlen_kv": 7, "pad_between_seqs": False}, None),
    ],
)
def test_lengths_and_padding_are_checked_with_a_cache(format: str, call: dict[str, Any], message: str | None) -> None:
    module = DotProductAttention(HEADS, 6, GROUPS, qkv_format=format, attn_mask_type="padding_causal", layer_number=1)
    params = InferenceParams(2, 16, GROUPS, 6, torch.float32)

    def step(counts: tuple[int, int], call: dict[str, Any]) -> None:
        params.pre_step(OrderedDict(zip("ab", counts, strict=True)))
        q, k, v = (in_format([torch.zeros(n, h, 6) for n in counts], format) for h in (HEADS, GROUPS, GROUPS))
        module(q, k, v, inference_params=params, **call)

    step((4, 2), {})
    if message is None:
        step((3, 3), call)
        return
    with pytest.raises(InputError) as caught:
        step((3, 3), call)
    assert str(caught.value).startswith(message)


@pytest.mark.slow
def test_a_compiled_layer_generates_without_warnings_of_the_compiler(caplog: pytest.LogCaptureFixture) -> None:
    """The number of cached tokens was read inside of the graph, by a call that torch.compile reports."""
    layer = MultiheadAttention(HIDDEN, HEADS, qkv_format="bshd", layer_number=1).eval()
    torch._dynamo.reset()
    outs = []
    with torch.no_grad(), caplog.at_level("WARNING", logger="torch._dynamo"):
        for function in (layer, torch.compile(layer, backend="aot_eager")):
            params = InferenceParams(1, 16, HEADS, HIDDEN // HEADS, torch.float32)
            x = torch.randn(1, 5, HIDDEN, generator=torch.Generator().manual_seed(1))
            for start, stop in ((0, 3), (3, 4), (4, 5)):
                params.pre_step({"a": stop - start})
                outs.append(function(x[:, start:stop], inference_params=params))
    assert not caplog.records
    for eager, compiled in zip(outs[:3], outs[3:], strict=True):
        torch.testing.assert_close(compiled, eager)


def test_a_cache_without_no_grad_is_refused() -> None:
    layer = MultiheadAttention(HIDDEN, HEADS, qkv_format="bshd", layer_number=1).eval()
    params = InferenceParams(1, 16, HEADS, HIDDEN // HEADS, torch.float32)
    params.pre_step({"a": 1})
    message = (
        r"inference_params must be used without gradients \(a cache has no backward\)(.|\n)*HINT: call under torch"
    )
    with pytest.raises(InputError, match=message):
        layer(torch.randn(1, 1, HIDDEN), inference_params=params)

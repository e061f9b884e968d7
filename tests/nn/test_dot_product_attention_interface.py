# ruff: noqa: E501 (tables of messages)
"""DotProductAttention as a module: its signature, documentation, errors, and use as a PyTorch module."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from undivided import DotProductAttention, InputError, NoBackendError

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "coming-from-transformer-engine.md"


CONSTRUCTOR = """
num_attention_heads kv_channels num_gqa_groups=None attention_dropout=0.0 qkv_format='sbhd' attn_mask_type='causal'
window_size=None bottom_right_diagonal=None sequence_parallel=False tp_size=1 get_rng_state_tracker=None tp_group=None
layer_number=None attention_type='self' cp_group=None cp_global_ranks=None cp_stream=None cp_comm_type='p2p'
softmax_scale=None softmax_type='vanilla' return_max_logit=False name=None
""".split()


FORWARD = """
query_layer=None key_layer=None value_layer=None attention_mask=None qkv_format=None cu_seqlens_q=None cu_seqlens_kv=None
cu_seqlens_q_padded=None cu_seqlens_kv_padded=None max_seqlen_q=None max_seqlen_kv=None attn_mask_type=None
window_size=None bottom_right_diagonal=None checkpoint_core_attention=False core_attention_bias_type='no_bias'
core_attention_bias=None alibi_slopes=None fast_zero_fill=True inference_params=None pad_between_seqs=None
fp8_output=False bf16_backward=False num_splits=1 score_mod=None score_mod_bprop=None score_mod_tensors=None
score_mod_bprop_tensors=None qkv_layer=None kv_layer=None qkv_interleave_dim=-3
""".split()


def positional(function: Callable[..., Any]) -> list[str]:
    """name=default of every positional argument, in order, without self."""
    parameters = list(inspect.signature(function).parameters.values())
    return [
        p.name if p.default is p.empty else f"{p.name}={p.default!r}"
        for p in parameters
        if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self"
    ]


def test_the_constructor_is_transformer_engines_except_the_format() -> None:
    """Argument by argument; only the format has no default, because shapes do not reveal a wrong one."""
    without_default = [word.replace("qkv_format='sbhd'", "qkv_format=None") for word in CONSTRUCTOR]
    assert positional(DotProductAttention.__init__) == without_default
    extra = [p.name for p in inspect.signature(DotProductAttention).parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert extra == ["backend", "softcap", "device"]


def test_the_call_is_transformer_engines() -> None:
    assert positional(DotProductAttention.forward) == FORWARD
    wanted = ["cp_group", "cp_global_ranks", "cp_stream", "cp_comm_type='p2p'"]
    assert [w.split("=")[0] for w in positional(DotProductAttention.set_context_parallel_group)] == [
        w.split("=")[0] for w in wanted
    ]


ROW = re.compile(r"^\| `(\w+)` \| (works|hint|refused|different)\b[^|]* \| [^|]+ \|$", re.MULTILINE)


@pytest.mark.parametrize(
    ("heading", "signature", "beyond"),
    [("## The constructor", CONSTRUCTOR, ["backend", "softcap", "device"]), ("## The call", FORWARD, [])],
)
def test_the_page_describes_every_argument(heading: str, signature: list[str], beyond: list[str]) -> None:
    section = PAGE.read_text(encoding="utf-8").split(heading + "\n")[1].split("\n## ")[0]
    rows = dict(ROW.findall(section))
    names = [word.split("=")[0] for word in signature]
    assert list(rows) == names + beyond
    from undivided.nn.arguments import refused as tables

    refused = {} if beyond else tables.AT_CALL
    assert [name for name in names if rows[name] == "refused"] == [name for name in names if name in refused]


Q = torch.randn(2, 6, 4, 8)


KV = torch.randn(2, 6, 2, 8)


T = torch.randn(12, 4, 8)


CU = torch.tensor([0, 5, 12], dtype=torch.int32)


def bad(arguments: dict[str, Any], expected: str) -> Any:
    return pytest.param(
        arguments, expected, id="-".join(f"{k}={str(v)[:24]}" for k, v in arguments.items()) or "nothing"
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        bad({"num_attention_heads": 0}, "num_attention_heads must be at least 1, got 0"),
        bad({"num_attention_heads": 4.0}, "num_attention_heads must be an int, got 4.0"),
        bad({"kv_channels": 0}, "kv_channels must be at least 1, got 0"),
        bad({"kv_channels": (8, 8, 8)}, "kv_channels must be an int or a pair (queries and keys, values), got (8, 8, 8)"),
        bad({"num_gqa_groups": 3}, "num_gqa_groups must divide num_attention_heads (4), got 3"),
        bad({"attention_dropout": 1.5}, "attention_dropout must be a number from 0 to 1, got 1.5"),
        bad({"qkv_format": "bhsd"}, "qkv_format must be one of 'sbhd', 'bshd', 'thd', got 'bhsd'\n  HINT: x.transpose(1, 2)"),
        bad({"attn_mask_type": "casual"}, "attn_mask_type must be one of 'no_mask', 'padding', 'causal', "),
        bad({"window_size": 128}, "window_size must be a pair (left, right), got 128\n  HINT: (128, 0) allows 128 earlier keys"),
        bad({"window_size": (-2, 0)}, "window_size[0] must be at least -1, got -2"),
        bad({"bottom_right_diagonal": 1}, "bottom_right_diagonal must be True or False, got 1"),
        bad({"attention_type": "both"}, "attention_type must be one of 'self', 'cross', got 'both'"),
        bad({"softmax_scale": float("nan")}, "softmax_scale must be a finite number"),
        bad({"softmax_type": "off_by_one"}, "softmax_type must be one of 'vanilla', 'off-by-one', 'learnable', got 'off_by_one'\n  HINT: did you mean"),
        bad({"return_max_logit": None}, "return_max_logit must be True or False, got None"),
        bad({"layer_number": "first"}, "layer_number must be an int, got 'first'"),
        bad({"softcap": -1.0}, "softcap must be a positive number or None, got -1.0"),
        bad({"sequence_parallel": 1}, "sequence_parallel must be True or False, got 1"),
        bad({"tp_size": 0}, "tp_size must be at least 1, got 0"),
        bad({"tp_size": 3}, "num_attention_heads must be a multiple of tp_size (3), got 4"),
        bad({"tp_size": 4, "num_gqa_groups": 2}, "num_gqa_groups must be a multiple of tp_size (4), got 2"),
        bad({"tp_group": object}, "tp_group must be a torch.distributed process group or None, got type\n  HINT: mesh.get_group"),
        bad({"get_rng_state_tracker": 1}, "get_rng_state_tracker must be a function or None, got int\n  HINT: a function without arguments"),
        bad({"cp_group": object}, "group must be a process group"),
        bad({"cp_comm_type": "ring"}, "cp_comm_type must be one of 'p2p', 'all_gather', 'a2a', 'a2a+p2p', got 'ring'"),
    ],
)  # fmt: skip
def test_errors_of_the_constructor(arguments: dict[str, Any], expected: str) -> None:
    with pytest.raises(InputError) as caught:
        DotProductAttention(**({"num_attention_heads": 4, "kv_channels": 8} | arguments))
    assert str(caught.value).startswith(expected)
    assert caught.value.argument == expected.split(" ")[0]


def padding(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bool)


PACKED = {"qkv_format": "thd", "attn_mask_type": "padding_causal"}


BAD_CALLS = [
    # formats and shapes
    ((Q, Q, Q), {"qkv_format": None}, "qkv_format must be given at construction or at the call",
     "'sbhd' if your batch size is 6, 'bshd' if it is 2"),
    ((T, T, T), {"qkv_format": None}, "qkv_format must be given", "three axes: 'thd', or [batch, seq, hidden]"),
    ((Q, Q, Q), {"qkv_format": "hsbd"}, "qkv_format must be one of 'sbhd', 'bshd', 'thd', got 'hsbd'", "Megatron"),
    ((Q.flatten(2),) * 3, {}, "query_layer must have 4 axes [b, s, h, d] in qkv_format='bshd', got 3 axes [2, 6, 32]",
     "split the heads of a [batch, seq, hidden] tensor: x.unflatten(-1, (4, 8))"),
    ((T, T, T), {}, "query_layer must have 4 axes", "is qkv_format='thd', with cu_seqlens_q and a padding mask type"),
    ((Q, Q, Q), PACKED, "query_layer must have 3 axes [t, h, d] in qkv_format='thd', got 4 axes", "thd has no batch axis"),
    ((Q.transpose(1, 2),) * 3, {}, "query_layer must have 4 heads (num_attention_heads) at axis 2, got 6", "x.transpose(1, 2) is 'bshd'"),
    ((Q, KV, KV), {}, "key_layer must have 4 heads (num_gqa_groups) at axis 2, got 2", "num_gqa_groups=2 at construction"),
    ((Q[..., :4],) * 3, {}, "query_layer must have head size 8 (kv_channels), got 4 in [2, 6, 4, 4]", ""),
    ((Q, Q, Q[..., :4]), {}, "value_layer must have head size 8", "kv_channels=(queries and keys, values)"),
    ((Q, Q[:, :5], Q), {}, "value_layer must have the axes [2, 5, 4] of key_layer", ""),
    ((Q, Q[:1], Q[:1]), {}, "key_layer must have query_layer's batch size (2) in qkv_format='bshd', got 1",
     "these shapes would fit qkv_format='sbhd'"),
    ((Q, Q.half(), Q), {}, "key_layer must have query_layer's dtype (torch.float32), got torch.float16", "autocast"),
    ((Q, Q.to("meta"), Q), {}, "key_layer must be on query_layer's device (cpu), got meta", ""),
    ((Q.int(),) * 3, {}, "query_layer must be float16, bfloat16, float32 or float64, got torch.int32", ""),
    ((Q, Q), {}, "value_layer must be a torch.Tensor, got None", "or qkv_layer alone"),
    ((Q,), {"qkv_layer": torch.stack((Q, Q, Q), 2)}, "query_layer must be None with qkv_layer", "qkv_layer contains it"),
    ((Q, Q), {"kv_layer": torch.stack((Q, Q), 2)}, "key_layer must be None with kv_layer", ""),
    ((), {"qkv_layer": torch.stack((Q, Q, Q), 3)}, "qkv_layer must have 5 axes [.., 3, h, d] with qkv_interleave_dim=-3",
     "these sizes would fit qkv_interleave_dim=-2"),
    ((), {"qkv_layer": Q, "qkv_interleave_dim": 2}, "qkv_interleave_dim must be -3", ""),
    # packed sequences
    ((T, T, T), {"qkv_format": "thd"}, "attn_mask_type must be a padding type with qkv_format='thd', got 'causal'",
     "attn_mask_type='padding_causal' separates packed sequences"),
    ((T, T, T), {**PACKED, "attn_mask_type": "no_mask"}, "attn_mask_type must be a padding type", "attn_mask_type='padding'"),
    ((T, T, T), PACKED, "cu_seqlens_q must be given in qkv_format='thd', got None", "[0, 300, 1100, 2348], int32"),
    ((T, T, T), {**PACKED, "cu_seqlens_q": [0, 5, 12]}, "cu_seqlens_q must be an int32 or int64 tensor, got list", "torch.tensor"),
    ((T, T, T), {**PACKED, "cu_seqlens_q": CU.float()}, "cu_seqlens_q must be int32 or int64, got torch.float32", ".to(torch.int32)"),
    ((T, T, T), {**PACKED, "cu_seqlens_q": CU[None]}, "cu_seqlens_q must have one axis", "are [0, 3, 5]"),
    ((T, T, T), {**PACKED, "cu_seqlens_q": CU + 1}, "cu_seqlens_q must start at 0, got 1", ""),
    ((T, T, T), {**PACKED, "cu_seqlens_q": CU * 2}, "cu_seqlens_q must have cu_seqlens_q[-1] of at most 12", ""),
    ((T, T[:7], T[:7]), {**PACKED, "cu_seqlens_q": CU}, "cu_seqlens_kv must be given if keys are not packed as", ""),
    ((T, T, T), {**PACKED, "cu_seqlens_q": CU, "max_seqlen_q": 3}, "max_seqlen_q must be at least the longest document (7), got 3", ""),
    ((T, T, T), {**PACKED, "cu_seqlens_q": CU, "max_seqlen_q": CU.diff().max()}, "max_seqlen_q must be an int", "x.item()"),
    ((T, T, T), {**PACKED, "cu_seqlens_q": CU, "cu_seqlens_q_padded": torch.tensor([0, 4, 12])},
     "cu_seqlens_q_padded must leave room for document 0 of length 5, got 4", ""),
    ((T, T, T), {**PACKED, "cu_seqlens_q": CU, "pad_between_seqs": True}, "pad_between_seqs must be given with cu_seqlens_q_padded", ""),
    ((T, T, T), {**PACKED, "cu_seqlens_q": CU - CU.clamp(max=1), "cu_seqlens_q_padded": CU, "pad_between_seqs": False},
     "pad_between_seqs must not be False if cu_seqlens_q_padded differs", "omit it"),
    ((T, T, T), {**PACKED, "cu_seqlens_q": CU, "attention_mask": padding(2, 1, 1, 7)}, "attention_mask must be None in qkv_format='thd'", ""),
    # offsets and masks of a dense batch
    ((Q, Q, Q), {"cu_seqlens_q": CU}, "cu_seqlens_q must be None with attn_mask_type='causal' in qkv_format='bshd'",
     "attn_mask_type='padding_causal'"),
    ((Q, Q, Q), {"attn_mask_type": "padding", "cu_seqlens_q": CU[:2]}, "cu_seqlens_q must have 3 offsets for a batch of 2", ""),
    ((Q, Q, Q), {"attn_mask_type": "padding", "cu_seqlens_q": torch.arange(7)}, "cu_seqlens_q must have 3 offsets",
     "with 6 sequences, query_layer [2, 6, 4, 8] would fit qkv_format='sbhd'"),
    ((Q, Q, Q), {"attn_mask_type": "padding", "cu_seqlens_q": torch.tensor([0, 7, 8])}, "cu_seqlens_q must have at most 6 tokens per batch element, the length of a row, got 7",
     "without padding"),
    ((Q, Q, Q), {"attn_mask_type": "padding", "cu_seqlens_q": CU - CU // 3, "cu_seqlens_kv": CU}, "cu_seqlens_kv must have at most 6 tokens", ""),
    ((Q, Q, Q), {"attn_mask_type": "padding", "cu_seqlens_q": torch.tensor([0, 5, 3])}, "cu_seqlens_q must start at 0 and never decrease", ""),
    ((Q, Q, Q), {"attn_mask_type": "padding", "cu_seqlens_kv": CU}, "cu_seqlens_q must be given with cu_seqlens_kv", ""),
    ((Q, Q, Q), {"attn_mask_type": "padding", "cu_seqlens_q": CU, "cu_seqlens_q_padded": CU}, "cu_seqlens_q_padded must be None", ""),
    ((Q, Q, Q), {"attn_mask_type": "padding"}, "attention_mask must be given (or cu_seqlens_q) with", "without padding, use 'no_mask'"),
    ((Q, Q, Q), {"attention_mask": padding(2, 1, 1, 6)}, "attention_mask must be None with attn_mask_type='causal'", "leave it out for 'causal' alone"),
    ((Q, Q, Q), {"attn_mask_type": "padding", "attention_mask": padding(2, 6)}, "attention_mask must have shape [batch, 1, 1, length]",
     "attention_mask[:, None, None, :]"),
    ((Q, Q, Q), {"attn_mask_type": "padding", "attention_mask": padding(2, 1, 6, 6)}, "attention_mask must have shape", "'arbitrary'"),
    ((Q, Q, Q), {"attn_mask_type": "padding", "attention_mask": padding(6, 1, 1, 2)}, "attention_mask must have shape", "qkv_format='sbhd'"),
    ((Q, Q, Q), {"attn_mask_type": "padding", "attention_mask": padding(2, 1, 1, 6).float()}, "attention_mask must be bool, True = masked out",
     "core_attention_bias"),
    ((Q, Q, Q), {"attn_mask_type": "padding", "attention_mask": padding(2, 1, 1, 6).int()}, "attention_mask must be bool", "~mask.bool()"),
    ((Q, Q[:, :3], Q[:, :3]), {"attn_mask_type": "padding", "attention_mask": padding(2, 1, 1, 6)},
     "attention_mask must be a pair for the queries and the keys", "(mask_q [b, 1, 1, sq], mask_kv [b, 1, 1, skv])"),
    ((Q, Q, Q), {"attn_mask_type": "padding", "attention_mask": padding(2, 1, 1, 6), "cu_seqlens_q": CU},
     "attention_mask must be None if cu_seqlens_q is given", ""),
    ((Q, Q, Q), {"attn_mask_type": "arbitrary"}, "attention_mask must be given with attn_mask_type='arbitrary'", ""),
    ((Q, Q, Q), {"attn_mask_type": "arbitrary", "attention_mask": padding(2, 6, 6)}, "attention_mask must be broadcastable", "[:, None]"),
    # additions to the scores
    ((Q, Q, Q), {"core_attention_bias_type": "bias"}, "core_attention_bias_type must be one of 'no_bias'", ""),
    ((Q, Q, Q), {"core_attention_bias": Q}, "core_attention_bias must be None with core_attention_bias_type='no_bias'", "post_scale_bias"),
    ((Q, Q, Q), {"core_attention_bias_type": "post_scale_bias"}, "core_attention_bias must be given", ""),
    ((Q, Q, Q), {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": padding(1, 1, 6, 6)},
     "core_attention_bias must be a floating-point tensor", "attention_mask"),
    ((Q, Q, Q), {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": torch.zeros(4, 6, 5)},
     "core_attention_bias must be broadcastable to [b, h, sq, skv] = [2, 4, 6, 6]", "bias[None]"),
    ((T, T, T), {**PACKED, "cu_seqlens_q": CU, "core_attention_bias_type": "post_scale_bias", "core_attention_bias": torch.zeros(2, 4, 7, 7)},
     "core_attention_bias must be broadcastable to [b, h, sq, skv] = [1, 4, 12, 12]", "in thd a bias is over the packed tokens"),
    ((Q, Q, Q), {"alibi_slopes": torch.ones(4)}, "alibi_slopes must be None with core_attention_bias_type='no_bias'", "'alibi'"),
    ((Q, Q, Q), {"core_attention_bias_type": "alibi", "alibi_slopes": torch.ones(3)}, "alibi_slopes must have shape [heads] = [4]", ""),
    ((Q, Q, Q), {"core_attention_bias_type": "alibi", "alibi_slopes": torch.ones(4).half()}, "alibi_slopes must be a float32 tensor", ""),
    # accepted at their defaults only
    ((Q, Q, Q), {"inference_params": object()}, "inference_params must be an undivided.InferenceParams, got object", ""),
    ((Q, Q, Q), {"fp8_output": True}, "fp8_output must be False, got True", "FP8 attention is not supported"),
    ((Q, Q, Q), {"bf16_backward": True}, "bf16_backward must be False, got True", "FP8 attention is not supported"),
    ((Q, Q, Q), {"score_mod": max}, "score_mod must be None", "masks.predicate(fn)"),
    ((Q, Q, Q), {"score_mod_tensors": {"a": Q}}, "score_mod_tensors must be None, got dict", ""),
    ((Q, Q, Q), {"num_splits": -1}, "num_splits must be at least 0, got -1", ""),
    ((Q, Q, Q), {"checkpoint_core_attention": 1}, "checkpoint_core_attention must be True or False, got 1", ""),
]  # fmt: skip


@pytest.mark.parametrize(
    ("tensors", "call", "expected", "hint"), BAD_CALLS, ids=[f"{n}-{c[2][:50]}" for n, c in enumerate(BAD_CALLS)]
)
def test_errors_of_a_call(tensors: tuple[Tensor, ...], call: dict[str, Any], expected: str, hint: str) -> None:
    with pytest.raises(InputError) as caught:
        DotProductAttention(4, 8)(*tensors, **({"qkv_format": "bshd"} | call))
    message = str(caught.value)
    assert message.startswith(expected)
    assert caught.value.argument == expected.split(" ")[0]
    assert hint in (caught.value.hint or "")
    assert hint in message


def test_none_requests_no_fp8() -> None:
    """TransformerEngine declares these flags as Optional[bool]."""
    layer = DotProductAttention(4, 8, qkv_format="bshd")
    assert torch.equal(layer(Q, Q, Q, fp8_output=None, bf16_backward=None), layer(Q, Q, Q))


@pytest.mark.parametrize("write", [Tensor.copy_, lambda t, new: t.data.copy_(new)], ids=["in-place", "data"])
def test_offsets_that_changed_mean_the_new_sequences(write: Callable[[Tensor, Tensor], object]) -> None:
    """Cached results are dropped when their inputs change, also if no version counter says so."""
    module = DotProductAttention(4, 8, **PACKED)
    changing, other = CU.clone(), torch.tensor([0, 3, 12], dtype=torch.int32)
    first = module(T, T, T, cu_seqlens_q=changing)
    assert torch.equal(first, module(T, T, T, cu_seqlens_q=CU))
    write(changing, other)
    assert torch.equal(module(T, T, T, cu_seqlens_q=changing), module(T, T, T, cu_seqlens_q=other))
    assert not torch.equal(first, module(T, T, T, cu_seqlens_q=changing))
    lengths = DotProductAttention(4, 8, qkv_format="bshd", attn_mask_type="padding")
    changing = torch.tensor([0, 5, 8])
    assert lengths(Q, Q, Q, cu_seqlens_q=changing)[0, 4].any()
    write(changing, torch.tensor([0, 2, 8]))
    assert not lengths(Q, Q, Q, cu_seqlens_q=changing)[0, 4].any()
    changing = torch.zeros(2, 1, 1, 6, dtype=torch.bool)
    assert lengths(Q, Q, Q, attention_mask=changing)[0, 4].any()
    write(changing, torch.tensor([False] * 4 + [True] * 2).expand(2, 1, 1, 6))
    assert not lengths(Q, Q, Q, attention_mask=changing)[0, 4].any()


def test_lengths_of_no_sequences() -> None:
    """They ended in an error of PyTorch: an empty tensor has no minimum."""
    module = DotProductAttention(4, 8, qkv_format="bshd", attn_mask_type="padding")
    assert module(Q[:0], Q[:0], Q[:0], cu_seqlens_q=CU[:1]).shape == (0, 6, 32)


@pytest.mark.parametrize(("format", "expected"), [("thd", "given"), ("bshd", "given for cross-attention, got None")])
def test_keys_of_cross_attention_have_their_own_offsets(format: str, expected: str) -> None:
    module = DotProductAttention(4, 8, qkv_format=format, attn_mask_type="padding", attention_type="cross")
    x = T if format == "thd" else T.unflatten(0, (2, 6))
    with pytest.raises(InputError, match=f"cu_seqlens_kv must be {expected}"):
        module(x, x, x, cu_seqlens_q=CU if format == "thd" else torch.tensor([0, 5, 8]))


def test_a_pre_scale_bias_under_softcap_is_refused() -> None:
    module = DotProductAttention(4, 8, qkv_format="bshd", softcap=5.0)
    bias = torch.zeros(1, 1, 6, 6)
    with pytest.raises(InputError, match="not be 'pre_scale_bias' with softcap"):
        module(Q, Q, Q, core_attention_bias_type="pre_scale_bias", core_attention_bias=bias)


def test_no_context_parallel_group_is_one() -> None:
    module = DotProductAttention(2, 8, qkv_format="bshd")
    module.set_context_parallel_group(None, None, None, "p2p")
    module.set_context_parallel_group(None, None, None, module.cp_comm_type)  # as Megatron-LM turns it off
    assert module.cp_comm_type == "p2p"
    with pytest.raises(InputError, match="group must be a process group"):
        module.set_context_parallel_group(object(), [0, 1], None)


def test_a_requested_backend_runs_or_gives_reasons() -> None:
    assert DotProductAttention(4, 8, qkv_format="bshd", backend="reference")(Q, Q, Q).shape == (2, 6, 32)
    with pytest.raises(NoBackendError, match="flash_attn"):
        DotProductAttention(4, 8, qkv_format="bshd", backend="flash_attn")(Q, Q, Q)


@pytest.mark.parametrize("padded", [False, True])
def test_hints_name_the_arguments_of_the_module(padded: bool) -> None:
    layer = DotProductAttention(2, 16, qkv_format="thd", attn_mask_type="padding_causal")
    q, offsets = torch.randn(13, 2, 16), torch.tensor([0, 4, 9])
    names = ["cu_seqlens_q", "cu_seqlens_kv"] + ["cu_seqlens_q_padded", "cu_seqlens_kv_padded"] * padded
    with pytest.raises(InputError) as raised:
        layer(q, q, q, **dict.fromkeys(names, offsets))
    name = "cu_seqlens_q_padded" if padded else "cu_seqlens_q"
    assert str(raised.value).startswith(f"{name} must have {name}[-1] of 13")
    hint = "if the last tokens are padding, cu_seqlens_q_padded with offsets that end there"
    if padded:
        hint = "its last offset is the number of tokens in memory, with those after the last sequence"
    assert raised.value.hint == hint

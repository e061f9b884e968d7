"""The layers have TransformerEngine's signatures, and their page of documentation lists every argument."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from undivided import (
    InferenceParams,
    InputError,
    MultiheadAttention,
    RotaryPositionEmbedding,
    TransformerLayer,
    apply_rotary_pos_emb,
)
from undivided.nn.arguments import refused as tables

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "coming-from-transformer-engine.md"

ATTENTION = """
hidden_size num_attention_heads kv_channels=None attention_dropout=0.1 layernorm_epsilon=1e-05 init_method=None
output_layer_init_method=None layer_number=None attn_mask_type='causal' window_size=None bottom_right_diagonal=None
tp_group=None tp_size=1 num_gqa_groups=None fuse_wgrad_accumulation=False get_rng_state_tracker=None
sequence_parallel=False params_dtype=None return_bias=False return_layernorm_output=False input_layernorm=False
attention_type='self' set_parallel_mode=False fuse_qkv_params=False zero_centered_gamma=False
qkv_weight_interleaved=True rotary_pos_interleaved=False ub_overlap_ag=False ub_overlap_rs=False
ub_overlap_rs_dgrad=False ub_bulk_dgrad=False ub_bulk_wgrad=False bias=True normalization='LayerNorm' device='cuda'
qkv_format='sbhd' name=None qk_norm_type=None qk_norm_eps=1e-06 qk_norm_before_rope=False seq_length=None
micro_batch_size=None softmax_type='vanilla'
""".split()
ATTENTION_CALL = """
hidden_states attention_mask=None encoder_output=None attn_mask_type=None window_size=None bottom_right_diagonal=None
is_first_microbatch=None checkpoint_core_attention=False inference_params=None rotary_pos_emb=None
core_attention_bias_type='no_bias' core_attention_bias=None alibi_slopes=None cu_seqlens_q=None cu_seqlens_kv=None
cu_seqlens_q_padded=None cu_seqlens_kv_padded=None max_seqlen_q=None max_seqlen_kv=None fast_zero_fill=True
pad_between_seqs=None
""".split()
LAYER = """
hidden_size ffn_hidden_size num_attention_heads num_gqa_groups=None layernorm_epsilon=1e-05 hidden_dropout=0.1
attention_dropout=0.1 init_method=None output_layer_init_method=None layer_number=None kv_channels=None
self_attn_mask_type='causal' window_size=None bottom_right_diagonal=None enc_dec_attn_mask_type='no_mask'
enc_dec_bottom_right_diagonal=None enc_dec_window_size=None tp_group=None tp_size=1 params_dtype=None
get_rng_state_tracker=None fuse_wgrad_accumulation=False seq_length=None micro_batch_size=None
sequence_parallel=False apply_residual_connection_post_layernorm=False output_layernorm=False
parallel_attention_mlp=False layer_type='encoder' drop_path_rate=0.0 set_parallel_mode=False fuse_qkv_params=False
rotary_pos_interleaved=False zero_centered_gamma=False qkv_weight_interleaved=True ub_tp_comm_overlap=False
ub_overlap_ag=True ub_overlap_rs=True ub_overlap_rs_dgrad=False ub_bulk_dgrad=True ub_bulk_wgrad=True bias=True
activation='gelu' activation_params=None normalization='LayerNorm' device='cuda' attn_input_format='sbhd' name=None
qk_norm_type=None qk_norm_eps=1e-06 qk_norm_before_rope=False softmax_type='vanilla'
""".split()
LAYER_CALL = """
hidden_states attention_mask=None self_attn_mask_type=None window_size=None bottom_right_diagonal=None
encoder_output=None enc_dec_attn_mask=None enc_dec_attn_mask_type=None enc_dec_window_size=None
enc_dec_bottom_right_diagonal=None is_first_microbatch=None checkpoint_core_attention=False inference_params=None
rotary_pos_emb=None core_attention_bias_type='no_bias' core_attention_bias=None alibi_slopes=None cu_seqlens_q=None
cu_seqlens_kv=None cu_seqlens_q_padded=None cu_seqlens_kv_padded=None max_seqlen_q=None max_seqlen_kv=None
fast_zero_fill=True pad_between_seqs=None
""".split()
ROPE = """
dim rotary_percent=1.0 seq_len_interpolation_factor=None pretrained_max_position_embeddings=None rotary_base=10000.0
interleaved=False
""".split()
APPLY_ROPE = """
t freqs tensor_format='sbhd' start_positions=None interleaved=False fused=False cu_seqlens=None cp_size=1 cp_rank=0
""".split()
CACHES = """
max_batch_size max_sequence_length num_heads_kv=None head_dim_k=None dtype=None head_dim_v=None is_paged=False
total_num_pages=None page_size=None max_ctx_len=None qkv_format='bshd' custom_cache_manager=None
""".split()
WITHOUT_DEFAULT = ("='sbhd'", "='cuda'")  # shapes do not reveal a wrong format; a GPU may be absent


def positional(function: Callable[..., Any]) -> list[str]:
    """name=default of every positional argument, in order, without self."""
    return [
        p.name if p.default is p.empty else f"{p.name}={p.default!r}"
        for p in inspect.signature(function).parameters.values()
        if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self"
    ]


@pytest.mark.parametrize(
    ("function", "signature"),
    [
        (MultiheadAttention.__init__, ATTENTION),
        (MultiheadAttention.forward, ATTENTION_CALL),
        (TransformerLayer.__init__, LAYER),
        (TransformerLayer.forward, LAYER_CALL),
        (RotaryPositionEmbedding.__init__, ROPE),
        (apply_rotary_pos_emb, APPLY_ROPE),
        (InferenceParams.__init__, CACHES),
    ],
    ids=lambda value: getattr(value, "__qualname__", ""),
)
def test_the_signature_is_transformer_engines(function: Callable[..., Any], signature: list[str]) -> None:
    """Argument by argument, except the format and the device, which default to None."""
    wanted = [word.split("=")[0] + "=None" if word.endswith(WITHOUT_DEFAULT) else word for word in signature]
    assert positional(function) == wanted


@pytest.mark.parametrize("layer", [MultiheadAttention, TransformerLayer])
def test_arguments_beyond_transformer_engine(layer: type) -> None:
    extra = [p.name for p in inspect.signature(layer).parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert extra == ["softmax_scale", "softcap", "backend"]


ROW = re.compile(r"^\| `(\w+)` \| (works|hint|refused|different)\b[^|]* \| [^|]+ \|$", re.MULTILINE)


def rows(heading: str) -> dict[str, str]:
    return dict(ROW.findall(PAGE.read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]))


def names(signature: list[str]) -> list[str]:
    return [word.split("=")[0] for word in signature]


def test_the_page_describes_every_argument() -> None:
    beyond = ["softmax_scale", "softcap", "backend"]
    for heading, first, second, extra, refused in (
        ("The layers: constructors", LAYER, ATTENTION, beyond, tables.TRANSFORMER_LAYER_AT_CONSTRUCTION),
        ("The layers: calls", LAYER_CALL, ATTENTION_CALL, [], {}),
        ("Rotary embeddings", [*ROPE, "scaling", "device"], [w for w in APPLY_ROPE if "interleaved" not in w], [], {}),
        ("InferenceParams", CACHES, [], ["device", "quantize", "mesh", "context_parallel"], {"custom_cache_manager"}),
    ):
        found = rows(heading)
        wanted = names(first) + [name for name in names(second) if name not in names(first)] + extra
        assert list(found) == wanted, heading
        assert {name for name, here in found.items() if here == "refused"} == set(refused), heading


def test_the_page_describes_the_caches_as_they_are() -> None:
    """Every method and attribute that the page calls the same, or gives instead, exists."""
    table = PAGE.read_text(encoding="utf-8").split("| method or attribute | here |\n")[1].split("\n## ")[0]
    same, instead = [], []
    for row in re.findall(r"^\| (`[^|]+) \| ([^|]+) \|$", table, re.MULTILINE):
        found = re.findall(r"`(\w+)[^`]*`", row[0])
        if found[-1] not in ("cache_manager", "layer_number", "cache_qkv_format"):
            same += found
        elif row[1].startswith("`"):
            instead += re.findall(r"`(\w+)", row[1])
    ours = re.findall(r"`(\w+)`", table.split("\n\n")[1])
    assert instead == ["page_table", "has_memory"]
    assert (len(same), len(ours)) == (11, 8)
    params = InferenceParams(2, 20, 2, 8, torch.float32)
    assert [name for name in same + instead + ours if not hasattr(params, name)] == []
    assert not hasattr(params, "cache_manager")


def test_the_caches_accept_what_transformer_engine_refuses() -> None:
    """Fewer pages than every sequence at full length, a length between two pages, packed tokens without max_ctx_len."""
    params = InferenceParams(
        4, 60, 2, 8, torch.float32, is_paged=True, page_size=16, total_num_pages=5, qkv_format="thd"
    )
    params.pre_step({"a": 3})
    params.pre_step({"b": 2, "a": 4})  # several tokens of a known sequence, behind a new one
    assert list(params.sequences.items()) == [("b", 2), ("a", 7)]


@pytest.mark.parametrize("value", [True, False])
def test_flags_of_fp8_weights_and_of_overlaps_that_are_off_have_no_effect(value: bool) -> None:
    """As in TransformerEngine without FP8 and without ub_tp_comm_overlap; they were errors."""
    flags = [name for name in names(LAYER) if name.startswith(("ub_overlap", "ub_bulk"))]
    sizes = (24, 32, 4)
    layer = TransformerLayer(*sizes, attn_input_format="bshd", **dict.fromkeys(flags, value)).eval()
    other = TransformerLayer(*sizes, attn_input_format="bshd").eval()
    other.load_state_dict(layer.state_dict())
    x = torch.randn(1, 6, 24)
    assert len(flags) == 5
    assert torch.equal(layer(x, is_first_microbatch=value), other(x))
    attention, same = layer.self_attention, other.self_attention
    assert torch.equal(attention(x, is_first_microbatch=value), same(x))


ATTRIBUTES: dict[str, tuple[Any, Any, Any]] = {
    # given, set later, refused
    "self_attn_mask_type": ("no_mask", "causal", "both"),
    "window_size": ((3, 1), (2, 2), 5),
    "bottom_right_diagonal": (True, False, "no"),
    "enc_dec_attn_mask_type": ("no_mask", "causal", "both"),
    "enc_dec_window_size": ((3, 1), (2, 2), 5),
    "enc_dec_bottom_right_diagonal": (True, False, "no"),
}


@pytest.mark.filterwarnings("ignore:(window_size|bottom_right_diagonal).*attn_mask_type:UserWarning")
@pytest.mark.parametrize("name", ATTRIBUTES)
def test_options_of_the_masks_are_attributes_that_the_next_call_uses(name: str) -> None:
    """As in TransformerEngine; a layer had none of them, so that one could be set without effect."""
    given, later, wrong = ATTRIBUTES[name]
    options = {key: value[0] for key, value in ATTRIBUTES.items()}
    sizes = (24, 32, 4)
    layer = TransformerLayer(*sizes, layer_type="decoder", attn_input_format="bshd", **options).eval()
    other = TransformerLayer(*sizes, layer_type="decoder", attn_input_format="bshd", **(options | {name: later})).eval()
    other.load_state_dict(layer.state_dict())
    x = {"hidden_states": torch.randn(1, 6, 24), "encoder_output": torch.randn(1, 8, 24)}
    of_attention, inner = name.removeprefix("enc_dec_"), layer.inter_attention
    if not name.startswith("enc_dec_"):
        of_attention, inner = name.removeprefix("self_"), layer.self_attention
    assert getattr(layer, name) == getattr(inner, of_attention) == given
    setattr(layer, name, later)
    assert getattr(layer, name) == getattr(inner, of_attention) == later
    with torch.no_grad():
        assert torch.equal(layer(**x), other(**x))
        setattr(inner, of_attention, wrong)
        with pytest.raises(InputError, match=name):
            layer(**x)
    assert hasattr(TransformerLayer(*sizes, attn_input_format="bshd"), name) is not name.startswith("enc_dec_")


@pytest.mark.parametrize("kind", [MultiheadAttention, TransformerLayer])
def test_the_window_of_a_layer_serves_another_mask_type_at_the_call(kind: type) -> None:
    """As in TransformerEngine; the right side was set to 0 for the causal type of the constructor, and lost."""
    sizes, mask_type = ((24, 32, 4), "self_attn_mask_type") if kind is TransformerLayer else ((24, 4), "attn_mask_type")
    format = "attn_input_format" if kind is TransformerLayer else "qkv_format"
    layer, other = (
        kind(*sizes, window_size=(2, 1), **{mask_type: name, format: "bshd"}).eval() for name in ("causal", "no_mask")
    )
    other.load_state_dict(layer.state_dict())
    x = torch.randn(1, 6, 24)
    assert layer.window_size == (2, 1)
    assert torch.equal(layer(x, **{mask_type: "no_mask"}), other(x))


@pytest.mark.parametrize("kind", [MultiheadAttention, TransformerLayer])
def test_a_number_that_is_set_later_names_the_cache(kind: type) -> None:
    sizes = (24, 32, 4) if kind is TransformerLayer else (24, 4)
    format = "attn_input_format" if kind is TransformerLayer else "qkv_format"
    layer = kind(*sizes, layer_number=1, **{format: "bshd"}).eval()
    layer.layer_number = 5
    params = InferenceParams(1, 8, 4, 6, torch.float32)
    params.pre_step({"a": 2})
    with torch.no_grad():
        layer(torch.randn(1, 2, 24), inference_params=params)
    assert (layer.layer_number, params.has_memory(1), params.has_memory(5)) == (5, False, True)

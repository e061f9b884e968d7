"""Hints for keywords of PyTorch's layers, and for a format under the name of another layer."""

from __future__ import annotations

_PADDING = "attention_mask={}[:, None, None], with a padding mask type"

_DROPOUT = ("attention_dropout=", "an argument of the constructor: attention_dropout=")
_SCALE = ("softmax_scale=", "an argument of the constructor: softmax_scale=")
_SINKS = ("softmax_type='learnable'", "an argument of the constructor: softmax_type='learnable'")
_CAUSAL = ("attn_mask_type='causal'", "self_attn_mask_type='causal'")

OTHER_NAMES = {
    "embed_dim": ("hidden_size=",),
    "d_model": ("hidden_size=",),
    "num_heads": ("num_attention_heads=",),
    "nhead": ("num_attention_heads=",),
    "dim_feedforward": ("ffn_hidden_size=",),
    **dict.fromkeys(("num_kv_heads", "num_key_value_heads", "num_query_groups"), ("num_gqa_groups=",)),
    "head_dim": ("kv_channels=",),
    **dict.fromkeys(("intermediate_size", "ffn_dim"), ("ffn_hidden_size=",)),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "norm_eps", "eps"), ("layernorm_epsilon=",)),
    "hidden_act": ("activation=",),
    **dict.fromkeys(("dropout", "dropout_p"), _DROPOUT),
    **dict.fromkeys(("scale", "softmax_scale", "scaling"), _SCALE),
    **dict.fromkeys(("sinks", "s_aux", "learnable_sink"), _SINKS),
    **dict.fromkeys(("causal", "is_causal"), _CAUSAL),
    **dict.fromkeys(("window", "sliding_window"), ("window_size=",)),
    "layout": ("qkv_format=", "attn_input_format="),
    "bias": ("core_attention_bias=, with core_attention_bias_type='post_scale_bias'",),
    "mask": ("attn_mask_type= and attention_mask=", "self_attn_mask_type= and attention_mask="),
    "batch_first": (
        "qkv_format='bshd' for True, 'sbhd' for False",
        "attn_input_format='bshd' for True, 'sbhd' for False",
    ),
    "qkv_format": ("attn_input_format=",),
    "key_padding_mask": (_PADDING.format("key_padding_mask"),),
    "src_key_padding_mask": (_PADDING.format("src_key_padding_mask"),),
    "attn_mask": ("attention_mask=, True = masked, with the mask type 'arbitrary'",),
    "need_weights": ("leave it out: no backend returns weights",),
}
"""The hints of `checked_call` for the layers."""

NAMES_OF_ROTARY = {
    **dict.fromkeys(("base", "theta", "rope_theta"), ("rotary_base=",)),
    "head_dim": ("dim=",),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), ("scaling=",)),
}
"""The same for `RotaryPositionEmbedding`."""

_ROWS = "index the rows: freqs[positions] are the angles of these tokens, which have start_positions=None"
_FREQS = ("freqs=, as from RotaryPositionEmbedding(dim).cos_sin(length)",)

NAMES_OF_ROTATION = {
    **dict.fromkeys(("position_ids", "positions"), (_ROWS,)),
    **dict.fromkeys(("seqlen_offsets", "offset", "offsets"), ("start_positions=",)),
    **dict.fromkeys(("layout", "qkv_format"), ("tensor_format=",)),
    **dict.fromkeys(("cos", "sin", "cos_sin"), _FREQS),
}
"""The same for `apply_rotary_pos_emb`."""

"""Hints for keywords of PyTorch's layers, and for a format under the name of another layer."""

from __future__ import annotations

_PADDING = "attention_mask={}[:, None, None], with a padding mask type"

OTHER_NAMES = {
    "embed_dim": ("hidden_size=",),
    "d_model": ("hidden_size=",),
    "num_heads": ("num_attention_heads=",),
    "nhead": ("num_attention_heads=",),
    "dim_feedforward": ("ffn_hidden_size=",),
    "dropout": ("attention_dropout=",),
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

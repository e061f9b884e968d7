"""Small layers, every variant of one, and sequences in every format, shared by the tests of the layers."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from undivided import InferenceParams, TransformerLayer

HIDDEN, FFN, HEADS = 24, 20, 4
LENGTHS, ENCODER = (5, 3), (4, 6)
FORMATS = ("sbhd", "bshd", "thd")
PADDING = 7.0  # not NaN, which times a gradient of 0 would reach the gradients of the weights
STILL = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "params_dtype": torch.float64}

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped-heads": {"num_gqa_groups": 2},
    "one-kv-head": {"num_gqa_groups": 1},
    "rms-norm": {"normalization": "RMSNorm"},
    "rms-norm-zero-centred": {"normalization": "RMSNorm", "zero_centered_gamma": True},
    "layer-norm-zero-centred": {"zero_centered_gamma": True, "layernorm_epsilon": 1e-2},
    "no-bias": {"bias": False},
    "output-norm": {"output_layernorm": True},
    "output-norm-zero-centred": {"output_layernorm": True, "normalization": "RMSNorm", "zero_centered_gamma": True},
    "post-norm-residual": {"apply_residual_connection_post_layernorm": True},
    "post-norm-residual-output-norm": {"apply_residual_connection_post_layernorm": True, "output_layernorm": True},
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


def cu(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def in_format(sequences: list[Tensor], format: str, padding: float = torch.nan) -> Tensor:
    """Sequences [s, hidden] as a padded batch, or packed."""
    if format == "thd":
        return torch.cat(sequences)
    padded = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=padding)
    return padded if format == "bshd" else padded.transpose(0, 1)


def split_sequences(out: Tensor, lengths: tuple[int, ...], format: str) -> list[Tensor]:
    if format == "thd":
        return list(out.split(lengths))
    rows = out if format == "bshd" else out.transpose(0, 1)
    return [row[:n] for row, n in zip(rows, lengths, strict=True)]


def layer(format: str, **options: Any) -> TransformerLayer:
    given: dict[str, Any] = STILL | {"layer_number": 1} | options
    return TransformerLayer(HIDDEN, FFN, HEADS, attn_input_format=format, **given)


def cache(paged: bool, groups: int = HEADS, sizes: tuple[int, int] = (6, 6)) -> InferenceParams:
    """A cache for up to three sequences of 24 tokens."""
    return InferenceParams(
        3, 24, groups, sizes[0], torch.float64, sizes[1], is_paged=paged, page_size=4 if paged else None
    )

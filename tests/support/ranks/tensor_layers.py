"""A small layer, whole or of one rank, for tests of tensor parallelism."""

from __future__ import annotations

from typing import Any

import torch

from undivided import TransformerLayer

HIDDEN, LENGTH, BATCH = 32, 8, 2


def make_layer(case: dict[str, Any], format: str, **parallel: Any) -> TransformerLayer:
    """A layer with the arguments of `case`, but its "scores"; the same parameters at each call."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "attn_input_format": format}
    options |= {name: value for name, value in case.items() if name != "scores"}
    if format == "thd":
        options |= {"self_attn_mask_type": "padding_causal", "enc_dec_attn_mask_type": "padding"}
    layer = TransformerLayer(HIDDEN, 64, 4, **options, **parallel)
    for name, parameter in layer.named_parameters():
        if name.endswith("softmax_offset"):
            torch.nn.init.normal_(parameter)
    return layer

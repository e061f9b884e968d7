"""A small model with its optimizer, saved after some steps: for tests of checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from undivided import InputError, RotaryPositionEmbedding, TransformerLayer
from undivided.parallel import save_checkpoint

HIDDEN, VOCABULARY, LENGTH = 32, 31, 24
WAYS: dict[str, dict[str, Any]] = {
    "parallelize": {"num_gqa_groups": 2},
    "tp_group": {"num_gqa_groups": 4, "fuse_qkv_params": True, "qkv_weight_interleaved": False},
}


class Model(nn.Module):
    """The logits of the next token; its layers have gated activations, biases and learnable sinks."""

    def __init__(self, way: str, hidden: int = HIDDEN, layers: int = 2, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, hidden)
        self.layers = nn.ModuleList(
            TransformerLayer(
                hidden,
                48,
                4,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                activation="swiglu",
                softmax_type="learnable",
                qk_norm_type="RMSNorm",
                attn_input_format="bshd",
                **{**WAYS[way], **options},
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(hidden, VOCABULARY)
        self.rotary = RotaryPositionEmbedding(hidden // 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, freqs = self.embedding(tokens), self.rotary(LENGTH)
        for layer in self.layers:
            x = layer(x, rotary_pos_emb=freqs)
        logits: torch.Tensor = self.head(x)
        return logits


def adam(model: Any) -> torch.optim.Optimizer:
    """With moments that decide the next steps, and two groups."""
    others = [p for name, p in model.named_parameters() if not name.startswith("head")]
    return torch.optim.AdamW([{"params": others}, {"params": model.head.parameters(), "lr": 3e-3}], lr=1e-2)


def trained(folder: Path | str, *steps: int, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer that were saved after some steps."""
    model = Model("parallelize", **options)
    optimizer = adam(model)
    for step in steps:
        save_checkpoint(folder, step, model, optimizer)
    return model, optimizer


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(InputError) as caught:
        call()
    return str(caught.value)

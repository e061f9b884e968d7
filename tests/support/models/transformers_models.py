"""Tiny models of the transformers library, built from configurations with random weights: nothing is downloaded.

Each is as small as its architecture allows, with windows and chunks shorter than the texts, so that every kind of mask
counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

Make = Callable[[str], nn.Module]

SIZES = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
LM = {**SIZES, **IDS, "num_key_value_heads": 2}
T5 = {"vocab_size": 50, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
WHISPER = {
    "vocab_size": 50,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "num_mel_bins": 8,
    "max_source_positions": 20,
    "max_target_positions": 40,
    "max_length": None,
}
LLAMA_4 = {
    "head_dim": 8,
    "intermediate_size_mlp": 48,
    "num_local_experts": 2,
    "attention_chunk_size": 6,
    "layer_types": ["chunked_attention", "full_attention"],
    "no_rope_layers": [1, 0],
}

DECODERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", LM),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**LM, "sliding_window": 5}),
    "qwen2": (
        "Qwen2ForCausalLM",
        "Qwen2Config",
        {**LM, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**LM, "head_dim": 8}),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**LM, "head_dim": 8, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
    ),
    "gemma-2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**LM, "head_dim": 8, "sliding_window": 5, "attn_logit_softcapping": 2.0},
    ),
    "gemma-3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**LM, "head_dim": 8, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "gpt-oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {**LM, "head_dim": 8, "sliding_window": 5, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**LM, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "phi-3": ("Phi3ForCausalLM", "Phi3Config", {**LM, "sliding_window": 7}),
    "llama-4": ("Llama4ForCausalLM", "Llama4TextConfig", {**LM, **LLAMA_4}),
    "gpt-2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {**IDS, "vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    ),
}
ENCODERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertForMaskedLM", "BertConfig", {**SIZES, "pad_token_id": 0, "max_position_embeddings": 64}),
    "modernbert": (
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        {
            **SIZES,
            **IDS,
            "cls_token_id": 1,
            "sep_token_id": 2,
            "num_hidden_layers": 3,
            "local_attention": 6,
            "global_attn_every_n_layers": 3,
        },
    ),
}
SEQ2SEQ: dict[str, tuple[str, str, dict[str, Any]]] = {
    "t5": ("T5ForConditionalGeneration", "T5Config", {**T5, "decoder_start_token_id": 0}),
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig", {**WHISPER, **IDS, "decoder_start_token_id": 1}),
}
ALL = DECODERS | ENCODERS | SEQ2SEQ


def build(name: str, implementation: str, **changes: Any) -> Any:
    """The model of that name with an attention implementation: the same weights each time, large enough to matter."""
    model, config, options = ALL[name]
    made = getattr(transformers, config)(**{**options, **changes}, attn_implementation=implementation)
    network = getattr(transformers, model)(made).eval()
    generator = torch.Generator().manual_seed(0)
    for label, parameter in network.named_parameters():
        if parameter.dim() > 1 or not label.endswith("weight"):  # the others are of norms
            nn.init.normal_(parameter, std=0.25, generator=generator)
    return network


def tokens(batch: int = 3, length: int = 11, seed: int = 0) -> Tensor:
    """Random text, int64 ``[batch, length]``, without special token ids."""
    return torch.randint(3, 50, (batch, length), generator=torch.Generator().manual_seed(seed))


def real_tokens(side: str, batch: int = 3, length: int = 11) -> Tensor:
    """Which tokens are real, int64 ``[batch, length]``: padding of 0, 4 and 1 tokens on a side, or none."""
    real = torch.ones(batch, length, dtype=torch.int64)
    for row, padding in enumerate((0, 4, 1)[:batch]):
        if side == "left":
            real[row, :padding] = 0
        elif side == "right":
            real[row, length - padding :] = 0
    return real

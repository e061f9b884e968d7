"""Settings of single architectures: configuration fields that need other sizes, and why results differ."""

from __future__ import annotations

from typing import Any

PERIODIC = {"num_hidden_layers": 6, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2}

ADJUSTED: dict[str, dict[str, Any]] = {
    "autoformer": {"prediction_length": 4, "context_length": 8},
    "informer": {"prediction_length": 4, "context_length": 8},
    "time_series_transformer": {"prediction_length": 4, "context_length": 8},
    "bamba": {"num_hidden_layers": 2, "attn_layer_indices": [1]},
    "jamba": PERIODIC,
    "whisper": {"max_source_positions": 20, "num_mel_bins": 16},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 6},
    "gptj": {"rotary_dim": 4},
    "codegen": {"rotary_dim": 4},
    "funnel": {"block_sizes": [1, 1], "num_decoder_layers": 2},
    "esm": {"vocab_size": 99, "pad_token_id": 1, "mask_token_id": 4},
    "gemma3n_text": {"intermediate_size": 48, "num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0, 0.0]},
    "laguna": {"num_attention_heads_per_layer": [4, 4]},
    "videomae": {"num_frames": 4, "tubelet_size": 2},
    "vivit": {"num_frames": 4, "tubelet_size": [2, 8, 8]},
    "donut-swin": {"depths": [1, 1], "num_heads": [2, 4], "embed_dim": 16, "window_size": 4, "patch_size": 4},
    "swin": {"depths": [1, 1], "num_heads": [2, 4], "embed_dim": 16, "window_size": 4, "patch_size": 4},
    "swinv2": {"depths": [1, 1], "num_heads": [2, 4], "embed_dim": 16, "window_size": 4, "patch_size": 4},
    "maskformer-swin": {"depths": [1, 1], "num_heads": [2, 4], "embed_dim": 16, "window_size": 4, "patch_size": 4},
    "pp_doclayout_v2": {"class_thresholds": [0.3] * 25, "class_order": list(range(20)) * 2},
    "llama4_vision_model": {"vision_output_dim": 32, "projector_output_dim": 32},
    "mask2former": {"num_channels": 32},
    "mamba2": {"num_heads": 8},
    "audio-spectrogram-transformer": {"max_length": 40, "num_mel_bins": 16, "patch_size": 8},
    "superpoint": {"keypoint_decoder_dim": 65, "encoder_hidden_sizes": [16, 16, 32, 32]},
    "dots1": {"layer_types": None, "first_k_dense_replace": 1},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2},
}
"""Fields of a configuration by its ``model_type``; None leaves the default."""

EXPLAINED: dict[str, str] = {
    "pe_audio": "the text's first position is pooled; padding on the left attends to nothing there: 0, as with `sdpa`",
    "granite_swa": "`eager` returns the weights before the sinks take their share; outputs and gradients are equal",
    "granitemoe_swa": "`eager` returns the weights before the sinks take their share; outputs and gradients are equal",
    "recurrent_gemma": "its recurrence reads the padding before the text, whose rows attend to nothing: 0, as with "
    "`sdpa`",
    "blt_global_transformer": "called without a mask: causal, as the layer says and as for `sdpa`; `eager` has no mask",
}
"""Why an architecture differs, by its ``model_type``."""

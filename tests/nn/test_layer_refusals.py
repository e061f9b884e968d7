"""The errors of a layer for wrong arguments, and for a format that another argument contradicts."""

# ruff: noqa: E501 (tables of messages)

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from layer_cases import FFN, HEADS, HIDDEN, LENGTHS, cu, layer

from undivided import InferenceParams, InputError, RotaryPositionEmbedding, TransformerLayer


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


X = torch.randn(2, 5, HIDDEN)


def step(*, dtype: torch.dtype = torch.float32, **counts: int) -> InferenceParams:
    params = InferenceParams(3, 24, HEADS, 6, dtype)
    params.pre_step(OrderedDict(counts))
    return params


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"attn_input_format": None}, "attn_input_format must be given (there is no default): one of 'sbhd', 'bshd', 'thd', got None\n  HINT: look at hidden_states.shape: 'bshd' if it is [batch, seq, hidden]"),
        ({"attn_input_format": "bhsd"}, "attn_input_format must be one of 'sbhd', 'bshd', 'thd', got 'bhsd'\n  HINT: look at hidden_states.shape"),
        ({"layer_type": "both"}, "layer_type must be one of 'encoder', 'decoder', got 'both'"),
        ({"num_attention_heads": 5}, "hidden_size must be divisible by num_attention_heads (5), got 24\n  HINT: set the head size with kv_channels"),
        ({"num_gqa_groups": 3}, "num_gqa_groups must divide num_attention_heads (4), got 3"),
        ({"ffn_hidden_size": 0}, "ffn_hidden_size must be at least 1, got 0"),
        ({"layer_number": 0}, "layer_number must be at least 1, got 0"),
        ({"hidden_dropout": 2}, "hidden_dropout must be a number from 0 to 1, got 2"),
        ({"attention_dropout": -1}, "attention_dropout must be a number from 0 to 1, got -1"),
        ({"drop_path_rate": "0.1"}, "drop_path_rate must be a number from 0 to 1, got '0.1'"),
        ({"self_attn_mask_type": "casual"}, "self_attn_mask_type must be one of 'no_mask', 'padding', 'causal'"),
        ({"layer_type": "decoder", "enc_dec_attn_mask_type": "x"}, "enc_dec_attn_mask_type must be one of 'no_mask', 'padding'"),
        ({"layer_type": "decoder", "enc_dec_window_size": 3}, "enc_dec_window_size must be a pair (left, right), got 3"),
        ({"normalization": "BatchNorm"}, "normalization must be one of 'LayerNorm', 'RMSNorm', got 'BatchNorm'"),
        ({"layernorm_epsilon": -1e-5}, "layernorm_epsilon must be a number of at least 0, got -1e-05"),
        ({"activation": "tanh"}, "activation must be one of 'gelu', 'geglu', 'glu', 'qgelu', 'qgeglu', 'relu', 'reglu', 'srelu', 'sreglu', 'silu', 'swiglu', 'clamped_swiglu', got 'tanh'"),
        ({"activation_params": {"limit": 1.0}}, "activation_params must be None with activation='gelu'"),
        ({"activation": "clamped_swiglu", "activation_params": {"cap": 1.0}}, "activation_params must have only the keys 'limit', 'alpha', 'glu_linear_offset', got 'cap'"),
        ({"activation": "clamped_swiglu", "activation_params": {"limit": 0.0}}, "activation_params['limit'] must be a positive number, got 0.0"),
        ({"qk_norm_type": "l2"}, "qk_norm_type must be one of 'L2Normalization', 'RMSNorm', 'LayerNorm', got 'l2'"),
        ({"softmax_type": "sink"}, "softmax_type must be one of 'vanilla', 'off-by-one', 'learnable', got 'sink'"),
        ({"init_method": 0.02}, "init_method must be a function of a weight, or None, got 0.02\n  HINT: functools.partial"),
        ({"init_method": lambda: None}, "init_method must be a function of one argument, the weight, got one with the arguments ()\n  HINT: functools.partial"),
        ({"output_layer_init_method": torch.nn.Linear}, "output_layer_init_method must be a function of one argument, the weight, got one with the arguments (in_features"),
        ({"bias": None}, "bias must be True or False, got None"),
        ({"params_dtype": torch.int8}, "params_dtype must be a floating-point dtype of at least 16 bits or None, got torch.int8"),
        ({"params_dtype": torch.float8_e4m3fn}, "params_dtype must be a floating-point dtype of at least 16 bits or None, got torch.float8_e4m3fn"),
        ({"seq_length": 0}, "seq_length must be at least 1, got 0"),
        ({"parallel_attention_mlp": 1}, "parallel_attention_mlp must be True or False, got 1"),
        ({"parallel_attention_mlp": True, "layer_type": "decoder"}, "parallel_attention_mlp must be False in a decoder, got True"),
        ({"parallel_attention_mlp": True, "output_layernorm": True}, "parallel_attention_mlp must be False with output_layernorm, got True"),
        ({"parallel_attention_mlp": True, "apply_residual_connection_post_layernorm": True}, "parallel_attention_mlp must be False with apply_residual_connection_post_layernorm"),
        ({"tp_size": 2}, "set_parallel_mode must be True with 2 tensor parallel ranks, got False\n  HINT: with False, each rank"),
        ({"tp_size": 2.0}, "tp_size must be an int, got 2.0"),
        ({"tp_size": HEADS + 1, "set_parallel_mode": True}, f"num_attention_heads must be a multiple of tp_size ({HEADS + 1}), got {HEADS}"),
        ({"tp_size": 2, "set_parallel_mode": True, "ffn_hidden_size": 33}, "ffn_hidden_size must be a multiple of tp_size (2), got 33"),
        ({"tp_group": object()}, "tp_group must be a torch.distributed process group or None, got object"),
        ({"sequence_parallel": 1}, "sequence_parallel must be True or False, got 1"),
        ({"set_parallel_mode": None}, "set_parallel_mode must be True or False, got None"),
        ({"get_rng_state_tracker": "model-parallel-rng"}, "get_rng_state_tracker must be a function or None, got str"),
        ({"get_rng_state_tracker": lambda name: None}, "get_rng_state_tracker must be a function without arguments, got one with the arguments (name)\n  HINT: a function without"),
        ({"get_rng_state_tracker": lambda: None}, "get_rng_state_tracker must return an object whose fork() is a context manager, got NoneType"),
        ({"get_rng_state_tracker": lambda: type("States", (), {"fork": lambda self: 1})()}, "get_rng_state_tracker must return an object whose fork() is a context manager, got States"),
        ({"fuse_wgrad_accumulation": True}, "fuse_wgrad_accumulation must be False, got True\n  HINT: gradients are in .grad"),
        ({"ub_tp_comm_overlap": True}, "ub_tp_comm_overlap must be False, got True\n  HINT: communication of tensor"),
        ({"ub_overlap_ag": None}, "ub_overlap_ag must be True or False, got None"),
        ({"ub_bulk_wgrad": 1}, "ub_bulk_wgrad must be True or False, got 1"),
    ],
)  # fmt: skip
def test_errors_of_the_constructor(options: dict[str, Any], expected: str) -> None:
    given = {"hidden_size": HIDDEN, "ffn_hidden_size": FFN, "num_attention_heads": HEADS, "attn_input_format": "bshd"}
    with pytest.raises(InputError) as caught:
        TransformerLayer(**(given | options))
    assert str(caught.value).startswith(expected)
    assert caught.value.argument == expected.split(" ")[0]


BAD_CALLS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    # options, call, message
    ({}, {"hidden_states": X[0]}, "hidden_states must have 3 axes [batch, seq, hidden] in attn_input_format='bshd', got [5, 24]\n  HINT: packed sequences are 'thd'"),
    ({"attn_input_format": "thd"}, {}, "hidden_states must have 2 axes [tokens, hidden] in attn_input_format='thd', got [2, 5, 24]\n  HINT: a padded batch is"),
    ({"attn_input_format": "thd"}, {"hidden_states": X[:1]}, "hidden_states must have 2 axes [tokens, hidden] in attn_input_format='thd', got [1, 5, 24]\n  HINT: a batch of one"),
    ({}, {"hidden_states": X[..., :8]}, "hidden_states must have hidden_size (24) features, got 8 in [2, 5, 8]"),
    ({}, {"hidden_states": X.double()}, "hidden_states must have the parameters' dtype (torch.float32), got torch.float64\n  HINT: hidden_states.to(torch.float32)"),
    ({}, {"hidden_states": None}, "hidden_states must be a torch.Tensor, got None"),
    ({"tp_size": 2, "set_parallel_mode": True}, {}, "tp_group must be set before a call with tp_size=2, got None\n  HINT: layer.set_tensor"),
    ({}, {"encoder_output": X}, "encoder_output must be None with layer_type='encoder', got Tensor\n  HINT: layer_type='decoder'"),
    ({}, {"enc_dec_attn_mask": X > 0}, "enc_dec_attn_mask must be None with layer_type='encoder'"),
    ({}, {"cu_seqlens_kv": cu(LENGTHS)}, "cu_seqlens_kv must be cu_seqlens_q or None with layer_type='encoder'"),
    ({}, {"cu_seqlens_q": cu(LENGTHS), "cu_seqlens_kv": cu((4, 4))}, "cu_seqlens_kv must be cu_seqlens_q or None"),
    ({}, {"cu_seqlens_q": cu(LENGTHS)}, "cu_seqlens_q must be None with self_attn_mask_type='causal' in attn_input_format='bshd'"),
    ({}, {"self_attn_mask_type": "both"}, "self_attn_mask_type must be one of"),
    # one mask for keys as long as the queries masked the queries too
    ({"layer_type": "decoder"}, {"encoder_output": X, "enc_dec_attn_mask_type": "padding", "enc_dec_attn_mask": torch.zeros(2, 1, 1, 5, dtype=torch.bool)},
     "enc_dec_attn_mask must be a pair for the queries and the keys in cross-attention, got a tensor [2, 1, 1, 5]\n  HINT: enc_dec_attn_mask=(mask_q [b, 1, 1, sq]"),
    ({}, {"is_first_microbatch": 1}, "is_first_microbatch must be True or False, got 1"),
    ({}, {"rotary_pos_emb": RotaryPositionEmbedding(6)(4)}, "rotary_pos_emb must have a row for each of 5 positions, got 4"),
    ({}, {"rotary_pos_emb": RotaryPositionEmbedding(6)(5).bfloat16()}, "rotary_pos_emb must be float32, got torch.bfloat16\n  HINT: in a half-precision dtype, neighbouring positions have equal angles; FSDP2 casts them unless"),
    ({}, {"rotary_pos_emb": RotaryPositionEmbedding(8)(5)}, "rotary_pos_emb must have an even number of channels, at most the head size"),
    ({}, {"inference_params": 1}, "inference_params must be an undivided.InferenceParams, got int"),
    ({}, {"checkpoint_core_attention": 1}, "checkpoint_core_attention must be True or False, got 1"),
    ({"attn_input_format": "thd"}, {"hidden_states": X[0]}, "self_attn_mask_type must be a padding type with attn_input_format='thd', got 'causal'"),
    ({"attn_input_format": "thd", "self_attn_mask_type": "padding"}, {"hidden_states": X[0], "cu_seqlens_q": [0, 5], "rotary_pos_emb": RotaryPositionEmbedding(6)(5)}, "cu_seqlens_q must be an int32 or int64 tensor, got list"),
    ({"attn_input_format": "thd", "self_attn_mask_type": "padding"}, {"hidden_states": X[0], "cu_seqlens_q": cu((4,)), "cu_seqlens_kv_padded": cu((6,)), "rotary_pos_emb": RotaryPositionEmbedding(6)(6)}, "cu_seqlens_q_padded must end at the tokens of hidden_states at most (5), got 6"),
    ({"layer_type": "decoder"}, {}, "encoder_output must be a torch.Tensor, got None"),
    ({"layer_type": "decoder"}, {"encoder_output": torch.randn(1, 7, HIDDEN)}, "encoder_output must have the batch size of hidden_states (2) in attn_input_format='bshd', got [1, 7, 24]"),
    ({"layer_type": "decoder"}, {"encoder_output": X, "enc_dec_attn_mask_type": "padding"}, "enc_dec_attn_mask must be given (or cu_seqlens_q) with enc_dec_attn_mask_type='padding'"),
    ({"layer_type": "decoder"}, {"encoder_output": X.transpose(0, 1)}, "encoder_output must have the batch size of hidden_states (2) in attn_input_format='bshd', got [5, 2, 24]\n  HINT: encoder_output.transpose(0, 1)"),
    # a format that another argument contradicts
    ({"attn_input_format": "sbhd", "self_attn_mask_type": "padding_causal"}, {"cu_seqlens_q": cu(LENGTHS)},
     "attn_input_format must agree with cu_seqlens_q (2 sequences): in 'sbhd' hidden_states [2, 5, 24] are 5 sequences of 2, got 'sbhd'\n  HINT: attn_input_format='bshd', [batch, seq, hidden], would fit"),
    ({"self_attn_mask_type": "padding"}, {"attention_mask": torch.zeros(5, 1, 1, 2, dtype=torch.bool)},
     "attn_input_format must agree with attention_mask (5 sequences, 2 tokens each): in 'bshd' hidden_states [2, 5, 24] are 2 sequences of 5, got 'bshd'\n  HINT: attn_input_format='sbhd'"),
    ({"self_attn_mask_type": "arbitrary"}, {"attention_mask": torch.zeros(1, 1, 2, 2, dtype=torch.bool)}, "attn_input_format must agree with attention_mask (2 tokens each)"),
    ({}, {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": torch.zeros(1, 4, 2, 2)}, "attn_input_format must agree with core_attention_bias (2 tokens each)"),
    ({"attn_input_format": "sbhd"}, {"inference_params": step(a=5, b=5)}, "attn_input_format must agree with inference_params (2 sequences): in 'sbhd' hidden_states [2, 5, 24] are 5 sequences of 2, got 'sbhd'\n  HINT: pre_step with 5 sequences, or attn_input_format='bshd'"),
    ({}, {"inference_params": step(a=1)}, "hidden_states must have the 1 sequences that pre_step announced, got 2\n  HINT: a sequence without new tokens, or an idle row, has 0 in pre_step"),
    ({"attn_input_format": "thd"}, {"hidden_states": X[0], "inference_params": step(a=1, b=2)}, "hidden_states must have the 3 tokens that pre_step announced, got 5\n  HINT: padding of a step is left out: hidden_states[:3]"),
    ({}, {"inference_params": step(a=6, b=5)}, "hidden_states must have the 6 tokens per sequence that pre_step announced, got 5"),
    ({"layer_type": "decoder", "attn_input_format": "sbhd"}, {"encoder_output": torch.randn(2, 7, HIDDEN)}, "attn_input_format must agree with encoder_output [2, 7, 24]: in 'sbhd' hidden_states [2, 5, 24] are 5 sequences of 2"),
    # a cache
    ({"layer_number": None}, {"inference_params": step(a=5, b=5)}, "inference_params must be used with a layer_number, got None\n  HINT: layer_number=1 at construction, 2 for the next layer"),
    ({}, {"inference_params": InferenceParams(3, 24, HEADS, 6, torch.float32)}, "inference_params must have a step with sequences before the model runs, got no step"),
    ({}, {"inference_params": step()}, "inference_params must have a step with sequences before the model runs, got a step without sequences, pre_step({})\n  HINT: inference_params.pre_step("),
    ({}, {"inference_params": step(a=5, b=5, dtype=torch.bfloat16)}, "inference_params must have the dtype of the layer's keys (torch.float32), got torch.bfloat16\n  HINT: InferenceParams(..., dtype=torch.float32)"),
    ({"attention_dropout": 0.1}, {"inference_params": step(a=5, b=5)}, "inference_params must be used in evaluation mode, or without attention_dropout, got training mode\n  HINT: module.eval()"),
    ({}, {"inference_params": step(a=5, b=5), "cu_seqlens_q": cu(LENGTHS)}, "cu_seqlens_q must be those of inference_params, or None, got [0, 5, 8]\n  HINT: pre_step received [5, 5] new tokens"),
    ({"self_attn_mask_type": "padding"}, {"inference_params": step(a=5, b=5), "attention_mask": torch.zeros(2, 1, 1, 5, dtype=torch.bool)}, "attention_mask must be None with inference_params"),
    ({"self_attn_mask_type": "no_mask"}, {"inference_params": step(a=5, b=5), "bottom_right_diagonal": False}, "bottom_right_diagonal must not be False with inference_params"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "call", "expected"), BAD_CALLS, ids=[f"{n}-{c[2][:40]}" for n, c in enumerate(BAD_CALLS)]
)
def test_errors_of_a_call(options: dict[str, Any], call: dict[str, Any], expected: str) -> None:
    module = TransformerLayer(
        HIDDEN, FFN, HEADS, **({"attn_input_format": "bshd", "attention_dropout": 0.0, "layer_number": 1} | options)
    )
    with torch.no_grad(), pytest.raises(InputError) as caught:
        module(**({"hidden_states": X} | call))
    assert str(caught.value).startswith(expected)
    assert caught.value.argument == expected.split(" ")[0]


def test_process_groups_may_be_none() -> None:
    """Without parallelism both accept None, as TransformerEngine's models pass it."""
    module = layer("bshd", layer_type="decoder")
    module.set_context_parallel_group(None, None, None)
    module.set_tensor_parallel_group(None)
    with pytest.raises(InputError, match=r"tp_group must be a torch\.distributed process group or None, got object"):
        module.set_tensor_parallel_group(object())


def test_a_layer_in_a_scripted_module_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"module must be traced, exported or compiled, got torch\.jit\.script of T"):
        torch.jit.script(torch.nn.Sequential(layer("bshd")))


def test_a_layer_under_torch_fx_names_what_records_it() -> None:
    with pytest.raises(InputError, match=r"hidden_states must be a torch\.Tensor, got Proxy\n  HINT: torch\.fx"):
        torch.fx.symbolic_trace(torch.nn.Sequential(layer("bshd")))

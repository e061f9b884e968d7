"""A valid small call of every layer, of its methods, and of the rotary position embedding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from public_call_inputs import PublicCall, Q, all_options, method_call, t

import undivided


def _dot() -> Any:
    return undivided.DotProductAttention(2, 8, qkv_format="bshd")


def _mha(**options: Any) -> Any:
    return undivided.MultiheadAttention(16, 2, attention_dropout=0.0, qkv_format="bshd", **options)


def transformer_layer(**options: Any) -> Any:
    return undivided.TransformerLayer(
        16, 16, 2, hidden_dropout=0.0, attention_dropout=0.0, attn_input_format="bshd", **options
    )


HIDDEN = t(2, 3, 16)


def layer_calls() -> dict[str, Callable[[], PublicCall]]:
    """The calls by the name of their class and method."""
    mha, layer, rope = undivided.MultiheadAttention, undivided.TransformerLayer, undivided.RotaryPositionEmbedding(8)
    dot = all_options(undivided.DotProductAttention, num_attention_heads=2, kv_channels=8, qkv_format="bshd")
    attention = all_options(mha, hidden_size=16, num_attention_heads=2, qkv_format="bshd")
    whole = all_options(layer, hidden_size=16, ffn_hidden_size=16, num_attention_heads=2, attn_input_format="bshd")
    shared = tuple(attention.keys() - {"backend", "device", "hidden_size", "name", "window_size"})
    return {
        "DotProductAttention": lambda: PublicCall(undivided.DotProductAttention, dot),
        "MultiheadAttention": lambda: PublicCall(mha, attention),
        "TransformerLayer": lambda: PublicCall(layer, whole, constant=shared),
        "RotaryPositionEmbedding": lambda: PublicCall(
            undivided.RotaryPositionEmbedding, all_options(undivided.RotaryPositionEmbedding, dim=8)
        ),
        "RotaryPositionEmbedding.forward": lambda: PublicCall(rope, {"max_seq_len": 4, "offset": 0}, rope),
        "RotaryPositionEmbedding.cos_sin": lambda: method_call(rope, "cos_sin", max_seq_len=4, offset=0),
        "apply_rotary_pos_emb": lambda: PublicCall(
            undivided.apply_rotary_pos_emb,
            all_options(undivided.apply_rotary_pos_emb, t=Q, freqs=rope(3), tensor_format="bshd"),
        ),
        **_layer_methods(_dot, {"query_layer": Q, "key_layer": Q, "value_layer": Q}),
        **_layer_methods(_mha, {"hidden_states": HIDDEN}),
        **_layer_methods(transformer_layer, {"hidden_states": HIDDEN}, tuple(all_options(mha.forward))),
    }


def _layer_methods(
    make: Callable[[], Any], given: dict[str, Any], constant: tuple[str, ...] = ()
) -> dict[str, Callable[[], PublicCall]]:
    """The forward of a layer and the methods that set its groups."""
    owner = type(make())

    def forward() -> PublicCall:
        layer = make()
        return PublicCall(layer, all_options(owner.forward) | given, layer, constant)

    return {
        f"{owner.__name__}.forward": forward,
        f"{owner.__name__}.set_context_parallel_group": lambda: method_call(
            make(), "set_context_parallel_group", **all_options(owner.set_context_parallel_group, cp_group=None)
        ),
        f"{owner.__name__}.set_tensor_parallel_group": lambda: method_call(
            make(), "set_tensor_parallel_group", tp_group=None, check=True
        ),
    }

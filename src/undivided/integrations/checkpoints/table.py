"""The names of a layer's parameters. Both directions of every conversion read this table and nothing else.

Source: the modules of TransformerEngine, and of Llama, Mistral, Qwen 2 and Qwen 3 in Hugging Face Transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Name(NamedTuple):
    """A parameter of a `TransformerLayer` whose queries, keys and values have weights of their own.

    Attributes:
        here: its name in the layer, as in TransformerEngine; ``{}`` is "weight" or "bias".
        hugging_face: its name in a decoder layer of transformers. Two names are its upper and its lower half.
    """

    here: str
    hugging_face: tuple[str, ...]


NAMES = (
    Name("self_attention.layernorm_qkv.layer_norm_{}", ("input_layernorm.{}",)),
    Name("self_attention.layernorm_qkv.query_{}", ("self_attn.q_proj.{}",)),
    Name("self_attention.layernorm_qkv.key_{}", ("self_attn.k_proj.{}",)),
    Name("self_attention.layernorm_qkv.value_{}", ("self_attn.v_proj.{}",)),
    Name("self_attention.q_norm.{}", ("self_attn.q_norm.{}",)),
    Name("self_attention.k_norm.{}", ("self_attn.k_norm.{}",)),
    Name("self_attention.core_attention.softmax_offset", ("self_attn.sinks",)),
    Name("self_attention.proj.{}", ("self_attn.o_proj.{}",)),
    Name("layernorm_mlp.layer_norm_{}", ("post_attention_layernorm.{}",)),
    Name("layernorm_mlp.fc1_{}", ("mlp.gate_proj.{}", "mlp.up_proj.{}")),
    Name("layernorm_mlp.fc2_{}", ("mlp.down_proj.{}",)),
)
"""The parameters of a layer. ``fc1`` without a gated activation is ``up_proj`` alone."""


def pairs(gated: bool) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(name here, names in transformers) of every parameter that a layer may have.

    Args:
        gated: whether the activation of the layer takes two halves.
    """
    for here, there in NAMES:
        own = there if gated else there[-1:]
        for kind in ("weight", "bias") if "{}" in here else ("",):
            yield here.format(kind), tuple(name.format(kind) for name in own)

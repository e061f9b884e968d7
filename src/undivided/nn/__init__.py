"""Attention modules with the names and arguments of TransformerEngine, and rotary position embeddings."""

from undivided.arguments.signature import checked_methods
from undivided.nn.arguments.other_names import NAMES_OF_ROTARY, OTHER_NAMES
from undivided.nn.dot_product_attention import DotProductAttention
from undivided.nn.multihead_attention import MultiheadAttention
from undivided.nn.rotary import RotaryPositionEmbedding, apply_rotary_pos_emb
from undivided.nn.transformer_layer import TransformerLayer

__all__ = [
    "DotProductAttention",
    "MultiheadAttention",
    "RotaryPositionEmbedding",
    "TransformerLayer",
    "apply_rotary_pos_emb",
]

checked_methods("__init__", "forward", "cos_sin", other_names=NAMES_OF_ROTARY)(RotaryPositionEmbedding)
for _layer in (DotProductAttention, MultiheadAttention, TransformerLayer):
    _methods = "__init__", "set_context_parallel_group", "set_tensor_parallel_group"
    checked_methods(*_methods, other_names=OTHER_NAMES)(_layer)

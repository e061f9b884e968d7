"""Attention modules with the names and arguments of TransformerEngine, and rotary position embeddings."""

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

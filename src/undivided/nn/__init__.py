"""Modules with the names and arguments of TransformerEngine."""

from undivided.nn.dot_product_attention import DotProductAttention
from undivided.nn.rotary import RotaryPositionEmbedding, apply_rotary_pos_emb

__all__ = ["DotProductAttention", "RotaryPositionEmbedding", "apply_rotary_pos_emb"]

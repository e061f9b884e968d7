"""Rotary position embeddings: angles, the rotation of queries and keys, and the methods for longer contexts."""

from undivided.nn.rotary.embedding import RotaryPositionEmbedding
from undivided.nn.rotary.rotation import apply_rotary_pos_emb

__all__ = ["RotaryPositionEmbedding", "apply_rotary_pos_emb"]

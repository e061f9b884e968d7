"""Modules with the names and arguments of TransformerEngine."""

from undivided.nn.dot_product_attention import DotProductAttention

__all__ = ["DotProductAttention"]

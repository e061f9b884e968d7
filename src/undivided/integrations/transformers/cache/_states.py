"""Keys or values of a quantised cache, which a model passes from its cache to the attention."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from undivided.integrations.transformers._tensor_like import TensorLike
from undivided.quantization import dequantize


class CachedStates(TensorLike):
    """Quantised keys or values in place of the tensor ``[B, N, S, D]`` that a cache returns to its layer.

    The registered attention reads them in place. If a model computes with them, or has another attention, they are
    dequantised.

    Args:
        values: the memory of the cache, ``[B, S, N, D]``; in int4 ``[B, S, N, D / 2]``.
        scale: its scales, fp32 ``[B, S, N]``; in int4 ``[B, S, N, D / 32]``.
        dim: the head size D.
        dtype: of the dequantised tensor.

    >>> from undivided.quantization import quantize
    >>> states = CachedStates(*quantize(torch.ones(1, 5, 2, 32), "int8"), 32, torch.float32)
    >>> states.shape, float(torch.matmul(states, states.transpose(2, 3)).mean().round())
    (torch.Size([1, 2, 5, 32]), 32.0)
    """

    def __init__(self, values: Tensor, scale: Tensor, dim: int, dtype: torch.dtype) -> None:
        self.quantized, self.scale, self.dtype, self.device = values, scale, dtype, values.device
        batch, tokens, heads = values.shape[:3]
        self.shape = torch.Size((batch, heads, tokens, dim))

    @functools.cached_property
    def dense(self) -> Tensor:
        """The dequantised states, ``[B, N, S, D]``."""
        return dequantize(self.quantized, self.scale, self.dtype).transpose(1, 2)

    def __repr__(self) -> str:
        return f"<CachedStates {list(self.shape)}: {self.quantized.dtype}>"

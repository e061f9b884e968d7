"""LayerNorm, RMSNorm and L2 normalisation, as modules and as a function that other modules with a norm of their own
call.

    LayerNorm        (x - mean) / sqrt(var + eps) * weight + bias
    RMSNorm          x / sqrt(mean(x^2) + eps) * weight
    L2Normalization  x / sqrt(sum(x^2) + eps)

With zero_centered_gamma the factor is 1 + weight, and weight starts at 0.

Sources: Ba et al. 2016 (arXiv:1607.06450); Zhang and Sennrich 2019 (arXiv:1910.07467).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter, functional

from undivided.nn.blocks.module import Module, start

KINDS = ("LayerNorm", "RMSNorm")
_HALF = (torch.float16, torch.bfloat16)


class Norm(NamedTuple):
    """A kind of normalisation and its constants; the parameters lie in the module that has it."""

    kind: str
    eps: float
    zero_centered: bool = False

    def parameters(
        self, size: int, device: torch.device | str | None, dtype: torch.dtype
    ) -> tuple[Parameter, Parameter | None]:
        """Weight and bias, not yet filled; RMSNorm has no bias."""
        weight = Parameter(torch.empty(size, device=device, dtype=dtype))
        return weight, None if self.kind == "RMSNorm" else Parameter(torch.empty_like(weight))

    def start(self, weight: Tensor, bias: Tensor | None) -> None:
        """Neither scale nor shift."""
        start(weight, 0.0 if self.zero_centered else 1.0)
        start(bias, 0.0)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x normalised over its last axis, in x's dtype."""
        dtype = torch.promote_types(x.dtype, weight.dtype)
        if self.zero_centered:
            dtype = torch.float32 if dtype in _HALF else dtype  # 1 + weight would lose weight's last bits
            weight = weight.to(dtype) + 1
        wide, shape = x.to(dtype), (x.shape[-1],)
        if self.kind == "RMSNorm":
            return functional.rms_norm(wide, shape, weight.to(dtype), self.eps).to(x.dtype)
        assert bias is not None
        return functional.layer_norm(wide, shape, weight.to(dtype), bias.to(dtype), self.eps).to(x.dtype)


class Normalization(Module):
    """LayerNorm or RMSNorm over the last axis."""

    bias: Parameter | None

    def __init__(self, norm: Norm, size: int, device: torch.device | str | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = norm
        self.weight, bias = norm.parameters(size, device, dtype)
        self.register_parameter("bias", bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Neither scale nor shift."""
        self.norm.start(self.weight, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x normalised."""
        return self.norm(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        """The constants."""
        return (
            f"{self.weight.shape[0]}, {self.norm.kind!r}, eps={self.norm.eps}, "
            f"zero_centered_gamma={self.norm.zero_centered}"
        )


class L2Normalization(Module):
    """Each vector of the last axis at length 1. It has no parameters."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x normalised."""
        wide = x.float() if x.dtype in _HALF else x
        return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + self.eps)).to(x.dtype)

    def extra_repr(self) -> str:
        """The constant."""
        return f"eps={self.eps}"

"""LayerNorm, RMSNorm and L2 normalisation, as modules and as a function for modules that hold the parameters.

    LayerNorm        (x - mean) / sqrt(var + eps) * weight + bias
    RMSNorm          x / sqrt(mean(x^2) + eps) * weight
    L2Normalization  x / sqrt(sum(x^2) + eps)

With zero_centered_gamma the factor is 1 + weight, and weight is initialised with 0.

Sources: Ba et al. 2016 (arXiv:1607.06450); Zhang and Sennrich 2019 (arXiv:1910.07467).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter, functional

from undivided.arguments.checks import checked_choice, checked_flag
from undivided.nn.arguments.checks import checked_number
from undivided.nn.blocks.module import Module, initialise

KINDS = ("LayerNorm", "RMSNorm")
_QK_NORMS = ("L2Normalization", "RMSNorm", "LayerNorm")
_HALF = (torch.float16, torch.bfloat16)


class Norm(NamedTuple):
    """A kind of normalisation and its constants; a module holds the parameters."""

    kind: str
    eps: float
    zero_centered: bool = False

    def parameters(
        self, size: int, device: torch.device | str | None, dtype: torch.dtype
    ) -> tuple[Parameter, Parameter | None]:
        """Uninitialised weight and bias; RMSNorm has no bias."""
        weight = Parameter(torch.empty(size, device=device, dtype=dtype))
        return weight, None if self.kind == "RMSNorm" else Parameter(torch.empty_like(weight))

    def reset(self, weight: Tensor, bias: Tensor | None) -> None:
        """Initialise the parameters as the identity."""
        initialise(weight, 0.0 if self.zero_centered else 1.0)
        initialise(bias, 0.0)

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x normalised over its last axis, in the dtype of x."""
        dtype = torch.promote_types(x.dtype, weight.dtype)
        if self.zero_centered:
            # in half precision, 1 + weight would lose the last bits of weight
            dtype = torch.float32 if dtype in _HALF else dtype
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
        """Initialise the parameters as the identity."""
        self.norm.reset(self.weight, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x normalised."""
        weight, bias = self._own("weight", None), self._own("bias", None)
        if self.ranks is not None:
            weight, bias = self.ranks.shared(weight), None if bias is None else self.ranks.shared(bias)
        return self.norm.apply(x, weight, bias)

    def extra_repr(self) -> str:
        """The constants, for `repr`."""
        return (
            f"{self.weight.shape[0]}, {self.norm.kind!r}, eps={self.norm.eps}, "
            f"zero_centered_gamma={self.norm.zero_centered}"
        )


class L2Normalization(Module):
    """L2 normalisation over the last axis, without parameters."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x normalised."""
        wide = x.float() if x.dtype in _HALF else x
        return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + self.eps)).to(x.dtype)

    def extra_repr(self) -> str:
        """The constant, for `repr`."""
        return f"eps={self.eps}"


def checked_norm(kind: object, eps: object, zero_centered: object) -> Norm:
    """The normalisation with these constructor arguments of a layer."""
    return Norm(
        checked_choice("normalization", kind, KINDS),
        checked_number("layernorm_epsilon", eps, 0, 1e30, "a number of at least 0"),
        checked_flag("zero_centered_gamma", zero_centered),
    )


def checked_qk_norms(
    kind: object, eps: object, size: int, device: torch.device | str | None, dtype: torch.dtype
) -> tuple[Module | None, Module | None]:
    """The normalisations of each head's queries and keys; (None, None) for no kind."""
    eps = checked_number("qk_norm_eps", eps, 0, 1e30, "a number of at least 0")
    if kind is None:
        return None, None
    kind = checked_choice("qk_norm_type", kind, _QK_NORMS)
    if kind == "L2Normalization":
        return L2Normalization(eps), L2Normalization(eps)
    norm = Norm(kind, eps)
    return Normalization(norm, size, device, dtype), Normalization(norm, size, device, dtype)

"""Linear maps with one weight or several, after a normalisation if there is one.

Parameters have TransformerEngine's names: `weight` and `bias`, or `query_weight`, `query_bias`, ...;
`layer_norm_weight`, `layer_norm_bias`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import Parameter, functional

from undivided.nn.blocks.initial_weights import Init
from undivided.nn.blocks.module import Module, initialise
from undivided.nn.blocks.normalization import Norm


class Linear(Module):
    """``x @ weight^T + bias`` for each map, where x may be normalised first.

    Args:
        in_features: features of x.
        features: output features of each map by name; {"": n} is one parameter called `weight`.
        init: initialises every weight; biases are initialised with 0.
        bias: whether the maps have biases.
        device, dtype: device and dtype of the parameters.
        norm: normalises x; None: x is not normalised.

    Attributes:
        used_rows: by name of a map that every rank has whole, the rows (first, number) that this rank uses of it.
    """

    weight: Parameter  # if there is one weight
    bias: Parameter | None
    layer_norm_weight: Parameter  # if x is normalised
    layer_norm_bias: Parameter | None
    used_rows: Mapping[str, tuple[int, int]]

    def __init__(
        self,
        in_features: int,
        features: Mapping[str, int],
        init: Init,
        bias: bool,
        device: torch.device | str | None,
        dtype: torch.dtype,
        norm: Norm | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.init_method, self.norm = in_features, init, norm
        self.names, self.used_rows = tuple(f"{name}_" if name else "" for name in features), {}
        for name, rows in zip(self.names, features.values(), strict=True):
            weight = Parameter(torch.empty(rows, in_features, device=device, dtype=dtype))
            self.register_parameter(f"{name}weight", weight)
            self.register_parameter(
                f"{name}bias", Parameter(torch.empty(rows, device=device, dtype=dtype)) if bias else None
            )
        if norm is not None:
            self.layer_norm_weight, layer_norm_bias = norm.parameters(in_features, device, dtype)
            self.register_parameter("layer_norm_bias", layer_norm_bias)
        self.reset_parameters()

    def maps(self) -> list[tuple[Tensor, Tensor | None]]:
        """Weight and bias of each map."""
        return [(getattr(self, f"{name}weight"), getattr(self, f"{name}bias")) for name in self.names]

    def reset_parameters(self) -> None:
        """Initialise weights by the function, biases with 0, and the normalisation as the identity."""
        for weight, bias in self.maps():
            initialise(weight, self.init_method, self.ranks)
            initialise(bias, 0.0)
        if self.norm is not None:
            self.norm.reset(self.layer_norm_weight, self.layer_norm_bias)

    def forward(self, x: Tensor, add_bias: bool = True) -> tuple[Tensor, ...]:
        """One tensor [.., features] per map, and as the last one the input of the maps.

        Each map is a separate matrix product, because joining the weights would copy them. The tuple is flat, because
        full backward hooks of PyTorch do not see tensors of a tuple in it.
        """
        if self.norm is not None:
            x = self.norm.apply(x, *self.whole_on_ranks("layer_norm_weight", "layer_norm_bias"))
        whole = x if self.ranks is None else self.ranks.enter(x)
        used = map(self._used_map, self.names)
        return *(functional.linear(whole, w, b if add_bias else None) for w, b in used), x

    def _used_map(self, name: str) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of a map, as plain tensors: the rows that this rank uses."""
        axis = None if name in self.used_rows else 0
        weight, bias = (self._own(f"{name}{kind}", axis) for kind in ("weight", "bias"))
        if self.ranks is None or axis == 0:
            return weight, bias
        first, count = self.used_rows[name]  # ranks use different rows, so the gradient is the sum over ranks
        weight = self.ranks.shared(weight).narrow(0, first, count)
        return weight, None if bias is None else self.ranks.shared(bias).narrow(0, first, count)

    def extra_repr(self) -> str:
        """Sizes and normalisation, for `repr`."""
        sizes = ", ".join(
            f"{name.rstrip('_') or 'out'}={weight.shape[0]}"
            for name, (weight, _) in zip(self.names, self.maps(), strict=True)
        )
        norm = "" if self.norm is None else f", normalization={self.norm.kind!r}"
        return f"in={self.in_features}, {sizes}, bias={self.maps()[0][1] is not None}{norm}"


class OutputLinear(Linear):
    """A linear map with one weight, whose input features ranks may divide: the output is their sum."""

    def forward(self, x: Tensor, add_bias: bool = True) -> tuple[Tensor, ...]:
        """The output, and the input of the map."""
        if self.ranks is None:
            return super().forward(x, add_bias)
        out = self.ranks.leave(functional.linear(x, self._own("weight", 1)))
        bias = self.whole_bias() if add_bias else None
        return out if bias is None else out + bias, x

    def whole_bias(self) -> Tensor | None:
        """The bias, for the caller to add."""
        bias: Tensor | None = self.whole_on_ranks("bias")[0]
        return bias

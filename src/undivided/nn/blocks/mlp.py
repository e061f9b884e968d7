"""The feed-forward block: normalisation, linear map, activation, linear map.

    gelu  x Phi(x) (tanh approximation)
    qgelu  x sigmoid(1.702 x)    relu  max(x, 0)    srelu  max(x, 0)^2    silu  x sigmoid(x)

A gated activation takes twice the features, x and y, and returns act(x) * y: geglu, qgeglu, reglu, sreglu, swiglu; glu
is sigmoid(x) * y. clamped_swiglu is ``g sigmoid(alpha g) * (clamp(y, -limit, limit) + glu_linear_offset)`` with ``g =
min(x, limit)``.

Sources: Shazeer 2020 (arXiv:2002.05202); So et al. 2021, squared relu (arXiv:2109.08668); gpt-oss for clamped_swiglu.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import Parameter, functional

from undivided.arguments.checks import checked_choice
from undivided.errors import InputError
from undivided.nn.arguments.checks import checked_number
from undivided.nn.blocks.halves import both_halves
from undivided.nn.blocks.initial_weights import Init
from undivided.nn.blocks.module import Module, initialise
from undivided.nn.blocks.normalization import Norm

_QUICK = 1.702
"""The factor in ``x sigmoid(1.702 x)``, which approximates the exact gelu."""


def _qgelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(_QUICK * x)


def _gelu(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


def _srelu(x: Tensor) -> Tensor:
    return functional.relu(x).square()


_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": _gelu,
    "geglu": _gelu,
    "glu": torch.sigmoid,
    "qgelu": _qgelu,
    "qgeglu": _qgelu,
    "relu": functional.relu,
    "reglu": functional.relu,
    "srelu": _srelu,
    "sreglu": _srelu,
    "silu": functional.silu,
    "swiglu": functional.silu,
}
_CLAMPED = "clamped_swiglu"
_CLAMPED_DEFAULTS = {"limit": 7.0, "alpha": _QUICK, "glu_linear_offset": 1.0}
ACTIVATIONS = (*_FUNCTIONS, _CLAMPED)


class Activation:
    """An activation, by its name."""

    def __init__(self, name: object, parameters: Mapping[str, float] | None = None) -> None:
        self.name = checked_choice("activation", name, ACTIVATIONS)
        self.parameters = _checked_parameters(self.name, parameters)

    @property
    def gated(self) -> bool:
        """Whether it takes twice as many features as it returns."""
        return self.name.endswith("glu")

    def __call__(self, x: Tensor) -> Tensor:
        """The activation of x, [.., f] (gated: [.., 2 f]), as [.., f]."""
        if not self.gated:
            return _FUNCTIONS[self.name](x)
        x, y = x.chunk(2, -1)
        if self.name != _CLAMPED:
            return _FUNCTIONS[self.name](x) * y
        limit, alpha, offset = (self.parameters[key] for key in ("limit", "alpha", "glu_linear_offset"))
        x = x.clamp(max=limit)
        return x * torch.sigmoid(alpha * x) * (y.clamp(-limit, limit) + offset)


def _checked_parameters(name: str, params: Mapping[str, float] | None) -> dict[str, float]:
    params = {} if params is None else params
    if not isinstance(params, Mapping):
        raise InputError("activation_params", "be a dictionary or None", repr(params))
    if name != _CLAMPED:
        if params:
            raise InputError("activation_params", f"be None with activation={name!r}", repr(dict(params)))
        return {}
    for key, value in params.items():
        if key not in _CLAMPED_DEFAULTS:
            known = ", ".join(map(repr, _CLAMPED_DEFAULTS))
            raise InputError("activation_params", f"have only the keys {known}", repr(key))
        words = "a positive number" if key == "limit" else "a finite number"
        checked_number(f"activation_params[{key!r}]", value, 1e-30 if key == "limit" else -1e30, 1e30, words)
    return _CLAMPED_DEFAULTS | dict(params)


class LayerNormMLP(Module):
    """``fc2(activation(fc1(norm(x))))``, with TransformerEngine's parameters: `layer_norm_*`, `fc1_*`, `fc2_*`.

    Args:
        norm: the normalisation.
        hidden_size, ffn_hidden_size: features of x, and between the maps. A gated activation doubles those of fc1.
        activation: the activation between the maps.
        init, output_init: initialise the weights of fc1 and fc2.
        bias: whether the maps have biases.
        device, dtype: device and dtype of the parameters.

    Attributes:
        has_consecutive_rows: a rank's rows of fc1 are consecutive in the whole weight. Of a gated activation they are
            then not the rank's part of both halves, so features are exchanged after fc1.
    """

    has_consecutive_rows = False
    layer_norm_bias: Parameter | None
    fc1_weight: Parameter
    fc1_bias: Parameter | None
    fc2_weight: Parameter
    fc2_bias: Parameter | None

    def __init__(
        self,
        norm: Norm,
        hidden_size: int,
        ffn_hidden_size: int,
        activation: Activation,
        init: Init,
        output_init: Init,
        bias: bool,
        device: torch.device | str | None,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.norm, self.activation = norm, activation
        self.init_method, self.output_layer_init_method = init, output_init
        self.layer_norm_weight, layer_norm_bias = norm.parameters(hidden_size, device, dtype)
        self.register_parameter("layer_norm_bias", layer_norm_bias)
        fc1_size = ffn_hidden_size * (2 if activation.gated else 1)
        for name, out, size in (("fc1", fc1_size, hidden_size), ("fc2", hidden_size, ffn_hidden_size)):
            weight = Parameter(torch.empty(out, size, device=device, dtype=dtype))
            self.register_parameter(f"{name}_weight", weight)
            self.register_parameter(
                f"{name}_bias", Parameter(torch.empty(out, device=device, dtype=dtype)) if bias else None
            )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise weights by their functions, biases with 0, and the normalisation as the identity."""
        self.norm.reset(self.layer_norm_weight, self.layer_norm_bias)
        initialise(self.fc1_weight, self.init_method, self.ranks)
        initialise(self.fc2_weight, self.output_layer_init_method, self.ranks)
        for bias in (self.fc1_bias, self.fc2_bias):
            initialise(bias, 0.0)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The output of the block, and x normalised."""
        normalised = self.norm.apply(x, *self.whole_on_ranks("layer_norm_weight", "layer_norm_bias"))
        fc1, fc1_bias, fc2 = self._own("fc1_weight", 0), self._own("fc1_bias", 0), self._own("fc2_weight", 1)
        (bias,) = self.whole_on_ranks("fc2_bias")
        if self.ranks is None:
            inner = self.activation(functional.linear(normalised, fc1, fc1_bias))
            return functional.linear(inner, fc2, bias), normalised
        inner = functional.linear(self.ranks.enter(normalised), fc1, fc1_bias)
        if self.has_consecutive_rows and self.activation.gated:
            inner = both_halves(inner, self.ranks)
        out = self.ranks.leave(functional.linear(self.activation(inner), fc2))
        return out if bias is None else out + bias, normalised

    def extra_repr(self) -> str:
        """Sizes, activation and normalisation, for `repr`."""
        hidden, ffn = self.fc2_weight.shape
        bias = self.fc1_bias is not None
        return f"{hidden}, {ffn}, activation={self.activation.name!r}, normalization={self.norm.kind!r}, bias={bias}"

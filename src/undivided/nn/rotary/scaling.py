"""Longer contexts for rotary embeddings: the frequencies of the pairs under each published method.

A method is a dictionary with the keys of a model's config.json: ``{"rope_type": "llama3", "factor": 8.0, ...}``. An
unknown key is an error.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from undivided.arguments.checks import as_integer, checked_choice, checked_flag
from undivided.errors import InputError
from undivided.nn.arguments.checks import checked_number

_POSITIVE = "a positive number"
_LENGTH = "original_max_position_embeddings"
_PER_PAIR = ("short_factor", "long_factor")
_REQUIRED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", _LENGTH),
    "yarn": ("factor", _LENGTH),
    "llama3": ("factor", _LENGTH, "low_freq_factor", "high_freq_factor"),
    "longrope": (_LENGTH, "short_factor", "long_factor"),
    "proportional": (),
}
_OPTIONAL: dict[str, tuple[str, ...]] = {
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "longrope": ("factor", "attention_factor"),
    "proportional": ("partial_rotary_factor", "factor"),
}
# Keys of config.json that are constructor arguments.
_ARGUMENTS = {"rope_theta": "rotary_base", "partial_rotary_factor": "rotary_percent"}


@dataclasses.dataclass(frozen=True)
class Scaling:
    """A method and its checked values."""

    kind: str
    values: dict[str, Any]

    def __getitem__(self, key: str) -> Any:
        return self.values[key]


def checked_scaling(config: object, pretrained_length: int | None, dim: int) -> Scaling:
    """The method of a dictionary; `pretrained_length` is the default of its original length. dim: rotated channels."""
    if config is None:
        return Scaling("default", {})
    if not isinstance(config, Mapping):
        hint = "{'rope_type': 'llama3', 'factor': 8.0, ...}, as in a model's config.json"
        raise InputError("scaling", "be a dictionary or None", repr(config), hint=hint)
    values = dict(config)
    kind = checked_choice("scaling['rope_type']", values.pop("rope_type", values.pop("type", None)), tuple(_REQUIRED))
    if _LENGTH in _REQUIRED[kind] and pretrained_length is not None:
        values.setdefault(_LENGTH, pretrained_length)
    known = (*_REQUIRED[kind], *_OPTIONAL.get(kind, ()))
    for key in values:
        if key not in known:
            argument = _ARGUMENTS.get(str(key))
            hint = f"pass {argument}={values[key]!r} at construction" if argument else f"allowed: {', '.join(known)}"
            raise InputError("scaling", f"not have {key!r} with rope_type {kind!r}", repr(values[key]), hint=hint)
    for key in _REQUIRED[kind]:
        if key not in values:
            raise InputError("scaling", f"have {key!r} with rope_type {kind!r}", sorted(values))
    scaling = Scaling(kind, {key: _checked(kind, key, value, dim) for key, value in values.items()})
    if kind == "llama3" and scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        must, hint = "be below scaling['high_freq_factor']", "1.0 and 4.0 in the configurations of Llama 3.1"
        raise InputError("scaling['low_freq_factor']", must, f"{low} and {high}", hint=hint)
    if kind == "longrope" and values.get("factor") is values.get("attention_factor") is None:
        must = "have 'factor' or 'attention_factor' with rope_type 'longrope'"
        hint = f"factor is max_position_embeddings / {_LENGTH} of the model's config.json"
        raise InputError("scaling", must, sorted(values), hint=hint)
    return scaling


def _checked(kind: str, key: str, value: object, dim: int) -> Any:
    name = f"scaling[{key!r}]"
    if key in _PER_PAIR:
        return _checked_factors(name, value, dim // 2)
    if key == _LENGTH:
        return as_integer(name, value, 2 if kind == "longrope" else 1)  # its logarithm is a divisor
    if key == "truncate":
        return checked_flag(name, value)
    if value is None and key in _OPTIONAL.get(kind, ()):
        return None
    if key == "partial_rotary_factor":
        return checked_number(name, value, 0.0, 1.0, "a number from 0 to 1")
    if key == "factor":
        return checked_number(name, value, 1.0, 1e30, "a number of at least 1")
    return checked_number(name, value, 1e-30, 1e30, _POSITIVE)


def _checked_factors(name: str, value: object, pairs: int) -> tuple[float, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != pairs:
        given = f"{len(value)} numbers" if isinstance(value, Sequence) and not isinstance(value, str) else repr(value)
        hint = "one number per pair of rotated channels, as in a model's config.json"
        raise InputError(name, f"be a list of {pairs} numbers", given, hint=hint)
    return tuple(checked_number(f"{name}[{i}]", factor, 1e-30, 1e30, _POSITIVE) for i, factor in enumerate(value))


def frequencies(dim: int, base: float, device: torch.device | str | None = None) -> Tensor:
    """``base^(-2 i / dim)`` for each pair i, fp32 [dim / 2]."""
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
    return 1.0 / (base**exponents)


def scaled_frequencies(scaling: Scaling, dim: int, base: float, device: torch.device | str | None = None) -> Tensor:
    """The frequencies of a method that are independent of the length of a call, fp32 [dim / 2]."""
    plain = frequencies(dim, base, device)
    if scaling.kind == "linear":
        return plain / float(scaling["factor"])
    if scaling.kind == "yarn":
        return _yarn(scaling, plain, dim, base)
    if scaling.kind == "llama3":
        return _llama3(scaling, plain)
    if scaling.kind == "longrope":
        return plain / plain.new_tensor(scaling["short_factor"])
    if scaling.kind == "proportional":
        return _proportional(scaling, plain, dim)
    return plain


def long_frequencies(
    scaling: Scaling, dim: int, base: float, device: torch.device | str | None = None
) -> Tensor | None:
    """The frequencies of LongRoPE for calls beyond the original length, fp32 [dim / 2]; None with other methods.

    Source: Ding et al. 2024, LongRoPE (arXiv:2402.13753); the keys are those of Phi-3.
    """
    if scaling.kind != "longrope":
        return None
    plain = frequencies(dim, base, device)
    return plain / plain.new_tensor(scaling["long_factor"])


def frequencies_for_length(
    scaling: Scaling, inv_freq: Tensor, long_inv_freq: Tensor | None, dim: int, base: float, length: int
) -> Tensor:
    """The frequencies for a call of ``length`` positions: "dynamic" lowers them beyond the original length, and
    "longrope" has others there.

    Source: dynamic NTK-aware scaling, https://www.reddit.com/r/LocalLLaMA/comments/14mrgpr/
    """
    if long_inv_freq is not None:
        return long_inv_freq if length > scaling[_LENGTH] else inv_freq
    if scaling.kind != "dynamic" or length <= scaling[_LENGTH] or dim == 2:  # one pair has frequency 1
        return inv_freq
    growth = scaling["factor"] * length / scaling[_LENGTH] - (scaling["factor"] - 1)
    return frequencies(dim, base * growth ** (dim / (dim - 2)), inv_freq.device)


def attention_factor(scaling: Scaling) -> float:
    """The factor of the rotated queries and keys: 1 except for YaRN and LongRoPE."""
    values = scaling.values
    if values.get("attention_factor") is not None:
        return float(values["attention_factor"])
    if scaling.kind == "longrope":  # the factor of Phi-3
        return math.sqrt(1 + math.log(values["factor"]) / math.log(values[_LENGTH]))
    if scaling.kind != "yarn":
        return 1.0
    mscale, mscale_all_dim = values.get("mscale"), values.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return _mscale(values["factor"], mscale) / _mscale(values["factor"], mscale_all_dim)
    return _mscale(values["factor"], 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0


def _yarn(scaling: Scaling, plain: Tensor, dim: int, base: float) -> Tensor:
    """Fast pairs unchanged, slow pairs stretched by the factor, a linear ramp in between.

    Source: Peng et al. 2023, YaRN (arXiv:2309.00071), section 3.2.
    """
    values = scaling.values

    def pair_with_rotations(count: float) -> float:
        return dim * math.log(values[_LENGTH] / (count * 2 * math.pi)) / (2 * math.log(base))

    first = pair_with_rotations(values.get("beta_fast") or 32.0)
    last = pair_with_rotations(values.get("beta_slow") or 1.0)
    if values.get("truncate") is not False:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    pair = torch.arange(dim // 2, dtype=torch.float32, device=plain.device)
    ramp = ((pair - first) / max(last - first, 1e-3)).clamp(0, 1)
    mixed: Tensor = plain / scaling["factor"] * ramp + plain * (1 - ramp)
    return mixed


def _llama3(scaling: Scaling, plain: Tensor) -> Tensor:
    """Short waves unchanged, long waves stretched by the factor, a blend in between.

    Source: rope_scaling in Meta's Llama 3.1 reference (llama_models, llama3/model.py, apply_scaling).
    """
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    waves = scaling[_LENGTH] * plain / (2 * math.pi)  # rotations of a pair within the original length
    blend = ((waves - low) / (high - low)).clamp(0, 1)
    mixed: Tensor = plain / scaling["factor"] * (1 - blend) + plain * blend
    return mixed


def _proportional(scaling: Scaling, plain: Tensor, dim: int) -> Tensor:
    """The first pairs, stretched by the factor; the others are not rotated.

    Source: the rope_type of Gemma 4 in the transformers library.
    """
    share, factor = (scaling.values.get(key) for key in ("partial_rotary_factor", "factor"))
    rotated = int((1.0 if share is None else share) * dim // 2)
    frequencies = plain / (factor or 1.0)
    frequencies[rotated:] = 0
    return frequencies

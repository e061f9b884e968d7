"""The checks of a conversion: arguments before it, names and sizes after it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from undivided.arguments.checks import listed
from undivided.errors import InputError
from undivided.nn import TransformerLayer


def checked_state(state: object, argument: str = "state") -> dict[str, Tensor]:
    """A copy of a state dict of whole tensors, without the scales of FP8.

    Raises:
        InputError: it is not one.
    """
    if not isinstance(state, Mapping):
        raise InputError(argument, "be a mapping of names to tensors", type(state).__name__)
    kept = {name: value for name, value in state.items() if not str(name).endswith("_extra_state")}
    for name, value in kept.items():
        if not isinstance(value, Tensor):
            raise InputError(f"{argument}[{name!r}]", "be a tensor", type(value).__name__)
        if hasattr(value, "placements"):
            hint = (
                "torch.distributed.checkpoint.state_dict.get_model_state_dict(model, "
                "options=StateDictOptions(full_state_dict=True, cpu_offload=True)), on rank 0"
            )
            raise InputError(f"{argument}[{name!r}]", "be a whole tensor", "a DTensor", hint=hint)
    return kept


def checked_names(names: object) -> dict[str, str]:
    """The names of parameters outside of the layers.

    Raises:
        InputError: it is not a mapping of names to names.
    """
    if names is None:
        return {}
    if not isinstance(names, Mapping) or not all(isinstance(name, str) for pair in names.items() for name in pair):
        raise InputError("names", "be a mapping of names in model to names in transformers, or None", repr(names))
    return dict(names)


def checked_layers(model: object) -> dict[str, TransformerLayer]:
    """The layers of a model by name, if they are those of decoders in transformers.

    Raises:
        InputError: there are none, or they have other blocks.
    """
    if not isinstance(model, torch.nn.Module):
        raise InputError("model", "be a torch.nn.Module", type(model).__name__)
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, TransformerLayer)}
    if not layers:
        raise InputError("model", "contain an undivided.TransformerLayer", type(model).__name__)
    for name, layer in layers.items():
        for option, is_other in (
            ("layer_type", layer.layer_type != "encoder"),
            ("output_layernorm", layer.output_layernorm),
            ("parallel_attention_mlp", layer.parallel_attention_mlp),
            ("apply_residual_connection_post_layernorm", layer.apply_residual_connection_post_layernorm),
        ):
            if is_other:
                must = "have layers of a norm, self-attention, a norm and a feed-forward block"
                raise InputError("model", must, f"{option}={getattr(layer, option)!r} in {name or 'the layer'}")
    return layers


def check_result(state: Mapping[str, Tensor], expected: Mapping[str, Any], argument: str, hint: str | None) -> None:
    """Raise InputError unless a converted state has the names and the sizes that are expected.

    Args:
        state: the result.
        expected: tensors by name.
        argument: that has the expected names.
        hint: of the error.
    """
    absent, other = sorted(expected.keys() - state.keys()), sorted(state.keys() - expected.keys())
    parts = [f"{len(absent)} absent: {listed(absent)}"] if absent else []
    parts += [f"{len(other)} unknown: {listed(other)}"] if other else []
    if parts:
        raise InputError("state", f"have the {len(expected)} parameters of {argument}", "; ".join(parts), hint=hint)
    wrong = [
        f"{name} {list(state[name].shape)} instead of {list(tensor.shape)}"
        for name, tensor in expected.items()
        if state[name].shape != tensor.shape
    ]
    if wrong:
        raise InputError("state", f"have the sizes of {argument}", f"{len(wrong)} different: {listed(wrong)}")

"""The entries of a checkpoint: a flat dictionary with the names that `torch.distributed.checkpoint` gives nested ones.

model.<name>                      a parameter or a buffer
optimizer.state.<name>.<moment>   a tensor of the optimizer for a parameter
undivided                         the rest: the optimizer's groups, the step and the values of the caller, as bytes
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from undivided.errors import InputError
from undivided.parallel.checkpoint.optimizer_state import without_gradients
from undivided.parallel.state import WRAPPED, Division, divisions

HEADER = "undivided"
MODEL, STATE = "model.", "optimizer.state."


class Header(NamedTuple):
    """What is not a tensor of a parameter."""

    step: int
    values: dict[str, Any]
    groups: list[dict[str, Any]] | None

    def to_bytes(self) -> bytes:
        """The header, for a checkpoint."""
        file = io.BytesIO()
        torch.save(self._asdict(), file)
        return file.getvalue()

    @staticmethod
    def from_bytes(data: bytes) -> Header:
        """The header in a checkpoint."""
        return Header(**torch.load(io.BytesIO(data), weights_only=True))


class TrainingState(NamedTuple):
    """The tensors of a model and of its optimizer, under the names of the checkpoint.

    Attributes:
        tensors: parameters and moments, the same memory as that of the model.
        groups: the optimizer's groups of parameters, by name; None without an optimizer.
        divisions: by name, how ranks divide the plain tensors that are parts of whole ones.
    """

    tensors: dict[str, Any]
    groups: list[dict[str, Any]] | None
    divisions: dict[str, Division]


def training_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> TrainingState:
    """The tensors of a model and its optimizer, whose state is created if it has none. All ranks call it."""
    by_name = {_plain(division.name): division for division in divisions(model)}
    with without_gradients(optimizer):
        both: Any = get_state_dict(model, () if optimizer is None else optimizer)
    parameters, moments = both
    tensors = {f"{MODEL}{name}": value for name, value in parameters.items()}
    divided = {f"{MODEL}{name}": division for name, division in by_name.items()}
    if optimizer is None:
        return TrainingState(tensors, None, divided)
    for name, state in moments["state"].items():
        for moment, value in state.items():
            key = f"{STATE}{name}.{moment}"
            tensors[key] = value
            if name in by_name and isinstance(value, Tensor) and value.dim() > 0:
                _check_moment(key, value, parameters[name])
                divided[key] = by_name[name]
    return TrainingState(tensors, moments["param_groups"], divided)


def set_training_state(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    tensors: Mapping[str, Any],
    groups: list[dict[str, Any]] | None,
) -> None:
    """Load what `training_state` returned, after its tensors were read. All names of the model were compared before.

    Parameters without an entry of the optimizer lose their state.
    """
    parameters = {key.removeprefix(MODEL): value for key, value in tensors.items() if key.startswith(MODEL)}
    moments: dict[str, Any] = {}
    for key, value in tensors.items():
        if key.startswith(STATE):
            name, _, moment = key.removeprefix(STATE).rpartition(".")
            moments.setdefault(name, {})[moment] = value
    state: dict[str, Any] = {} if optimizer is None else {"state": moments, "param_groups": groups}
    optimizers: Any = () if optimizer is None else optimizer
    options = StateDictOptions(strict=False)  # or an absent state of a parameter would be an error
    set_state_dict(model, optimizers, model_state_dict=parameters, optim_state_dict=state, options=options)


def checked_values(values: object) -> dict[str, Any]:
    """The values of the caller, if they can be loaded again."""
    if values is None:
        return {}
    must = "be a dictionary of tensors, numbers, text, lists and dictionaries"
    if not isinstance(values, Mapping):
        raise InputError("values", must, type(values).__name__)
    plain = dict(values)
    try:
        Header.from_bytes(Header(0, plain, None).to_bytes())
    except Exception as error:
        kinds = ", ".join(sorted({type(value).__name__ for value in plain.values()}))
        hint = "convert other objects, for example by their state_dict()"
        raise InputError("values", must, f"a dictionary of {kinds}", hint=hint) from error
    return plain


def _plain(name: str) -> str:
    """The name without the parts that compiled and recomputed modules add, which state dicts leave out."""
    for wrapper in WRAPPED:
        name = name.replace(f"{wrapper}.", "")
    return name


def _check_moment(key: str, moment: Tensor, parameter: Tensor) -> None:
    if moment.shape != parameter.shape:
        hint = "divide the layers by undivided.parallel.parallelize instead of tp_group"
        must = f"have tensors of the shape of the parameters ({list(parameter.shape)}) in layers built with tp_group"
        raise InputError("optimizer", must, f"{list(moment.shape)} for {key}", hint=hint)

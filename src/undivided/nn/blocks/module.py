"""The base class of the modules, which loads TransformerEngine's checkpoints, and the initialisation of parameters."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from undivided.errors import InputError
from undivided.nn.blocks.initial_weights import DividedInit, draw_dtensor
from undivided.nn.blocks.initial_weights import Init as Init
from undivided.nn.blocks.tensor_ranks import TensorRanks


class Module(torch.nn.Module):
    """A module that ignores `_extra_state` in checkpoints, in which TransformerEngine stores FP8 scales.

    Attributes:
        ranks: the ranks of which each holds a part of the parameters, as plain tensors or as DTensors; None: this rank
            holds the whole parameters.
    """

    ranks: TensorRanks | None = None

    def whole_on_ranks(self, *parameters: Tensor | None) -> list[Any]:
        """Parameters that every rank has: their gradients are sums over ranks if tokens are divided.

        Args:
            parameters: parameters of the module, of any shape; None stays None.

        Returns:
            The parameters as plain tensors, or views whose gradient is summed over ranks.
        """
        own, ranks = [own_part(parameter) for parameter in parameters], self.ranks
        if ranks is None or ranks.sequence is None:
            return own
        return [None if parameter is None else ranks.shared(parameter) for parameter in own]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        for key in [key for key in state_dict if key.startswith(prefix) and key.endswith("_extra_state")]:
            del state_dict[key]
        super()._load_from_state_dict(state_dict, prefix, *rest)


def default_init(weight: Tensor) -> None:
    """Fill a weight from a normal distribution with standard deviation 0.023, TransformerEngine's default."""
    torch.nn.init.normal_(weight, 0.0, 0.023)


def checked_init(argument: str, value: Init | None) -> Init:
    """The function that initialises a weight; `default_init` if None."""
    if value is None:
        return default_init
    if not callable(value):
        hint = "functools.partial(torch.nn.init.normal_, std=0.02)"
        raise InputError(argument, "be a function of a weight, or None", repr(value), hint=hint)
    return value


def checked_dtype(value: object) -> torch.dtype:
    """The dtype of parameters; torch's default if None."""
    if value is None:
        return torch.get_default_dtype()
    if not isinstance(value, torch.dtype) or not value.is_floating_point:
        raise InputError("params_dtype", "be a floating-point dtype or None", repr(value))
    return value


def initialise(parameter: Tensor | None, init: Init | float, ranks: TensorRanks | None = None) -> None:
    """Fill a parameter by a function or with a number, except on the meta device.

    Args:
        parameter: a plain tensor or a DTensor; None is ignored.
        init: the function or the number.
        ranks: the ranks that have the other parts of a plain tensor, for a function that draws by rank.
    """
    if parameter is None or parameter.is_meta:
        return
    with torch.no_grad():
        if not callable(init):
            parameter.fill_(init)
            return
        draw = functools.partial(init, ranks=ranks) if isinstance(init, DividedInit) else init
        if _is_dtensor(parameter):
            draw_dtensor(draw, parameter)
        else:
            draw(parameter)


def own_part(parameter: Any) -> Any:
    """What this rank holds of a parameter: of a DTensor its local part, of a plain one all; None stays None.

    Blocks compute with plain tensors and send by `TensorRanks`, whose errors name the step and the failed rank. DTensor
    would communicate on its own in the backward pass, where nothing of ours could add the names.

    Raises:
        InputError: the ranks have summands of a DTensor, as of a weight that a parametrization computes.
    """
    if not _is_dtensor(parameter):
        return parameter
    if any(placement.is_partial() for placement in parameter.placements):
        hint = "remove_parametrizations of torch.nn.utils.parametrize, before parallelize"
        placements = ", ".join(map(str, parameter.placements))
        raise InputError("module", "have parameters that are sharded or replicated", placements, hint=hint)
    return parameter.to_local()


def _is_dtensor(parameter: Any) -> bool:
    return hasattr(type(parameter), "to_local")

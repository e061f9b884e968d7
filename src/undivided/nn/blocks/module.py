"""The base class of the modules, which loads TransformerEngine's checkpoints, and the initialisation of parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from undivided.errors import InputError
from undivided.nn.blocks.tensor_ranks import TensorRanks, Tracker

Init = Callable[[Tensor], object]


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


def divided_init(init: Init, ranks: TensorRanks | None, tracker: Tracker | None) -> Init:
    """The initialisation of a weight of which each rank has its part, from other numbers on every rank.

    They are drawn in the tracker's context if there is one, else from a seed that torch's generator and the rank give.
    """
    if tracker is not None:
        return functools.partial(_draw_in_context, init, tracker)
    return init if ranks is None else functools.partial(_draw_by_rank, init, ranks.rank)


def _draw_in_context(init: Init, tracker: Tracker, weight: Tensor) -> None:
    with tracker().fork():
        init(weight)


def _draw_by_rank(init: Init, rank: int, weight: Tensor) -> None:
    seed = int(torch.randint(2**62, ()))
    devices = [] if weight.device.type == "cpu" else [weight.device]
    with torch.random.fork_rng(devices, device_type=weight.device.type if devices else "cuda"):
        torch.manual_seed(seed + rank)
        init(weight)


def checked_dtype(value: object) -> torch.dtype:
    """The dtype of parameters; torch's default if None."""
    if value is None:
        return torch.get_default_dtype()
    if not isinstance(value, torch.dtype) or not value.is_floating_point:
        raise InputError("params_dtype", "be a floating-point dtype or None", repr(value))
    return value


def initialise(parameter: Tensor | None, init: Init | float) -> None:
    """Fill a parameter by a function or with a number, except on the meta device."""
    if parameter is None or parameter.is_meta:
        return
    with torch.no_grad():
        if callable(init):
            init(parameter)
        else:
            parameter.fill_(init)


def own_part(parameter: Any) -> Any:
    """What this rank holds of a parameter: of a DTensor its local part, of a plain one all; None stays None.

    Blocks compute with plain tensors and send by `TensorRanks`, whose errors name the step and the failed rank. DTensor
    would communicate on its own in the backward pass, where nothing of ours could add the names.
    """
    return parameter.to_local() if hasattr(type(parameter), "to_local") else parameter

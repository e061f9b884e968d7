"""The base class of the modules, which loads TransformerEngine's checkpoints, and the initialisation of parameters."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from undivided.arguments.signature import takes
from undivided.errors import InputError
from undivided.nn.blocks.initial_weights import DividedInit, Init, draw_dtensor
from undivided.nn.blocks.tensor_ranks import TensorRanks

_EXTRA_STATE = "_extra_state"


class _NoExtraState:
    """`get_extra_state` of a module without one. Its class has PyTorch's, so that state dicts have no entry."""

    def __get__(self, module: torch.nn.Module | None, owner: type) -> Callable[..., object]:
        return torch.nn.Module.get_extra_state if module is None else lambda: None


class Module(torch.nn.Module):
    """A module that ignores `_extra_state` in checkpoints, in which TransformerEngine stores FP8 scales, unless a class
    defines `set_extra_state`.

    Attributes:
        ranks: the ranks of which each holds a part of the parameters, as plain tensors or as DTensors; None: this rank
            holds the whole parameters.
    """

    ranks: TensorRanks | None = None
    get_extra_state = _NoExtraState()  # PyTorch's raises "please file an issue"

    def whole_on_ranks(self, *names: str) -> list[Any]:
        """Parameters that every rank has: their gradients are sums over ranks if tokens are divided.

        Args:
            names: of parameters of the module, which may be None.

        Returns:
            The parameters as plain tensors, or views whose gradient is summed over ranks; None stays None.
        """
        own, ranks = [self._own(name, None) for name in names], self.ranks
        if ranks is None or ranks.sequence_axis is None:
            return own
        return [None if parameter is None else ranks.shared(parameter) for parameter in own]

    def _own(self, name: str, axis: int | None) -> Any:
        """This rank's part of a parameter, as `local_parameter` returns it."""
        return local_parameter(name, getattr(self, name), axis, self.ranks)

    def __prepare_scriptable__(self) -> NoReturn:
        """Called by torch.jit.script, whose own errors do not name the module."""
        hint = "torch.jit.trace(module, inputs), torch.export.export or torch.compile"
        raise InputError(
            "module", "be traced, exported or compiled", f"torch.jit.script of {type(self).__name__}", hint
        )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        unused = torch.nn.Module.set_extra_state
        users = [name for name, module in self.named_modules() if type(module).set_extra_state is not unused]
        used = {f"{prefix}{name}.{_EXTRA_STATE}" if name else f"{prefix}{_EXTRA_STATE}" for name in users}
        for key in [key for key in state_dict if key.startswith(prefix) and key.rpartition(".")[2] == _EXTRA_STATE]:
            if key not in used:
                del state_dict[key]
        super()._load_from_state_dict(state_dict, prefix, *rest)


def default_init(weight: Tensor) -> None:
    """Fill a weight from a normal distribution with standard deviation 0.023, TransformerEngine's default."""
    torch.nn.init.normal_(weight, 0.0, 0.023)


def checked_init(argument: str, value: Init | None) -> Init:
    """The function that initialises a weight; `default_init` if None."""
    if value is None:
        return default_init
    hint = "functools.partial(torch.nn.init.normal_, std=0.02)"
    if not callable(value):
        raise InputError(argument, "be a function of a weight, or None", repr(value), hint=hint)
    if not takes(value, 1):
        must = "be a function of one argument, the weight"
        raise InputError(argument, must, f"one with the arguments {inspect.signature(value)}", hint=hint)
    return value


def checked_dtype(value: object) -> torch.dtype:
    """The dtype of parameters; torch's default if None."""
    if value is None:
        return torch.get_default_dtype()
    if not isinstance(value, torch.dtype) or not value.is_floating_point or value.itemsize == 1:
        raise InputError("params_dtype", "be a floating-point dtype of at least 16 bits or None", repr(value))
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


def local_parameter(name: str, parameter: Any, axis: int | None, ranks: TensorRanks | None) -> Any:
    """What this rank holds of a parameter: of a DTensor its local part, of a plain one all; None stays None.

    Blocks compute with plain tensors and send by `TensorRanks`, whose errors name the step and the failed rank. DTensor
    would communicate on its own in the backward pass, where nothing of ours could add the names.

    Args:
        name: of the parameter, for errors.
        parameter: a parameter, or what a parametrization computes; None stays None.
        axis: the axis that the ranks divide; None: every rank has the whole.
        ranks: the ranks of the block; None: it is not divided.

    Raises:
        InputError: a DTensor is placed otherwise. Its local part would have another meaning. Or torch.func is active.
    """
    if not _is_dtensor(parameter):
        return parameter
    if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None:
        hint = "a layer that is built with tp_group has plain parameters"
        raise InputError("module", "have plain parameters under torch.func and vmap", f"a DTensor, {name}", hint=hint)
    placements = parameter.placements
    if any(placement.is_partial() for placement in placements):
        hint = "remove_parametrizations of torch.nn.utils.parametrize, before parallelize"
        raise InputError("module", "have parameters that are sharded or replicated", _listed(placements), hint=hint)
    if not _is_placed(parameter, axis, ranks):
        if axis is None or ranks is None:
            must = f"have the whole {name} on every rank"
        else:
            must = f"have {name} sharded on axis {axis} over its {ranks.size} tensor ranks"
        hint = (
            "undivided.parallel.parallelize(module, mesh) places the parameters; "
            "those that fully_shard divides are whole only within a call of its module"
        )
        got = f"{_listed(placements)} over {parameter.device_mesh.size()} ranks"
        raise InputError("module", must, got, hint=hint)
    return parameter.to_local()


def _is_placed(parameter: Any, axis: int | None, ranks: TensorRanks | None) -> bool:
    """Whether a DTensor is whole on every rank, or divided on an axis over these ranks."""
    placements, count = parameter.placements, parameter.device_mesh.size()
    if count == 1:
        return True
    if axis is None or ranks is None:
        return all(placement.is_replicate() for placement in placements)
    return len(placements) == 1 and count == ranks.size and bool(placements[0].is_shard(axis))


def _listed(placements: Any) -> str:
    return ", ".join(map(str, placements))


def _is_dtensor(parameter: Any) -> bool:
    return hasattr(type(parameter), "to_local")

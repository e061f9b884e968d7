"""The state of an optimizer, which `torch.distributed.checkpoint` creates by a step with gradients of zero."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator

import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from undivided.errors import InputError


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise InputError for an optimizer whose state cannot be created without a loss."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        hint = "pass values={'optimizer': optimizer.state_dict()} instead, if every rank has all parameters"
        name = type(optimizer).__name__
        raise InputError("optimizer", "have a step() that needs no closure, which creates its state", name, hint=hint)


@contextlib.contextmanager
def without_gradients(optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """A context in which the parameters of an optimizer have no gradients.

    PyTorch creates the state of an optimizer only if no parameter has a gradient.
    """
    groups = [] if optimizer is None else optimizer.param_groups
    gradients = [(parameter, parameter.grad) for group in groups for parameter in group["params"]]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


@contextlib.contextmanager
def state_for_saving(optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """A context after which an optimizer that has made no step has no state, as before.

    The step that creates the state is counted, so that Adam would correct its moments for one step too many.
    """
    is_new = optimizer is not None and not optimizer.state
    try:
        yield
    finally:
        if optimizer is not None and is_new:
            optimizer.state.clear()


@contextlib.contextmanager
def state_for_loading(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """A context in which PyTorch creates the state of every parameter, and which an error leaves as it was before."""
    if optimizer is None:
        yield
        return
    before = dict(optimizer.state)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    try:
        if before and any(parameter.requires_grad and not before.get(parameter) for parameter in parameters):
            optimizer.state.clear()  # or PyTorch would create none
            with without_gradients(optimizer):
                get_optimizer_state_dict(model, optimizer)
            optimizer.state.update(before)
        yield
    except BaseException:
        optimizer.state.clear()
        optimizer.state.update(before)
        raise

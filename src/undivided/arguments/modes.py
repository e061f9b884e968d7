"""Dispatch modes that must not see every operation of a call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

P = ParamSpec("P")
T = TypeVar("T")

_active = torch._C._len_torch_dispatch_stack


@contextmanager
def without_modes(is_hidden: Callable[[TorchDispatchMode], bool]) -> Iterator[None]:
    """A context in which the active modes for which `is_hidden` is True see nothing; the others see the operations."""
    modes = _get_current_dispatch_mode_stack()
    kept = [mode for mode in modes if not is_hidden(mode)]
    if len(kept) == len(modes):
        yield
        return
    with _disable_current_modes():
        for mode in kept:
            _push_mode(mode)
        try:
            yield
        finally:
            for _ in kept:
                _pop_mode()


def hidden_from_checkpoints(function: Callable[P, T]) -> Callable[P, T]:
    """The function, whose operations a selective checkpoint does not see and computes again.

    Such a checkpoint may keep the result of every operator, and refuses one that is written to later. A buffer for what
    another rank sends is written to.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if not _active():
            return function(*args, **kwargs)
        with without_modes(_is_of_checkpoint):
            return function(*args, **kwargs)

    return call


def _is_of_checkpoint(mode: TorchDispatchMode) -> bool:
    """Whether `torch.utils.checkpoint` has entered the mode, for a selective policy."""
    return type(mode).__module__ == "torch.utils.checkpoint"

"""Tensors as ranks exchange them: with values."""

from __future__ import annotations

from collections.abc import Iterable

from undivided.arguments.tensors import after_collective, recorder
from undivided.errors import InputError
from undivided.request.request import Tensors


def with_values(tensors: Tensors) -> Tensors:
    """The tensors of a call over ranks; those that a functional collective returned, once they have their values.

    Raises:
        InputError: a graph is recorded, or values are faked.
    """
    check_not_recorded(tensors)
    return Tensors._make(map(after_collective, tensors))


def check_not_recorded(tensors: Iterable[object]) -> None:
    """InputError if a graph of a call over ranks is recorded, or the values of its tensors are faked."""
    name = recorder(tensors)
    if name is None:
        return
    hint = (
        "ranks exchange values; undivided.explain(.., context_parallel=..) plans a call for meta tensors, and "
        "torch.compile runs it outside of its graphs"
    )
    raise InputError("context_parallel", "be None while a graph is recorded or faked", name, hint=hint)

"""``outside_of_graphs``: a decorator for functions and methods that torch.compile must not trace."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from undivided.arguments.signature import wrong_call

F = TypeVar("F", bound=Callable[..., Any])


def outside_of_graphs(function: F) -> F:
    """The function with a graph break: it decides on the host, or reads lengths, each of which would get a graph.
    A call that does not fit the signature raises InputError, as in `checked_call`."""

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            from undivided.arguments import _graph_break

            return _graph_break.call(function, arguments, options)
        try:
            return function(*arguments, **options)
        except TypeError as error:
            if (wrong := wrong_call(error, function, arguments, options)) is None:
                raise
        raise wrong

    return call  # type: ignore[return-value]

"""``outside_of_graphs``: a decorator for functions and methods that torch.compile must not trace."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from undivided.arguments.signature import checked_call

F = TypeVar("F", bound=Callable[..., Any])


def outside_of_graphs(function: F) -> F:
    """The function with a graph break: it decides on the host, or reads lengths, each of which would get a graph.
    A call that does not fit the signature raises InputError, as in `checked_call`."""

    checked = checked_call(function)

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            from undivided.arguments import _graph_break

            return _graph_break.call(function, arguments, options)
        return checked(*arguments, **options)

    return call  # type: ignore[return-value]

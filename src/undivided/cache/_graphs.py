"""``outside_of_graphs``: a decorator for methods that torch.compile must not trace."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def outside_of_graphs(function: F) -> F:
    """The method with a graph break: lengths are numbers on the host, and a graph would be compiled for each value."""

    @functools.wraps(function)
    def method(*arguments: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            from undivided.cache import _graph_break

            return _graph_break.call(function, arguments, options)
        return function(*arguments, **options)

    return method  # type: ignore[return-value]

"""Functions and methods that torch.compile must not trace."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from undivided.arguments._outside import waiting
from undivided.arguments.signature import checked_call

F = TypeVar("F", bound=Callable[..., Any])
_callback = torch._C._dynamo.eval_frame.get_eval_frame_callback


def traces_each_function() -> bool:
    """Whether torch.compile has left the graph of a caller, and compiles each function that is called from here on by
    itself. If such a function reads a cache, torch.compile writes a guard for each entry."""
    return callable(_callback())


def outside_of_graphs(function: F, other_names: Mapping[str, Sequence[str]] = MappingProxyType({})) -> F:
    """The function with a graph break: it decides on the host, or reads lengths, each of which would get a graph.
    A call that does not fit the signature raises InputError, as in `checked_call`, which takes the same arguments."""

    checked = checked_call(function, other_names)
    outside: list[Callable[..., Any]] = []
    if (loaded := sys.modules.get("undivided.arguments._graph_break")) is None:
        waiting.append((function, outside))
    else:
        outside.append(loaded.outside(function))

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            from undivided.arguments import _graph_break  # noqa: F401  # its import fills `outside`

            return outside[0](*arguments, **options)
        return checked(*arguments, **options)

    return call  # type: ignore[return-value]


def is_unknown(number: object) -> bool:
    """Whether the number is the value of a tensor, which torch.compile and torch.export do not know while they record:
    `tensor.item()` in a graph."""
    if not isinstance(number, float | int | torch.SymFloat | torch.SymInt):
        return False
    from torch.fx.experimental.symbolic_shapes import guard_or_true

    return guard_or_true(number < 0) and guard_or_true(number >= 0)

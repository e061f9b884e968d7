"""A function that runs outside of compiled graphs. Imported only during tracing: torch's compiler takes a second."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from undivided.arguments._outside import waiting

_REASON = "{} reads numbers, decides or raises an error on the host; call it outside of what fullgraph=True compiles"


@torch.compiler.disable(reason=_REASON.format("it"))  # type: ignore[untyped-decorator]
def call(function: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """The result of the function, which runs outside of the graph."""
    return function(*arguments, **options)


def outside(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which runs outside of the graph; torch.compile names it in the reason for its break."""
    disabled: Callable[..., Any] = torch.compiler.disable(function, reason=_REASON.format(function.__qualname__))
    return disabled


for _function, _outside in waiting:
    _outside.append(outside(_function))
waiting.clear()

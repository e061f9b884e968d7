"""A function that runs outside of compiled graphs. Imported only during tracing: torch's compiler takes a second."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_REASON = "it reads numbers, decides or raises an error on the host; call it outside of what fullgraph=True compiles"


@torch.compiler.disable(reason=_REASON)  # type: ignore[untyped-decorator]
def call(function: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """The result of the function, which runs outside of the graph."""
    return function(*arguments, **options)

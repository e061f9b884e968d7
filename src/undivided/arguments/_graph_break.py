"""A function that runs outside of compiled graphs. Imported only during tracing: torch's compiler takes a second."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable(reason="it reads numbers on the host, or raises an error")  # type: ignore[untyped-decorator]
def call(function: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """The result of the function, which runs outside of the graph."""
    return function(*arguments, **options)

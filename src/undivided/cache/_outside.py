"""Imported while torch.compile traces, and never before: torch's compiler takes a second to import."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable(reason="the lengths of a cache live on the host")  # type: ignore[untyped-decorator]
def call(function: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """The function's result, which no graph sees."""
    return function(*arguments, **options)

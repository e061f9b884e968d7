"""Functions that run outside of compiled graphs, until the first call is traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

waiting: list[tuple[Callable[..., Any], list[Callable[..., Any]]]] = []
"""The functions, and for each the list that gets its wrapper when the first call is traced."""

"""What the sizes of `_models.SIZES` do not make of an architecture."""

from __future__ import annotations

from typing import Any

ADJUSTED: dict[str, dict[str, Any]] = {}
"""Fields of a configuration by its ``model_type``."""

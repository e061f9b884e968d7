"""Where a user's own measurements are kept."""

from __future__ import annotations

import os
from pathlib import Path


def users_file(variable: str, name: str) -> Path:
    """The path in this environment variable, else the file of this name in the user's cache folder."""
    if given := os.environ.get(variable):
        return Path(given)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "undivided" / name

"""Where a user's own measurements are kept, and how their files are read and replaced."""

from __future__ import annotations

import functools
import json
import os
import uuid
from pathlib import Path
from typing import Any


def users_file(variable: str, name: str) -> Path:
    """The path in this environment variable, else the file of this name in the user's cache folder."""
    return _path(os.environ.get(variable), os.environ.get("XDG_CACHE_HOME"), os.environ.get("HOME"), name)


@functools.cache
def _path(text: str | None, cache: str | None, home: str | None, name: str) -> Path:
    """The path that these values of the variables lead to; `Path.home` reads HOME."""
    if text:
        return Path(text)
    return Path(cache or Path.home() / ".cache") / "undivided" / name


def read_json(path: Path) -> Any:
    """The value in a JSON file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not JSON in UTF-8, or is nested more deeply than Python's parser can follow.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def replace_text(path: Path, text: str) -> None:
    """Write a file, or replace it: a reader finds the old text or the new one, and so does an interrupt."""
    fresh = path.with_name(f"{path.name}.{uuid.uuid4().hex}")  # of no other file or process
    try:
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)

"""Checks of paths that commands write to, before the work starts, and why a file cannot be read."""

from __future__ import annotations

import os
from pathlib import Path

from undivided.errors import InputError


def folder_to_write(flag: str, path: Path) -> Path:
    """The folder, created if it does not exist.

    Raises:
        InputError: it is a file, or cannot be created or written to.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise InputError(flag, "be a folder", f"the file {path}") from None
    except OSError as error:
        raise InputError(flag, "be a folder that can be created", f"{path} ({error.strerror})") from None
    if not os.access(path, os.W_OK):
        raise InputError(flag, "be a folder that can be written to", str(path))
    return path


def file_to_write(flag: str, path: Path) -> Path:
    """The path of a file, whose folder is created if it does not exist.

    Raises:
        InputError: it is a folder, or cannot be written.
    """
    if path.is_dir():
        raise InputError(flag, "be a file", f"the folder {path}")
    folder_to_write(f"the folder of {flag}", path.parent)
    if path.exists() and not os.access(path, os.W_OK):
        raise InputError(flag, "be a file that can be written", str(path))
    return path


def reason_of(error: Exception) -> str:
    """Why a file cannot be read or used: the system's words, without the number and the path, or the error's own.

    >>> reason_of(FileNotFoundError(2, "No such file or directory", "report.json"))
    'No such file or directory'
    >>> reason_of(KeyError("schema"))
    "no 'schema'"
    """
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"no {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__

"""Each instruction set of the native library in this process: copies of it, each told by its environment what to
run."""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from undivided.kernels import cpu


@functools.cache
def _library(level: str) -> cpu.Library:
    copy = Path(tempfile.mkdtemp()) / cpu.path().name
    shutil.copy(cpu.path(), copy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNDIVIDED_ISA", level)
        library = cpu.Library(copy)
    shutil.rmtree(copy.parent)
    return library


def here() -> tuple[str, ...]:
    """The levels that this machine has, up to the one that the process was told; none without the library."""
    loaded = cpu.load()
    return () if isinstance(loaded, str) else loaded.levels[: loaded.levels.index(loaded.level) + 1]


@contextmanager
def running(level: str, threads: int) -> Iterator[None]:
    """What is called within runs on this level, on so many threads."""
    library, before = _library(level), torch.get_num_threads()
    assert library.level == level
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "load", lambda: library)
        torch.set_num_threads(threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)

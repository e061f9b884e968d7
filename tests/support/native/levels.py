"""Each instruction set of the native library in this process, as copies of the library with different environments."""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
    """The levels of this machine, none without the library. UNDIVIDED_ISA leaves out those above the one that it names,
    UNDIVIDED_TEST_LEVELS all that it does not name."""
    loaded = cpu.load()
    if isinstance(loaded, str):
        return ()
    forced = os.environ.get("UNDIVIDED_ISA")  # otherwise the level in use may be below the highest
    levels = loaded.levels[: loaded.levels.index(forced) + 1] if forced else loaded.levels
    chosen = os.environ.get("UNDIVIDED_TEST_LEVELS", "").split() or levels
    unknown = set(chosen) - set(levels)
    assert not unknown, f"UNDIVIDED_TEST_LEVELS: {sorted(unknown)} are not among {levels}"
    return tuple(chosen)


def parameters() -> list[Any]:
    """The levels of `here`, for tests with many cases: all but the highest and avx2, which differ most, are slow."""
    quick = {"avx2", *here()[-1:]}
    return [pytest.param(level, marks=[pytest.mark.slow] * (level not in quick)) for level in here()]


def others() -> tuple[str, ...]:
    """The levels of `here` but the one of this process, at which tests run that do not choose one."""
    loaded = cpu.load()
    return () if isinstance(loaded, str) else tuple(level for level in here() if level != loaded.level)


@contextmanager
def running(level: str, threads: int) -> Iterator[None]:
    """In the ``with`` block, the native kernel runs on this level and this number of threads."""
    library = _library(level)
    assert library.level == level
    with running_library(library, threads):
        yield


@contextmanager
def running_library(library: cpu.Library, threads: int) -> Iterator[None]:
    """In the ``with`` block, the native backend runs with this library and number of threads."""
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "load", lambda: library)
        torch.set_num_threads(threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)

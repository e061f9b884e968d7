"""A benchmark as a task for a process of its own (see `undivided.verification.workers`)."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, NamedTuple

from undivided.benchmarking import competitors
from undivided.benchmarking.catalogue import Benchmark, benchmarks
from undivided.benchmarking.runs import Settings, run

__all__ = ["OTHERS", "Task", "settings", "timed", "warmed"]

OTHERS = ("sdpa", "flex")
"""Who else takes part; flex not on a CPU, where it compiles for seconds and is slow then."""
COMPILED = ("undivided", "triton", "flex", "flash_attn", "cudnn")
"""Competitors that compile something: what --warm runs once."""


class Task(NamedTuple):
    """One benchmark by name, and how to run it."""

    suite: str
    name: str
    device: str
    backends: tuple[str, ...]
    seconds: float

    @property
    def benchmark(self) -> Benchmark:
        """The benchmark of this name."""
        return next(one for one in benchmarks(self.suite) if one.name == self.name)


@functools.cache
def settings(device: str, backends: tuple[str, ...], seconds: float) -> Settings:
    """How to run, one for the whole process: it remembers the best rates that the probes have shown."""
    return Settings(backends, _others(device), device, patience=seconds, attempts=2)


def timed(task: Task) -> dict[str, Any]:
    """Run a benchmark."""
    return run(task.benchmark, settings(task.device, task.backends, task.seconds))


def warmed(task: Task) -> None:
    """Call once what compiles, so that its kernels are in the caches on disk."""
    prepared = competitors.prepare(task.benchmark, task.device)
    others = [name for name in _others(task.device) if name in COMPILED]
    found, _ = competitors.competitors(prepared, task.backends, others)
    for competitor in found:
        if competitor.name in COMPILED:
            with contextlib.suppress(Exception):  # it is found again, and reported, when it is verified
                competitor.call()


def _others(device: str) -> tuple[str, ...]:
    return tuple(name for name in OTHERS if device != "cpu" or name not in COMPILED)

"""A benchmark as a task for a separate process (see `undivided.verification.workers`)."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, NamedTuple

from undivided.benchmarking import competitors
from undivided.benchmarking.catalogue import Benchmark, benchmarks
from undivided.benchmarking.runs import Settings, run

__all__ = ["TASK_OTHERS", "BenchmarkTask", "compile_task", "others", "run_task", "settings"]

TASK_OTHERS = ("sdpa", "flex")
"""Those of `competitors.OTHERS` that tasks time; flex only on a GPU, because on a CPU it compiles for seconds."""
COMPILED = ("undivided", "triton", "flex", "flash_attn", "cudnn")
"""The competitors that compile, which --warm runs once."""


class BenchmarkTask(NamedTuple):
    """One benchmark by name, and the settings of its run, as in `Settings`."""

    suite: str
    name: str
    device: str
    backends: tuple[str, ...]
    others: tuple[str, ...]
    patience: float

    @property
    def benchmark(self) -> Benchmark:
        """The benchmark with this name."""
        return next(one for one in benchmarks(self.suite) if one.name == self.name)


@functools.cache
def settings(device: str, backends: tuple[str, ...], others: tuple[str, ...], patience: float) -> Settings:
    """The settings, one object per process, because they store the best rates of the probes."""
    return Settings(backends, others, device, patience=patience, attempts=2)


def others(device: str) -> tuple[str, ...]:
    """The other competitors on a device."""
    return tuple(name for name in TASK_OTHERS if device != "cpu" or name not in COMPILED)


def run_task(task: BenchmarkTask) -> dict[str, Any]:
    """The case that a benchmark reports."""
    return run(task.benchmark, settings(task.device, task.backends, task.others, task.patience))


def compile_task(task: BenchmarkTask) -> None:
    """Call each competitor that compiles once, so that its kernels are in the caches on disk."""
    prepared = competitors.prepare(task.benchmark, task.device)
    compiled = [name for name in task.others if name in COMPILED]
    participants, _ = competitors.competitors(prepared, task.backends, compiled)
    for competitor in participants:
        if competitor.name in COMPILED:
            with contextlib.suppress(Exception):  # the verification raises and reports it again
                competitor.call()

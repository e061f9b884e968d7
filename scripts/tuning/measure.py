"""Times the problems of a threshold with libraries that differ in its value alone, in turns, and recommends a value."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from undivided.benchmarking import timing
from undivided.benchmarking.catalogue.benchmark import Benchmark
from undivided.benchmarking.competitors import Competitor, competitors, prepare
from undivided.kernels import cpu

GAIN, LOSS = 1.02, 0.97
"""A value is recommended if it is so much faster on the whole, and on no problem slower than this."""
MIN_TURNS, MAX_TURNS = 5, 60
ROUNDINGS = 16
"""Relative difference of two results, in roundings of their dtype, beyond which one of them is wrong."""


class Row(NamedTuple):
    """A problem, and for each other value its speed divided by that with the current value.

    spread: the largest distance between the quartiles of a ratio. wrong: the values whose result differs.
    """

    problem: str
    ratios: Mapping[int, float]
    spread: float
    wrong: tuple[int, ...]


def load(path: Path, level: str) -> cpu.Library:
    """The library at a path, at this level. UNDIVIDED_ISA must name the level, which is chosen at the first call.

    Raises:
        RuntimeError: it runs at another level.
    """
    library = cpu.Library(path)
    if library.level != level:
        raise RuntimeError(f"{path} runs at level {library.level}, not {level}")
    return library


def measure(problem: Benchmark, libraries: Mapping[int, cpu.Library], current: int, seconds: float) -> Row:
    """The ratios of one problem. One thread is timed by its processor time, which other load lengthens little."""
    with _using(libraries[current]):
        competitor = _native(problem)
        right = competitor.results()
    wrong = tuple(value for value, library in libraries.items() if not _agrees(competitor, library, right))
    calls = {
        str(value): _caller(competitor.call, library) for value, library in libraries.items() if value not in wrong
    }
    watch = timing.stopwatch(clock=time.process_time if torch.get_num_threads() == 1 else time.perf_counter)
    with _using(libraries[current]):
        for call in calls.values():
            call()
        turns = timing.plan_turns(calls, seconds, MIN_TURNS, MAX_TURNS, watch)
        times = timing.turn_times(calls, turns.number, turns.calls, watch)
    ratios, spread = {}, 0.0
    for name, own in times.items():
        if name != str(current):
            low, middle, high = statistics.quantiles(
                [base / mine for base, mine in zip(times[str(current)], own, strict=True)], n=4, method="inclusive"
            )
            ratios[int(name)], spread = middle, max(spread, high - low)
    return Row(problem.name, ratios, spread, wrong)


def recommended(rows: Sequence[Row], current: int) -> int:
    """The value that is fastest on the whole, if that is clear and nothing loses much by it; else the current one.

    >>> recommended([Row("a", {64: 1.10, 256: 1.2}, 0.0, ()), Row("b", {64: 1.0, 256: 0.9}, 0.0, ())], 128)
    64
    """
    best, gain = current, GAIN
    for value in rows[0].ratios if rows else ():
        ratios = [row.ratios[value] for row in rows if value in row.ratios]
        if len(ratios) < len(rows) or min(ratios) < LOSS:
            continue
        if (mean := statistics.geometric_mean(ratios)) > gain:
            best, gain = value, mean
    return best


def _native(problem: Benchmark) -> Competitor:
    """The call of the native backend."""
    participants, absent = competitors(prepare(problem), ("native",), ())
    for competitor in participants:
        if competitor.label == "native":
            return competitor
    raise RuntimeError(f"native cannot run {problem.name}: {absent}")


def _caller(call: Callable[[], object], library: cpu.Library) -> Callable[[], object]:
    """The call with another library, which the native backend loads at every call."""

    def run() -> object:
        cpu.load = lambda: library  # type: ignore[assignment]
        return call()

    return run


def _agrees(competitor: Competitor, library: cpu.Library, right: Mapping[str, Tensor]) -> bool:
    with _using(library):
        results = competitor.results()
    return all(_is_close(results[name], expected) for name, expected in right.items())


def _is_close(result: Tensor, expected: Tensor) -> bool:
    limit = ROUNDINGS * torch.finfo(expected.dtype).eps * float(expected.double().norm())
    return float((result.double() - expected.double()).norm()) <= limit


@contextmanager
def _using(library: cpu.Library) -> Iterator[None]:
    load_before = cpu.load
    cpu.load = lambda: library  # type: ignore[assignment]
    try:
        yield
    finally:
        cpu.load = load_before

"""Timing: competitors take turns in one run, and a run that was disturbed is repeated.

What disturbs a machine disturbs all competitors of a turn alike, so a figure is the median over the turns and is to be
compared with figures of the same run. Whether it was disturbed is asked of the machine itself: a probe of what it can
do at most runs before and after (`undivided.benchmarking.peak`), and where the two differ the run is repeated. A
witness may look closer, for what comes and goes in tenths of a second.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, TypeVar

import torch

Call = Callable[[], object]
Stopwatch = Callable[[Call, int], float]
"""Seconds that a number of calls, one after the other, took together."""

T = TypeVar("T")

DRIFT = 0.07
"""How far apart the probes around a run may be: on an idle machine they differ by 1 to 3 %."""

SHORTFALL = 0.2
"""How far a probe may stay below the best of the whole run: a machine may be busy from beginning to end. A processor
that has warmed up is up to a tenth slower than a cold one."""

SHARE = 0.85
"""The part of its threads' time that a probe gets at least; the rest went to other processes. One that has the cores to
itself gets 0.95 and more."""

SLOWER = 1.5
"""How many times its best a witness may take. Neighbours on a core's other thread that use its matrix unit make it 2 to
2.6; a processor that has warmed up 1.2."""

ATTEMPTS = 3
PAUSE = 0.2
"""Seconds after a race that a witness saw disturbed: what disturbs it comes in bursts about as long."""

TURN = 0.004
"""Seconds that a turn takes at least: short calls are repeated within it."""

FEWEST_TURNS, MOST_TURNS = 3, 15


def stopwatch(device: str = "cpu") -> Stopwatch:
    """How time is taken: by the clock on a CPU, by events in the stream on a GPU.

    >>> stopwatch()(lambda: sum(range(1000)), 10) > 0
    True
    """
    return _by_events if device.startswith("cuda") else _by_clock


def _by_clock(function: Call, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        function()
    return time.perf_counter() - start


def _by_events(function: Call, calls: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        function()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def interleaved(competitors: Mapping[str, Call], turns: int, calls: int) -> dict[str, float]:
    """Median seconds of one call of each competitor; they take turns of `calls` calls each.

    >>> times = interleaved({"a": lambda: sum(range(10)), "b": lambda: sum(range(10_000))}, turns=5, calls=20)
    >>> times["a"] < times["b"]
    True
    """
    for function in competitors.values():
        function()  # first calls fill caches and start threads
    return _in_turns(competitors, turns, dict.fromkeys(competitors, calls), _by_clock)


class Witness:
    """A call by which a race sees, right before and right after it, whether something else uses what the competitors
    need.

    The probes around a run miss what comes and goes in tenths of a second, and multiply-adds do not notice who uses a
    core's matrix unit. (It takes no turns: for some milliseconds after products on tiles, calls of 12 us took 15.)

    >>> witness = Witness(lambda: None)
    >>> witness.slowness() >= 1
    True
    """

    def __init__(self, call: Call, watch: Stopwatch = _by_clock) -> None:
        self._call, self._watch = call, watch
        self._best = math.inf

    def slowness(self) -> float:
        """How long it takes now, times the least that it ever took."""
        now = min(self._watch(self._call, 1) for _ in range(5))  # a burst slows them all
        self._best = min(self._best, now)
        return now / self._best


class Race(NamedTuple):
    """Median seconds of each competitor, after so many turns; contended: the witness was slow in every attempt."""

    seconds: dict[str, float]
    turns: int
    contended: bool = False


def race(
    competitors: Mapping[str, Call],
    patience: float,
    watch: Stopwatch = _by_clock,
    witness: Witness | None = None,
    attempts: int = ATTEMPTS,
) -> Race:
    """As `interleaved`, with as many turns as fit into `patience` seconds, and never fewer than three.

    Where the witness is slow before it or after it, it is run again, up to `attempts` times; the calmest counts.
    """
    for function in competitors.values():
        function()
    once = {name: max(watch(function, 1), 1e-9) for name, function in competitors.items()}
    calls = {name: max(1, math.ceil(TURN / seconds)) for name, seconds in once.items()}
    a_turn = sum(calls[name] * once[name] for name in competitors)
    turns = MOST_TURNS if a_turn * MOST_TURNS <= patience else max(int(patience / a_turn), FEWEST_TURNS)
    found: list[tuple[float, Race]] = []
    while True:
        before = witness.slowness() if witness else 1.0
        seconds = _in_turns(competitors, turns, calls, watch)
        slowness = max(before, witness.slowness()) if witness else before
        found.append((slowness, Race(seconds, turns, slowness > SLOWER)))
        if slowness <= SLOWER or len(found) == attempts:
            return min(found, key=lambda one: one[0])[1]
        time.sleep(PAUSE)


def _in_turns(
    competitors: Mapping[str, Call], turns: int, calls: Mapping[str, int], watch: Stopwatch
) -> dict[str, float]:
    seconds: dict[str, list[float]] = {name: [] for name in competitors}
    for _ in range(turns):
        for name, function in competitors.items():
            seconds[name].append(watch(function, calls[name]) / calls[name])
    return {name: statistics.median(times) for name, times in seconds.items()}


class Reading(NamedTuple):
    """What a probe saw: a rate, and the part of its threads' time in which they ran."""

    rate: float
    share: float = 1.0


@dataclass(frozen=True)
class Steady(Generic[T]):
    """A measurement with what the machine could do at most right before and right after it.

    contended: in every attempt something else was running, see `disturbance`.
    """

    value: T
    before: Reading
    after: Reading
    attempts: int
    contended: bool

    @property
    def peak(self) -> float:
        """The larger of the probes' rates: what a fraction is a fraction of."""
        return max(self.before.rate, self.after.rate)


def disturbance(before: Reading, after: Reading, best: float) -> float:
    """How much two probes say that the machine was disturbed; up to 1 it was not.

    They differ by more than `DRIFT`, or one stays more than `SHORTFALL` below the best rate seen, or one got less than
    `SHARE` of its threads' time.

    >>> disturbance(Reading(100.0), Reading(96.5), 100.0)
    0.5
    """
    low, high = sorted((before.rate, after.rate))
    share = min(before.share, after.share)
    signs = ((1 - low / high) / DRIFT, (1 - low / best) / SHORTFALL, (1 - share) / (1 - SHARE))
    return round(max(signs), 6)


def steady(
    measure: Callable[[], T], probe: Callable[[], Reading], best: float = 0.0, attempts: int = ATTEMPTS
) -> Steady[T]:
    """Measure between two probes, again where they say that the machine was disturbed; the calmest attempt counts.

    Args:
        measure: what is wanted. probe: what the machine can do at most, in any unit.
        best: the largest rate that the probe has shown before.
        attempts: how often to measure at most.

    >>> rates = iter([100.0, 60.0, 99.0, 101.0])
    >>> found = steady(lambda: "a time", lambda: Reading(next(rates)))
    >>> found.attempts, found.contended, found.peak
    (2, False, 101.0)
    """
    found: list[tuple[float, Steady[T]]] = []
    for attempt in range(1, attempts + 1):
        before, value, after = probe(), measure(), probe()
        best = max(best, before.rate, after.rate)
        disturbed = disturbance(before, after, best)
        found.append((disturbed, Steady(value, before, after, attempt, disturbed > 1)))
        if disturbed <= 1:
            break
    calmest = min(found, key=lambda one: one[0])[1]
    return replace(calmest, attempts=len(found))

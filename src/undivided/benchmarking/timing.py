"""Timing: competitors alternate in one run, and a disturbed run is repeated.

Other load on the machine slows all competitors of a turn alike, so a figure is the median over the turns and is only
comparable with figures of the same run. To detect other load, a probe measures the peak rate of the machine before and
after a run (`undivided.benchmarking.peak`); if the two differ, the run is repeated. A witness detects shorter load, of
tenths of a second.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import torch

Function = Callable[[], object]
Stopwatch = Callable[[Function, int], float]
"""Returns the seconds that a number of consecutive calls took together."""
Clock = Callable[[], float]
"""Returns seconds: `time.perf_counter`, or `time.process_time`, which other processes do not advance."""

T = TypeVar("T")

DRIFT = 0.07
"""Largest relative difference of the two probes of a run: on an idle machine they differ by 1 to 3 %."""

SHORTFALL = 0.2
"""Largest shortfall of a probe below the best probe so far, because a machine may be busy for a whole run. A processor
that has warmed up is up to a tenth slower than a cold one."""

SHARE = 0.85
"""Smallest fraction of CPU time that a probe gets on its threads; other processes got the rest. On idle cores it is at
least 0.95."""

SLOWER = 1.5
"""Largest time of a witness relative to its best. Load on the matrix unit by the other hardware thread of a core makes
it 2 to 2.6; a processor that has warmed up, 1.2."""

ATTEMPTS = 3
PAUSE = 0.2
"""Seconds to wait after a disturbed race: bursts of other load are about as long."""

HEAD_START = 2_000_000
"""Clock cycles, about a millisecond, for which a GPU waits before a turn, so that it is not idle while the host queues
the first call. A call that takes the host longer than the GPU is still measured by the host: the queue runs empty."""

TURN = 0.004
"""Shortest turn in seconds: short calls are repeated within a turn."""

MIN_TURNS, MAX_TURNS = 3, 15


def stopwatch(device: str = "cpu", clock: Clock = time.perf_counter) -> Stopwatch:
    """The stopwatch of a device: a clock on a CPU, events in the stream on a GPU.

    >>> stopwatch()(lambda: sum(range(1000)), 10) > 0
    True
    """
    if device.startswith("cuda"):
        return partial(_by_events, device=device)
    return _by_clock if clock is time.perf_counter else partial(_by_clock, clock=clock)


def _by_clock(function: Function, calls: int, clock: Clock = time.perf_counter) -> float:
    start = clock()
    for _ in range(calls):
        function()
    return clock() - start


def _by_events(function: Function, calls: int, device: str) -> float:
    with torch.cuda.device(device):  # events are of the stream of the current one
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(HEAD_START)
        start.record()
        for _ in range(calls):
            function()
        end.record()
        end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def interleaved(competitors: Mapping[str, Function], turns: int, calls: int) -> dict[str, float]:
    """The median seconds of one call of each competitor, over alternating turns of `calls` calls each.

    >>> times = interleaved({"a": lambda: sum(range(10)), "b": lambda: sum(range(10_000))}, turns=5, calls=20)
    >>> times["a"] < times["b"]
    True
    """
    for function in competitors.values():
        function()  # the first call fills caches and starts threads
    return medians(turn_times(competitors, turns, dict.fromkeys(competitors, calls)))


class Witness:
    """A reference call, timed right before and right after a race, that other load on the matrix unit makes slower.

    The probes of a run miss load of tenths of a second, and their multiply-adds are not slowed by load on the matrix
    unit. It does not take turns with the competitors, because calls of 12 us take 15 us for some milliseconds after
    products on tiles.

    >>> witness = Witness(lambda: None)
    >>> witness.slowness() >= 1
    True
    """

    def __init__(self, call: Function, watch: Stopwatch = _by_clock) -> None:
        self._call, self._watch = call, watch
        self._best = math.inf
        self.seconds = 0.0
        """Its last time."""

    def slowness(self) -> float:
        """Its time now, relative to the shortest so far."""
        self.seconds = min(self._watch(self._call, 1) for _ in range(5))  # a burst slows all five
        self._best = min(self._best, self.seconds)
        return self.seconds / self._best


class Race(NamedTuple):
    """The median seconds of each competitor over `turns` turns.

    contended: the witness was slow in every attempt. witness: the longer of its two times; 0 without one.
    """

    seconds: dict[str, float]
    turns: int
    contended: bool = False
    witness: float = 0.0


def race(
    competitors: Mapping[str, Function],
    patience: float,
    watch: Stopwatch = _by_clock,
    witness: Witness | None = None,
    attempts: int = ATTEMPTS,
) -> Race:
    """The times of alternating competitors, with as many turns as fit into `patience` seconds, but at least three.

    If the witness is slow before or after the race, the race is repeated, up to `attempts` times; the attempt with the
    fastest witness counts.
    """
    for function in competitors.values():
        function()
    turns, calls, _ = plan_turns(competitors, patience, MIN_TURNS, MAX_TURNS, watch)
    races: list[tuple[float, Race]] = []

    def witness_times() -> tuple[float, float]:
        """(relative to its best, in seconds)"""
        return (witness.slowness(), witness.seconds) if witness else (1.0, 0.0)

    while True:
        before = witness_times()
        seconds = medians(turn_times(competitors, turns, calls, watch))
        slowness, longer = map(max, zip(before, witness_times(), strict=True))
        races.append((slowness, Race(seconds, turns, slowness > SLOWER, longer)))
        if slowness <= SLOWER or len(races) == attempts:
            return min(races, key=lambda race: race[0])[1]
        time.sleep(PAUSE)


class Turns(NamedTuple):
    """How a race is divided: the number of turns, the calls of each competitor in a turn, and the seconds of a turn."""

    number: int
    calls: dict[str, int]
    seconds: float


def plan_turns(
    competitors: Mapping[str, Function], patience: float, min_turns: int, max_turns: int, watch: Stopwatch = _by_clock
) -> Turns:
    """The turns that fit into `patience` seconds, from `min_turns` to `max_turns`; every competitor is called once.

    >>> plan_turns({"a": lambda: None}, 1.0, 3, 15, lambda function, calls: 0.2 * calls)
    Turns(number=5, calls={'a': 1}, seconds=0.2)
    """
    once = {name: max(watch(function, 1), 1e-9) for name, function in competitors.items()}
    calls = {name: max(1, math.ceil(TURN / seconds)) for name, seconds in once.items()}
    seconds = sum(calls[name] * once[name] for name in competitors)
    number = max_turns
    if seconds * max_turns > patience:
        number = max(int(patience / seconds), min_turns)
    return Turns(number, calls, seconds)


def turn_times(
    competitors: Mapping[str, Function], turns: int, calls: Mapping[str, int], watch: Stopwatch = _by_clock
) -> dict[str, list[float]]:
    """The seconds of one call of each competitor in every turn; a turn is `calls` calls of each, one after the other.

    Each turn has another order: what ran just before has emptied the caches, or left them as a competitor needs them.

    >>> times = turn_times({"a": lambda: None, "b": lambda: None}, 3, {"a": 10, "b": 10})
    >>> [len(each) for each in times.values()]
    [3, 3]
    """
    seconds: dict[str, list[float]] = {name: [] for name in competitors}
    order = random.Random(0)
    for _ in range(turns):
        for name in order.sample(tuple(competitors), len(competitors)):
            seconds[name].append(watch(competitors[name], calls[name]) / calls[name])
    return seconds


def medians(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median of each competitor's times."""
    return {name: statistics.median(each) for name, each in times.items()}


class ProbeResult(NamedTuple):
    """The result of a probe: a rate, and the fraction of CPU time that it got on its threads."""

    rate: float
    share: float = 1.0


@dataclass(frozen=True)
class ProbedMeasurement(Generic[T]):
    """A measurement, with the peak rate of the machine right before and right after it.

    contended: other load was detected in every attempt; see `disturbance`.
    """

    value: T
    before: ProbeResult
    after: ProbeResult
    attempts: int
    contended: bool

    @property
    def peak(self) -> float:
        """The larger rate of the two probes, to which fractions refer."""
        return max(self.before.rate, self.after.rate)


def disturbance(before: ProbeResult, after: ProbeResult, best: float) -> float:
    """The disturbance that two probes indicate; above 1 the machine was disturbed.

    It is above 1 if the probes differ by more than `DRIFT`, one is more than `SHORTFALL` below the best rate so far, or
    one got less than `SHARE` of the CPU time of its threads.

    >>> disturbance(ProbeResult(100.0), ProbeResult(96.5), 100.0)
    0.5
    """
    low, high = sorted((before.rate, after.rate))
    share = min(before.share, after.share)
    signs = ((1 - low / high) / DRIFT, (1 - low / best) / SHORTFALL, (1 - share) / (1 - SHARE))
    return round(max(signs), 6)


def measure_between_probes(
    measure: Callable[[], T], probe: Callable[[], ProbeResult], best: float = 0.0, attempts: int = ATTEMPTS
) -> ProbedMeasurement[T]:
    """The measurement between two probes, repeated if they indicate a disturbance; the least disturbed attempt counts.

    Args:
        measure: the measurement. probe: the peak rate of the machine, in any unit.
        best: the largest rate of the probe so far.
        attempts: the largest number of attempts.

    >>> rates = iter([100.0, 60.0, 99.0, 101.0])
    >>> result = measure_between_probes(lambda: "a time", lambda: ProbeResult(next(rates)))
    >>> result.attempts, result.contended, result.peak
    (2, False, 101.0)
    """
    results: list[tuple[float, ProbedMeasurement[T]]] = []
    for attempt in range(1, attempts + 1):
        before, value, after = probe(), measure(), probe()
        best = max(best, before.rate, after.rate)
        disturbed = disturbance(before, after, best)
        results.append((disturbed, ProbedMeasurement(value, before, after, attempt, disturbed > 1)))
        if disturbed <= 1:
            break
    best_result = min(results, key=lambda result: result[0])[1]
    return replace(best_result, attempts=len(results))

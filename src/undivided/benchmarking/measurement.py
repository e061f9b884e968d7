"""``undivided ranks --measure``: the table of ranks of this machine, measured under a time limit.

The problems are those of `catalogue.coverage`, the most important first. As in a benchmark, results are verified before
they are timed, and the backends alternate. Selection needs the order of the backends, not their exact rates, and other
load slows all backends of a turn alike. So no probe of the peak is needed: a problem counts if its turns agree on the
order. One thread is timed by its processor time, which leaves out the time in which other processes have the core.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from undivided.benchmarking import competitors as _competitors
from undivided.benchmarking import peak, runs, suites, timing
from undivided.benchmarking.catalogue import Benchmark
from undivided.benchmarking.catalogue.coverage import coverage
from undivided.benchmarking.competitors import Absent, Competitor
from undivided.benchmarking.ranks import ranks
from undivided.selection.measured import TIE, Table, merged

__all__ = ["SECONDS", "SOURCE", "Measurement", "measure", "order_is_steady", "replace_measured"]

SECONDS = 160.0
"""Default time limit: with the start of Python and PyTorch below three minutes."""
SOURCE = "undivided ranks --measure"
"""The source of the figures in the table: `Run.report`."""

PATIENCE, MIN_TURNS = 0.25, 5
"""Seconds of timing per problem, and the fewest turns."""
FIXED = {"forward": 0.3, "backward": 0.5, "decode": 1.5}
"""Seconds that a problem takes at least, for the estimate whether it still fits into the time limit."""
FIRST_RATE = 5e8
"""Pairs per second of a whole measurement (verified, repeated), before one is known."""


class Measurement(NamedTuple):
    """The result of `measure`.

    table: the rates. report: the timed problems, for `undivided.benchmarking.ranks.ranks`. measured: the number of
        problems in the table. left_out: names of problems by the reason. wrong: a text for every wrong result, which
        was not timed. seconds: of the whole measurement. busy: other processes used the processor meanwhile.
    """

    table: Table
    report: Mapping[str, Any]
    measured: int
    left_out: Mapping[str, tuple[str, ...]]
    wrong: tuple[str, ...]
    seconds: float
    busy: bool


def measure(
    seconds: float = SECONDS,
    filter: str = "",
    *,
    groups: Iterable[Sequence[Benchmark]] | None = None,
    source: str = SOURCE,
    earlier: Sequence[Mapping[str, Any]] = (),
    step: Callable[[str], None] = lambda name: None,
) -> Measurement:
    """The rates of the backends of this machine, on its CPU, at the level and with the threads of this process.

    Args:
        seconds: the time limit; a problem that would pass it does not start.
        filter: text that the name of a problem contains, such as ``bf16-decode``; empty selects all.
        groups: the problems; None is `coverage()`. Those of one group are measured together or not at all.
        source: the source that the table names for its figures: the report, if it is kept.
        earlier: the cases of a report of the same machine, which is continued: they are not measured again, and count.
        step: called with the name of each problem before it starts.

    >>> measurement = measure(2.0, "fp32-full-h8-16-d64")
    >>> places = [place for kind in measurement.table.values() for place in kind.values()]
    >>> [sorted(place.rates) for place in places][:1]  # doctest: +SKIP
    [['native', 'torch_flash']]
    """
    start = time.monotonic()
    before = peak.arithmetic_probe(torch.float32).measure()
    cases, left_out = _timed_cases(
        coverage() if groups is None else groups, filter, earlier, _Clock(start + seconds), step
    )
    after = peak.arithmetic_probe(torch.float32).measure()
    report = {**suites.provenance(), "cases": cases}
    measured = ranks(report, source)
    for reason, names in measured.left_out.items():
        left_out["the backends' order changed between turns" if reason == "disturbed" else reason] += names
    return Measurement(
        measured.table,
        report,
        sum(map(len, measured.table.values())),
        {why: tuple(names) for why, names in left_out.items()},
        _wrong_results(cases),
        time.monotonic() - start,
        min(before.share, after.share) < timing.SHARE,
    )


def _timed_cases(
    groups: Iterable[Sequence[Benchmark]],
    filter: str,
    earlier: Sequence[Mapping[str, Any]],
    clock: _Clock,
    step: Callable[[str], None],
) -> tuple[list[Mapping[str, Any]], dict[str, list[str]]]:
    """The earlier cases and those for which there is time, and the names of the other problems by the reason."""
    backends = _competitors.selectable_backends("cpu")
    cases = list(earlier)
    known = {case["name"] for case in cases}
    left_out: dict[str, list[str]] = defaultdict(list)
    for group in groups:
        selected = [one.name for one in group if filter in one.name]
        if not selected or known.issuperset(one.name for one in group):
            continue
        if not clock.has_time_for(group):
            left_out["time limit"] += selected
            continue
        for benchmark in group:  # the backward counts with its forward
            step(benchmark.name)
            begin = time.monotonic()
            try:
                cases.append(_timed_case(benchmark, backends, clock))
            except Absent as why:
                left_out[str(why)].append(benchmark.name)
            clock.learn(benchmark, time.monotonic() - begin)
    return cases, left_out


def _wrong_results(cases: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    return tuple(
        f"{entry['label']} is wrong at {case['name']}: {entry.get('note') or entry['errors']}"
        for case in cases
        for entry in case["entries"]
        if not entry["ok"]
    )


def replace_measured(old: Table, new: Table, filter: str = "") -> Table:
    """The old table, in which the new rates replace all that an earlier `measure` found on the same architecture.

    With a filter, which measures only some problems, only the entries of the same problems are replaced.
    """
    if filter:
        return merged(old, new)
    levels = {kind.split("/")[0] for kind in new}
    kept = {
        kind: {
            place: entry
            for place, entry in places.items()
            if entry.run.report != SOURCE or kind.split("/")[0] not in levels
        }
        for kind, places in old.items()
    }
    return merged({kind: places for kind, places in kept.items() if places}, new)


def order_is_steady(times: Mapping[str, Sequence[float]]) -> bool:
    """Whether the turns agree, for every backend, on whether the fastest one (by the median) is faster.

    They disagree if in a quarter of the turns the other one is faster, and in another quarter the fastest one, each
    by more than what counts as equal.

    >>> order_is_steady({"a": [1.0, 1.1, 0.9, 2.0], "b": [2.0, 2.2, 1.8, 4.0]})
    True
    >>> order_is_steady({"a": [1.0, 1.0, 1.0, 1.0], "b": [0.5, 0.5, 2.0, 2.0]})
    False
    """
    medians = timing.medians(times)
    fastest = min(medians, key=lambda name: medians[name])
    for name, others in times.items():
        if name != fastest:
            ratios = [other / own for other, own in zip(others, times[fastest], strict=True)]
            low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
            if low < 1 - TIE and high > 1 / (1 - TIE):
                return False
    return True


class _Clock:
    """The time that is left, and the time that a group of problems is expected to take."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._seconds_per_pair: dict[str, float] = {}

    def left(self) -> float:
        """Seconds until the deadline."""
        return self._deadline - time.monotonic()

    def has_time_for(self, group: Iterable[Benchmark]) -> bool:
        """Whether a group is expected to end before the deadline."""
        return sum(map(self._expected, group)) <= self.left()

    def learn(self, benchmark: Benchmark, seconds: float) -> None:
        """Keep the longest time per pair that a problem of this kind took, above the fixed time."""
        kind, variable = self._kind(benchmark), seconds - FIXED[_direction(benchmark)]
        self._seconds_per_pair[kind] = max(self._seconds_per_pair.get(kind, 0.0), variable / _pairs(benchmark))

    def _expected(self, benchmark: Benchmark) -> float:
        per_pair = self._seconds_per_pair.get(self._kind(benchmark), 1 / FIRST_RATE)
        return FIXED[_direction(benchmark)] + per_pair * _pairs(benchmark)

    @staticmethod
    def _kind(benchmark: Benchmark) -> str:
        """Problems of a kind take about as long per pair; short ones have a larger fixed cost."""
        return f"{_direction(benchmark)} {_pairs(benchmark).bit_length() // 4}"


def _direction(benchmark: Benchmark) -> str:
    return "backward" if benchmark.backward else "decode" if benchmark.reads else "forward"


def _pairs(benchmark: Benchmark) -> int:
    batch, q_len, kv_len, heads, *_ = benchmark.case.sizes
    return batch * q_len * kv_len * heads


def _timed_case(benchmark: Benchmark, backends: Sequence[str], clock: _Clock) -> dict[str, Any]:
    """A benchmark as a case of a report, with the fields that `undivided.benchmarking.ranks` reads."""
    prepared = _competitors.prepare(benchmark)
    participants, _ = _competitors.competitors(prepared, backends, ())
    if len(participants) < 2:
        raise Absent("one backend alone can run it")
    entries, right = runs.verify(participants)
    case = runs.problem_fields(prepared) | {"entries": entries}
    if len(right) < 2:
        return case | {"rate": {"contended": False}}
    seconds, steady = _race(right, clock)
    for entry in entries:
        if entry["name"] in seconds:
            entry["seconds"] = seconds[entry["name"]]
    return case | {"rate": {"contended": not steady}}


def _race(competitors: Sequence[Competitor], clock: _Clock) -> tuple[dict[str, float], bool]:
    """The median seconds of each competitor, and whether the turns agree on the order; a second attempt if not."""
    calls = {one.name: one.call for one in competitors}
    watch = timing.stopwatch(clock=time.process_time if torch.get_num_threads() == 1 else time.perf_counter)
    turns = timing.plan_turns(calls, PATIENCE, MIN_TURNS, timing.MAX_TURNS, watch)
    times = timing.turn_times(calls, turns.number, turns.calls, watch)
    if not order_is_steady(times) and clock.left() > turns.number * turns.seconds:
        more = timing.turn_times(calls, turns.number, turns.calls, watch)
        times = {name: [*times[name], *more[name]] for name in times}
    return timing.medians(times), order_is_steady(times)

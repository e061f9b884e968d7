"""The numbers of a benchmark report that its charts draw: points, with sizes read from the problems."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from undivided.benchmarking.report import BenchmarkReport

SIZES = re.compile(r"q (\d+x\d+x\d+x\d+) \(BxSxHxD\), kv (\d+x\d+x\d+x\d+)(?:/(\d+))?")
"""The sizes in the text of a `Problem`: of q, of k, and the head size of v if it has its own."""
BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
OURS = "undivided"
PLAIN = "without"
"""The entry of a case that is our time of the same tensors without its feature, such as a mask."""


@dataclass(frozen=True)
class Point:
    """One competitor in one case: `length` keys, `rate` in FLOP/s, `intensity` in FLOP per byte."""

    suite: str
    case: str
    name: str
    dtype: str
    length: int
    rate: float
    intensity: float
    disturbed: bool

    @property
    def line(self) -> str:
        """The case without its length: one line of a chart over the length."""
        return re.sub(rf"-{self.length}(?=-|$)", "", self.case)


def points(report: BenchmarkReport) -> list[Point]:
    """A point for every timed competitor of every case whose problem names its sizes."""
    timed = []
    for case in report["cases"]:
        sizes = _sizes(case["problem"])
        dtype = next((name for name in BYTES if re.search(rf"\b{name}\b", case["problem"])), None)
        if sizes is None or dtype is None:
            continue
        length, elements = sizes
        moved = case["bytes"] or elements * BYTES[dtype] * (2 if case["backward"] else 1)
        for entry in case["entries"]:
            if entry["ok"] and entry.get("seconds"):
                rate = case["operations"] / entry["seconds"]
                intensity = case["operations"] / max(moved, 1)
                disturbed = bool(case["rate"]["contended"])
                point = Point(case["suite"], case["name"], entry["name"], dtype, length, rate, intensity, disturbed)
                timed.append(point)
    return timed


def _sizes(problem: str) -> tuple[int, int] | None:
    """(keys, elements of q, k, v and the output), from the text of a problem."""
    match = SIZES.search(problem)
    if match is None:
        return None
    q, k = ([int(size) for size in text.split("x")] for text in (match[1], match[2]))
    rows, v_dim = math.prod(q[:-1]) + math.prod(k[:-1]), int(match[3] or q[-1])
    return k[1], rows * (q[-1] + v_dim)  # a row of q goes with one of the output, a row of k with one of v


def ratios(report: BenchmarkReport) -> dict[str, dict[str, list[float]]]:
    """Times of each competitor divided by ours: {competitor: {group of cases: ratios}}."""
    by_name: dict[str, dict[str, list[float]]] = {}
    for case in report["cases"]:
        group = f"{case['suite']} {case['name'].partition('-')[0]}"
        for entry in case["entries"]:
            if entry["name"] not in (OURS, PLAIN) and entry["ok"] and entry.get("of_ours"):
                by_name.setdefault(entry["name"], {}).setdefault(group, []).append(entry["of_ours"])
    return by_name


def roofs(report: BenchmarkReport) -> tuple[dict[str, float], float | None]:
    """(the highest measured FLOP/s by what was measured, the highest measured bytes per second or None)."""
    flops: dict[str, float] = {}
    reads: list[float] = []
    for case in report["cases"]:
        used = case["rate"].get("used")
        if used and case["bytes"]:
            reads.append(used)
        elif used:
            what = case["rate"]["what"]
            flops[what] = max(flops.get(what, 0.0), used)
    return flops, max(reads, default=None)


def geometric_mean(values: Iterable[float]) -> float:
    """The geometric mean of positive numbers.

    >>> geometric_mean([1.0, 4.0])
    2.0
    """
    return math.exp(statistics.fmean(math.log(value) for value in values))

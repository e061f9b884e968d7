"""Measured ranks: a benchmark report as the table by which selection orders backends (`undivided.selection.measured`).

Only whole calls of the library count, each for the backend that ran, if the result was right and the run undisturbed.
Training runs forward and backward, so the time of a backward is added to that of the forward with the same name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from undivided.benchmarking.catalogue.benchmark import BACKWARD
from undivided.errors import InputError
from undivided.machine import Machine
from undivided.request.problem import Problem
from undivided.selection import measured
from undivided.selection.measured import MeasuredRates, Run, Table, TableCell

__all__ = ["Ranks", "add", "describe_place", "ranks"]

TimedCase = Mapping[str, Any]


class Ranks(NamedTuple):
    """A table of rates, and the names of the cases that it leaves out, by reason."""

    table: Table
    left_out: Mapping[str, tuple[str, ...]]

    def __str__(self) -> str:
        entries = [entry for cells in self.table.values() for entry in cells.values()]
        compared = sum(len(entry.rates) > 1 for entry in entries)
        lines = [f"{len(entries)} places, {compared} of them with two backends or more"]
        lines += [f"left out, {why}: {', '.join(names)}" for why, names in self.left_out.items()]
        return "\n".join(lines)


class Timing(NamedTuple):
    """The work of a case, and the seconds that each backend took for it."""

    work: float
    seconds: Mapping[str, float]


def describe_place(problem: Problem, machine: Machine) -> dict[str, Any] | None:
    """The cell of a problem in the table, and its work, for a report; None if it has no cell."""
    cell = measured.table_cell(problem, machine)
    return None if cell is None else {**cell._asdict(), "operations_or_bytes": measured.work(problem)}


def ranks(report: Mapping[str, Any], name: str) -> Ranks:
    """The rates of a report.

    Args:
        report: the result of `execute`, or the contents of a file that ``--json`` wrote.
        name: the name of that file, which the table keeps as the source of the figures.

    Raises:
        InputError: it is not such a report, or one of a version that did not store the problems.
    """
    try:
        run = _run(report, name)
        timings, left_out = _gather(report["cases"])
    except (KeyError, TypeError, AttributeError) as error:
        why = f"no {error}" if isinstance(error, KeyError) else "values of other types"
        raise InputError("report", "be one that `undivided bench --json` wrote", f"{name} ({why})") from None
    table: dict[str, dict[tuple[int, int], MeasuredRates]] = {}
    for cell, cell_timings in timings.items():
        if rates := dict(_rates(cell_timings)):
            table.setdefault(cell.kind, {})[cell.length, cell.work] = MeasuredRates(run, rates)
    return Ranks(table, {why: tuple(names) for why, names in left_out.items()})


def add(report: Mapping[str, Any], name: str, path: Path) -> Ranks:
    """The rates of a report, after they replaced those of the same problems in the table at `path`.

    Raises:
        InputError: as for `ranks`, or the file exists and is not a table.
    """
    new = ranks(report, name)
    measured.write(path, measured.merged(measured.read(path), new.table))
    return new


def _run(report: Mapping[str, Any], name: str) -> Run:
    """The source of the figures of a report."""
    machine = report["machine"]
    threads = machine["threads"]
    device = machine.get("gpu") or f"{machine['processor']}, {threads} thread{'' if threads == 1 else 's'}"
    if machine.get("UNDIVIDED_ISA"):  # PyTorch may have been restricted too: ATEN_CPU_CAPABILITY
        device += f", PyTorch at {machine['isa']}"
    return Run(report["when"], device, str(report["commit"]), machine["torch"], name)


def _gather(cases: Sequence[TimedCase]) -> tuple[dict[TableCell, list[Timing]], dict[str, list[str]]]:
    """The timings at each cell, and the names of the cases that are left out, by reason."""
    by_name = {case["name"]: case for case in cases}
    timings: dict[TableCell, list[Timing]] = defaultdict(list)
    left_out: dict[str, list[str]] = defaultdict(list)
    for case in cases:
        times = _times(case, by_name)
        if isinstance(times, str):
            left_out[times].append(case["name"])
        else:
            cell = dict(case["place"])
            work = cell.pop("operations_or_bytes")
            timings[TableCell(**cell)].append(Timing(work, times))
    return timings, left_out


def _times(case: TimedCase, cases: Mapping[str, TimedCase]) -> dict[str, float] | str:
    """The seconds by backend, or the reason why the case is left out."""
    if case.get("place") is None:
        return "the report does not name the problem or the architecture"
    if case["rate"]["contended"]:
        return "disturbed"
    own = dict(_right(case))
    if not case["backward"]:
        return own
    forward = cases.get(case["name"].removesuffix(BACKWARD))
    if forward is None or forward["rate"]["contended"] or _sizes(forward) != _sizes(case):
        return "no undisturbed forward for the backward"
    of_forward = dict(_right(forward))
    return {name: time + of_forward[name] for name, time in own.items() if name in of_forward}


def _sizes(case: TimedCase) -> str:
    """The text of a problem without the features that it needs."""
    return str(case["problem"]).partition("; needs ")[0]


def _right(case: TimedCase) -> Iterator[tuple[str, float]]:
    """(backend, seconds) of the library's own calls with a right result: their labels are names of backends."""
    for entry in case["entries"]:
        if entry["ok"] and "seconds" in entry and entry["name"] in ("undivided", entry["label"]):
            yield entry["label"], entry["seconds"]


def _rates(timings: Sequence[Timing]) -> Iterator[tuple[str, float]]:
    """The rates by backend over all cases of one cell; a backend without one of the cases is left out."""
    work = sum(timing.work for timing in timings)
    for name in timings[0].seconds:
        if all(name in timing.seconds for timing in timings):
            rate = work / sum(timing.seconds[name] for timing in timings)
            yield name, float(f"{rate:.4g}")

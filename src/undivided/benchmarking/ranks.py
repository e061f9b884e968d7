"""A report turned into the table that selection orders backends by (`undivided._measured`).

Only whole calls of the library count, each under the name of the backend that ran: what was right, in cases that
nothing disturbed. What trains takes forward and backward together, so a backward counts with the forward of the same
name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from undivided import _measured
from undivided._machine import Machine
from undivided._measured import Entry, Place, Run, Table
from undivided._problem import Problem
from undivided.errors import InputError

__all__ = ["Ranks", "add", "described", "ranks"]

Case = Mapping[str, Any]
BACKWARD = "-backward"
"""The end of the name of a case that times a backward alone."""


class Ranks(NamedTuple):
    """A table, and what was left out of it: why -> names of cases."""

    table: Table
    left_out: Mapping[str, tuple[str, ...]]

    def __str__(self) -> str:
        entries = [entry for places in self.table.values() for entry in places.values()]
        compared = sum(len(entry.rates) > 1 for entry in entries)
        lines = [f"{len(entries)} places, {compared} of them with two backends or more"]
        lines += [f"left out, {why}: {', '.join(names)}" for why, names in self.left_out.items()]
        return "\n".join(lines)


class Timed(NamedTuple):
    """The work of a case, and the seconds that backends took for it."""

    work: float
    seconds: Mapping[str, float]


def described(problem: Problem, machine: Machine) -> dict[str, Any] | None:
    """Where a problem stands in a table, and its work, for a report."""
    at = _measured.place(problem, machine)
    return None if at is None else {**at._asdict(), "operations_or_bytes": _measured.work(problem)}


def ranks(report: Mapping[str, Any], name: str) -> Ranks:
    """The rates of a report.

    Args:
        report: what `execute` returned, or what ``--json`` wrote.
        name: of the file it lies in, for those who ask where a figure comes from.

    Raises:
        InputError: it is no such report, or one of a version that did not note what was asked.
    """
    try:
        run = _run(report, name)
        found, left_out = _gathered(report["cases"])
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError("report", "be one that `undivided bench --json` wrote", f"{name} (no {error})") from None
    table: dict[str, dict[tuple[int, int], Entry]] = {}
    for at, timed in found.items():
        if rates := dict(_rates(timed)):
            table.setdefault(at.kind, {})[at.length, at.work] = Entry(run, rates)
    return Ranks(table, {why: tuple(names) for why, names in left_out.items()})


def add(report: Mapping[str, Any], name: str, path: Path) -> Ranks:
    """Put the rates of a report into the table at `path`, in place of what it has for the same problems.

    Raises:
        InputError: as `ranks`; or the file is there and no table.
    """
    found = ranks(report, name)
    _measured.write(path, _measured.merged(_measured.read(path), found.table))
    return found


def _run(report: Mapping[str, Any], name: str) -> Run:
    machine = report["machine"]
    threads = machine["threads"]
    what = machine.get("gpu") or f"{machine['processor']}, {threads} thread{'' if threads == 1 else 's'}"
    return Run(report["when"], what, str(report["commit"]), machine["torch"], name)


def _gathered(cases: Sequence[Case]) -> tuple[dict[Place, list[Timed]], dict[str, list[str]]]:
    """What was timed at each place; and why -> which cases were left out."""
    named = {case["name"]: case for case in cases}
    found: dict[Place, list[Timed]] = defaultdict(list)
    left_out: dict[str, list[str]] = defaultdict(list)
    for case in cases:
        times = _times(case, named)
        if isinstance(times, str):
            left_out[times].append(case["name"])
        else:
            place = dict(case["place"])
            work = place.pop("operations_or_bytes")
            found[Place(**place)].append(Timed(work, times))
    return found, left_out


def _times(case: Case, cases: Mapping[str, Case]) -> dict[str, float] | str:
    """Seconds by backend; or why the case is left out."""
    if case.get("place") is None:
        return "their report does not say what was asked, or on what architecture"
    if case["rate"]["contended"]:
        return "disturbed"
    own = dict(_right(case))
    if not case["backward"]:
        return own
    forward = cases.get(case["name"].removesuffix(BACKWARD))
    if forward is None or forward["rate"]["contended"] or _sizes(forward) != _sizes(case):
        return "no undisturbed forward beside the backward"
    also = dict(_right(forward))
    return {name: time + also[name] for name, time in own.items() if name in also}


def _sizes(case: Case) -> str:
    """The problem without what it needs of a backend."""
    return str(case["problem"]).partition("; needs ")[0]


def _right(case: Case) -> Iterator[tuple[str, float]]:
    """(backend, seconds) of the library's own calls that gave the right answer: those labelled with their backend."""
    for entry in case["entries"]:
        if entry["ok"] and "seconds" in entry and entry["name"] in ("undivided", entry["label"]):
            yield entry["label"], entry["seconds"]


def _rates(timed: Sequence[Timed]) -> Iterator[tuple[str, float]]:
    """Rates by backend over all the cases of one place; one that sat one of them out is not comparable."""
    work = sum(one.work for one in timed)
    for name in timed[0].seconds:
        if all(name in one.seconds for one in timed):
            rate = work / sum(one.seconds[name] for one in timed)
            yield name, float(f"{rate:.4g}")

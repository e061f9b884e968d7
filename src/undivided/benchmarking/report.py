"""A report as tables, for the terminal and as Markdown, with the same cells."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from undivided._units import duration, human
from undivided.benchmarking.suites import SCHEMA
from undivided.errors import InputError

__all__ = ["Cell", "Table", "markdown", "tables"]

BenchmarkReport = Mapping[str, Any]
"""The result of `execute`."""
TimedCase = Mapping[str, Any]
"""An entry of its "cases"."""

TITLES = {
    "forward": "Forward",
    "backward": "Backward alone",
    "mask": "Masks and scores",
    "decode": "Decoding",
    "serving": "Serving",
    "small": "Small problems",
    "overhead": "Overhead of a call",
    "memory": "Memory",
    "gpu": "On a GPU",
    "gpu-decode": "Decoding on a GPU",
}

WORST = 8
"""Number of small problems over their goal that are listed."""


class Cell(NamedTuple):
    """A text, and its tone: "good", "bad" or neither."""

    text: str
    tone: str = ""


@dataclass(frozen=True)
class Table:
    """One suite. The first column is text, and so is a last column called goal; all others are numbers."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()

    @property
    def numbers(self) -> tuple[str, ...]:
        """The columns that hold numbers."""
        return tuple(name for name in self.columns[1:] if name not in ("goal", "worst"))


CONTENTION = "~: other load on the machine disturbed every attempt, in a row of several problems those of at least one."
"""The legend of the marked lines of a table."""


def tables(report: BenchmarkReport) -> list[Table]:
    """The tables of a report, one for every suite in it.

    Args:
        report: the result of `execute`.

    Returns:
        One `Table` per suite.

    Raises:
        InputError: it is not a report, or one of another version.

    >>> from undivided.benchmarking import execute, plan
    >>> from undivided.benchmarking.runs import Settings
    >>> settings = Settings(backends=(), others=("sdpa",), patience=0.001, small_patience=0.001, attempts=1)
    >>> report = execute(plan(["small"], filter="small/fp32-b1-h8-1-d64"), settings)
    >>> [table.title for table in tables(report)]
    ['Small problems']
    """
    if not isinstance(report, Mapping) or report.get("schema") != SCHEMA:
        schema = report.get("schema") if isinstance(report, Mapping) else type(report).__name__
        raise InputError("report", f"have schema {SCHEMA}, that of this version's bench", repr(schema))
    suites = dict.fromkeys(case["suite"] for case in report["cases"])
    result = [
        (_small if suite == "small" else _case_table)(suite, [x for x in report["cases"] if x["suite"] == suite])
        for suite in suites
    ]
    if "overhead" in report:
        result.append(_overhead(report["overhead"]))
    if "memory" in report:
        result.append(_memory(report["memory"]))
    return result


def markdown(report: BenchmarkReport) -> str:
    """The tables of a report as Markdown, after a line with the machine and the date.

    Args:
        report: the result of `execute`.

    Returns:
        Markdown with one table per suite.

    Raises:
        InputError: as for `tables`.

    >>> markdown({})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    undivided.errors.InputError: report must ...
    """
    suites = tables(report)  # checks the report
    parts = [f"{headline(report)}\n"]
    for table in suites:
        lines = [f"**{table.title}**", "", _line(table.columns)]
        lines.append(_line("--:" if name in table.numbers else "---" for name in table.columns))
        lines += [_line(f"**{cell.text}**" if cell.tone == "bad" else cell.text for cell in row) for row in table.rows]
        lines += ["", *table.notes] if table.notes else []
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def headline(report: BenchmarkReport) -> str:
    """The machine, the versions and the date, in one line."""
    machine = report["machine"]
    isa = machine["native"] + (" (forced)" if machine["UNDIVIDED_ISA"] else "")
    parts = [
        machine.get("gpu") or machine["processor"],
        f"{machine['threads']} thread{'s' * (machine['threads'] != 1)}",
        f"native at {isa}",
        f"PyTorch {machine['torch']}",
    ]
    parts += [f"onnxruntime {machine['onnxruntime']}"] if machine["onnxruntime"] else []
    parts += [f"commit {report['commit']}"] if report["commit"] else []
    parts += ["quick run"] if report["quick"] else []
    parts += ["processor time"] if report.get("settings", {}).get("clock") == "processor time" else []
    parts += ["interrupted"] if report["interrupted"] else []
    return ", ".join([*parts, report["when"][:10]])


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in cells) + " |"


def _case_table(suite: str, cases: Sequence[TimedCase]) -> Table:
    """The table of a suite of single problems."""
    others = dict.fromkeys(entry["name"] for case in cases for entry in case["entries"])
    others.pop("undivided", None)
    fraction = "reads" if all(case["bytes"] for case in cases) else "peak"  # serving has both in one table
    columns = ("case", "time", fraction, *map(_short, others), "goal")
    rows = tuple(_row(case, others) for case in cases)
    peaks = {case["rate"]["what"]: case["rate"]["unit"] for case in cases}
    best = {what: max(case["rate"]["used"] for case in cases if case["rate"]["what"] == what) for what in peaks}
    ratios = f"; {', '.join(map(_short, others))}: their time / our time" if others else ""
    notes = [f"{columns[2]}: fraction of the peak below{ratios}."]
    notes += [f"Peaks: {', '.join(f'{what} {human(rate, peaks[what])}' for what, rate in best.items())}."]
    return Table(TITLES[suite], columns, rows, (*notes, *_contention_note(cases)))


def _short(name: str) -> str:
    """The name of a competitor as a column title."""
    return name.replace("onnxruntime", "onnx")


def _contention_mark(cases: Iterable[TimedCase]) -> str:
    return " ~" if any(case["rate"]["contended"] for case in cases) else ""


def _contention_note(cases: Sequence[TimedCase]) -> list[str]:
    if _contention_mark(cases):
        return [CONTENTION]
    return []


def _row(case: TimedCase, others: Iterable[str]) -> tuple[Cell, ...]:
    entries = {entry["name"]: entry for entry in case["entries"]}
    name = case["name"] + _contention_mark([case])
    ours = entries.get("undivided", {})
    if "seconds" not in ours:
        figures = [Cell("WRONG", "bad") if ours else Cell("none"), Cell("")]
    else:
        figures = [Cell(duration(ours["seconds"])), Cell(f"{ours['fraction']:.2f}")]
    theirs = (_other(entries.get(other), "seconds" in ours) for other in others)
    return Cell(name), *figures, *theirs, _goals(case)


def _other(entry: Mapping[str, Any] | None, comparable: bool) -> Cell:
    """The time of a competitor divided by ours."""
    if entry is None:
        return Cell("")
    if not entry["ok"]:
        return Cell("WRONG", "bad")
    return Cell(f"{entry['of_ours']:.2f}" if comparable else "")


def _goals(case: TimedCase) -> Cell:
    goals = case.get("goals", ())
    texts = [f"{goal['wanted']:.3g} {_short(goal['what'])} {'met' if goal['met'] else missed(goal)}" for goal in goals]
    good = all(goal["met"] for goal in goals)
    return Cell(", ".join(texts), "" if not texts else "good" if good else "bad")


def missed(goal: Mapping[str, Any]) -> str:
    """The distance by which a goal is missed.

    >>> missed({"short": 0.12})
    '-12 %'
    """
    return f"-{100 * goal['short']:.0f} %"


def _small(suite: str, cases: Sequence[TimedCase]) -> Table:
    """One row for each dtype and direction; the problems furthest over their goal are listed."""
    groups: dict[tuple[str, bool], list[TimedCase]] = {}
    for case in cases:
        groups.setdefault((case["name"].partition("-")[0], case["backward"]), []).append(case)
    rows = []
    for (dtype, backward), group in groups.items():
        goals = [goal for case in group for goal in case.get("goals", ())]
        met = sum(goal["met"] for goal in goals)
        ratios = [
            entry["of_ours"]
            for case in group
            for entry in case["entries"]
            if entry["name"] == "sdpa" and entry.get("of_ours")
        ]
        wrong = [case["name"] for case in group if not all(entry["ok"] for entry in case["entries"])]
        median = f"{statistics.median(ratios):.2f}" if ratios else ""
        rows.append(
            (
                Cell(f"{dtype} {'backward' if backward else 'forward'}{_contention_mark(group)}"),
                Cell(str(len(group))),
                Cell(f"{met} of {len(goals)}", "good" if met == len(goals) else "bad"),
                Cell(median),
                Cell(f"{len(wrong)}", "bad" if wrong else ""),
            )
        )
    notes = ["Goal: at most 1.05 x PyTorch's SDPA + 15 us; x sdpa is the median of its time / ours."]
    misses = [
        (goal["found"] - goal["wanted"], case["name"])
        for case in cases
        for goal in case.get("goals", ())
        if not goal["met"]
    ]
    if misses:
        worst = sorted(misses, key=lambda miss: miss[0], reverse=True)[:WORST]
        notes.append(f"Furthest over the goal: {', '.join(f'{name} by {duration(excess)}' for excess, name in worst)}.")
    return Table(
        TITLES[suite],
        ("problems", "count", "within goal", "x sdpa", "wrong"),
        tuple(rows),
        (*notes, *_contention_note(cases)),
    )


def _overhead(study: Mapping[str, Any]) -> Table:
    limit = study["budget_microseconds"]
    rows = tuple(
        (
            Cell(row["problem"]),
            Cell(f"{row['call']:.1f}"),
            Cell(f"{row['backend_alone']:.1f}"),
            Cell(f"{row['above_backend']:.1f}", "good" if row["above_backend"] < limit else "bad"),
            Cell("" if row["sdpa"] is None else f"{row['sdpa']:.1f}"),
        )
        for row in study["problems"]
    )
    note = (
        f"Medians of {study['turns']} turns of {study['calls']} calls on one thread. Goal: less than {limit:g} us "
        "above the backend."
    )
    return Table(TITLES["overhead"], ("microseconds", "call", "backend alone", "overhead", "torch SDPA"), rows, (note,))


def _memory(measured: Sequence[Mapping[str, Any]]) -> Table:
    rows = []
    for row in measured:
        growth = Cell("") if "growth" not in row else Cell(f"{row['growth']:.2f}", "good" if row["met"] else "bad")
        rows.append(
            (Cell(f"{row['tokens']}"), Cell(human(row["bytes"], "B")), Cell(human(row["tensors"], "B")), growth)
        )
    note = (
        "Forward and backward of one causal head, above the memory before the call; tensors: the output and the "
        "gradients. Growth is relative to the number of tokens: 1 is proportional."
    )
    return Table(TITLES["memory"], ("tokens", "added at peak", "tensors", "growth"), tuple(rows), (note,))

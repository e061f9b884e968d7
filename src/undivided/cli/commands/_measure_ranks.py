"""``undivided ranks --measure``: checks the request, measures, and writes the user's table once at the end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import typer

from undivided._files import read_json
from undivided.benchmarking import suites
from undivided.benchmarking.catalogue.coverage import coverage
from undivided.benchmarking.competitors import selectable_backends
from undivided.benchmarking.measurement import SECONDS, SOURCE, Measurement, measure, replace_measured
from undivided.cli._exit_codes import INTERRUPTED
from undivided.cli._paths import file_to_write, reason_of
from undivided.cli._terminal import complain, progress
from undivided.errors import InputError
from undivided.kernels import cpu
from undivided.machine import Machine
from undivided.selection import measured as _measured
from undivided.selection.measured import Table

MIN_SECONDS, MAX_SECONDS = 5.0, 3600.0
LEVEL_VARIABLE = "UNDIVIDED_ISA"
SHARED_FACTS = ("processor", "threads", "isa", "native", "python", "torch", "undivided")
"""What the parts of one report have in common, by the names in `suites.machine`."""


def measure_levels(
    path: Path,
    flag: str,
    seconds: float | None,
    levels: Sequence[str],
    filter: str,
    report: Path | None = None,
    resume: bool = False,
) -> tuple[Table, int]:
    """Measure at these levels and put the rates into the table at `path`, which is replaced as a whole or not at all.

    Returns:
        The new rates, and the exit code: 1 if a result was wrong or no problem could be measured.

    Raises:
        InputError: a bad option, a file that is not a table or cannot be written, or fewer than two backends.
        typer.Exit: the user interrupted it.
    """
    limit = SECONDS if seconds is None else seconds
    if not MIN_SECONDS <= limit <= MAX_SECONDS:
        raise InputError("--seconds", f"be between {MIN_SECONDS:g} and {MAX_SECONDS:g}", str(limit))
    if filter and not _count_problems(filter):
        raise InputError("--filter", "be contained in the name of a problem, such as bf16-causal-512", repr(filter))
    chosen = _levels(levels)
    if report is not None:
        if chosen:
            raise InputError("--report", "be given without --level", str(report), hint="UNDIVIDED_ISA=avx2 names one")
        file_to_write("--report", report)
    earlier = _cases_to_continue(report) if report is not None and resume else []
    file_to_write(flag, path)
    old = _measured.read(path)
    with _without_warning_of_a_missing_table():
        _check_two_backends()
        try:
            if chosen:  # Ctrl-C reaches the processes of the levels too
                new, code = _measure_each(chosen, limit / len(chosen), filter)
            else:
                new, code = _measure_here(limit, filter, report, earlier)
        except KeyboardInterrupt:
            complain(f"interrupted: {path} is as it was")
            raise typer.Exit(INTERRUPTED) from None
    if not new:
        complain(f"no problem was measured: {path} is as it was")
        return new, 1
    _measured.write(path, replace_measured(old, new, filter))
    complain(f"written {path}: {sum(map(len, new.values()))} places; selection uses them from the next process on")
    return new, code


def _count_problems(filter: str) -> int:
    """The number of problems whose names contain the text."""
    return sum(filter in problem.name for group in coverage() for problem in group)


def _levels(names: Sequence[str]) -> tuple[str, ...]:
    """The levels to measure; none for the level in use."""
    if not names:
        return ()
    library = cpu.load()
    if isinstance(library, str):
        raise InputError("--level", "be given only if there is a native kernel", library)
    if "all" in names:
        return library.levels
    for name in names:
        if name not in library.levels:
            raise InputError("--level", f"be one of {', '.join((*library.levels, 'all'))}", repr(name))
    return tuple(dict.fromkeys(names))


def _check_two_backends() -> None:
    """InputError on a machine, or in an environment, that has nothing to compare."""
    backends = selectable_backends("cpu")
    if len(backends) < 2 or _measured.architecture("cpu", Machine.this("cpu")) is None:
        raise InputError(
            "--measure",
            "have two backends to compare on the CPU",
            ", ".join(backends) or "none",
            hint="`undivided doctor` shows why the others cannot run",
        )
    listed = os.environ.get("UNDIVIDED_BACKENDS", "").strip()
    if listed:
        raise InputError("UNDIVIDED_BACKENDS", "be unset while backends are measured", repr(listed))


@contextmanager
def _without_warning_of_a_missing_table() -> Iterator[None]:
    """The file that UNDIVIDED_RANKS names may not exist yet: it is written here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"UNDIVIDED_RANKS must name a file that exists", RuntimeWarning)
        yield


def _cases_to_continue(report: Path) -> list[dict[str, Any]]:
    """The cases of a report that this process may continue; none if the file does not exist.

    Raises:
        InputError: it is not a report, or it was measured with another processor, level, version or thread count.
    """
    try:
        earlier = read_json(report)
        machine, cases = earlier["machine"], earlier["cases"]
        theirs = {name: machine[name] for name in SHARED_FACTS}
        names = [case["name"] for case in cases]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError("--report", "be a report that --measure wrote", f"{report} ({reason_of(error)})") from None
    ours = suites.machine()
    for name in SHARED_FACTS:
        if theirs[name] != ours[name]:
            raise InputError(
                "--resume",
                f"continue a report of the same {name}, {ours[name]}",
                f"{theirs[name]} in {report}",
                hint="write another report",
            )
    complain(f"{report}: {len(names)} problems are there already")
    return list(cases)


def _measure_here(
    seconds: float, filter: str, report: Path | None = None, earlier: Sequence[Mapping[str, Any]] = ()
) -> tuple[Table, int]:
    """The rates at the level in use, and the exit code; the timed problems go to the report."""
    level = _measured.architecture("cpu", Machine.this("cpu"))
    threads = torch.get_num_threads()
    complain(f"level {level}, {threads} thread{'s' * (threads != 1)}: at most {seconds:g} s")
    with progress(_count_problems(filter), plain=True) as step:
        source = report.name if report else SOURCE
        measurement = measure(seconds, filter, source=source, earlier=earlier, step=step)
    if report is not None and measurement.table:
        report.write_text(json.dumps(measurement.report, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        complain(f"written {report}")
    _summarise(measurement)
    return measurement.table, 1 if measurement.wrong else 0


def _summarise(measurement: Measurement) -> None:
    complain(f"{measurement.measured} places measured in {measurement.seconds:.0f} s")
    for text in measurement.wrong:
        complain(text)
    for why, names in measurement.left_out.items():
        shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        complain(f"{len(names)} problems left out, {why}: {shown}")
    if measurement.busy:
        complain("other processes used the processor meanwhile; measure again when it is idle")


def _measure_each(levels: Sequence[str], seconds: float, filter: str) -> tuple[Table, int]:
    """The rates at several levels, each in a process of its own, because a process loads one level."""
    table: Table = {}
    codes = []
    with tempfile.TemporaryDirectory() as folder:
        for level in levels:
            into = Path(folder) / f"{level}.json"
            environment = {**os.environ, LEVEL_VARIABLE: level}
            process = subprocess.Popen([sys.executable, "-c", _CHILD, str(seconds), filter, str(into)], env=environment)
            try:
                codes.append(process.wait())
            except BaseException:
                process.terminate()
                process.wait()
                raise
            if codes[-1] not in (0, 1):
                raise RuntimeError(f"the measurement at level {level} ended with exit code {codes[-1]}")
            table = _measured.merged(table, _measured.read(into))
    return table, max(codes)


_CHILD = "import sys; from undivided.cli.commands import _measure_ranks; sys.exit(_measure_ranks.child(*sys.argv[1:]))"


def child(seconds: str, filter: str, into: str) -> int:
    """Measure at the level of this process and write the rates to a file; returns the exit code."""
    with _without_warning_of_a_missing_table():
        try:
            table, code = _measure_here(float(seconds), filter)
        except KeyboardInterrupt:
            return INTERRUPTED
    _measured.write(Path(into), table)
    return code

"""``undivided ranks``: the measured table by which selection orders backends: show it, or put reports into it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from undivided.benchmarking.ranks import add
from undivided.cli._paths import file_to_write, refuse_beside
from undivided.cli._terminal import complain, console, human, print_json, print_table
from undivided.cli._terminal import table as columns
from undivided.errors import InputError
from undivided.selection import measured as _measured
from undivided.selection.measured import Entry, Table


def ranks(
    reports: Annotated[
        list[Path] | None, typer.Argument(metavar="[REPORT]...", help="Written by `undivided bench --json`.")
    ] = None,
    into: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The table; UNDIVIDED_RANKS or one in your cache folder if not given."),
    ] = None,
    filter: Annotated[str, typer.Option(help="Show only kinds with this in them, such as amx/bfloat16/forward.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print what is in force as JSON.")] = False,
) -> None:
    """What backends were measured at, which orders those that can run; with reports, measure by them from now on.

    Rates of a report take the place of those that the table has for the same problems. Nothing else ever changes it;
    delete the file to go back to what the package was measured at.
    """
    path = into or _measured.users_path()
    if reports:
        refuse_beside("REPORT", {"--filter": filter, "--json": as_json})
        file_to_write("--into", path)
    for report in reports or ():
        try:
            read = json.loads(report.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError("REPORT", "be written by `undivided bench --json`", f"{report} ({error})") from None
        complain(f"{path}: {add(read, report.name, path)}")
    if reports:
        return
    if into is not None or "UNDIVIDED_RANKS" in os.environ:
        _existing("UNDIVIDED_RANKS" if into is None else "--into", path)
    found = _measured.in_force() if into is None else _measured.read(into)
    shown = {kind: places for kind, places in sorted(found.items()) if filter in kind}
    if found and not shown:
        heads = sorted({kind.split("/")[0] for kind in found})
        raise InputError("--filter", f"be a part of a kind, which begin with {', '.join(heads)}", repr(filter))
    if as_json:
        print_json([row for kind in shown for row in _rows(kind, shown[kind])])
    else:
        _show(shown)


def _existing(name: str, path: Path) -> None:
    if not path.exists():
        raise InputError(
            name,
            "name a file that exists, unless reports are put into it",
            str(path),
            hint=f"undivided ranks REPORT --into {path}, with REPORT of `undivided bench --json REPORT`",
        )


def _rows(kind: str, places: Mapping[tuple[int, int], Entry]) -> list[dict[str, Any]]:
    return [
        {
            "kind": kind,
            "keys": 1 << length - 1,
            "work": 1 << size,
            "rates": dict(entry.rates),
            "run": entry.run._asdict(),
        }
        for (length, size), entry in sorted(places.items())
    ]


def _show(shown: Table) -> None:
    """A table for each kind of problem, and below them the runs that their last column counts."""
    screen = console()
    runs = sorted({entry.run for places in shown.values() for entry in places.values()})
    for kind, places in shown.items():
        made = columns("keys", "work", "per second, the fastest first", "run", right=("keys", "work"))
        for (length, size), entry in sorted(places.items()):
            unit = "B" if "/decode/" in kind else "FLOP"
            order = sorted(entry.rates, key=lambda name: -entry.rates[name])
            rates = ", ".join(f"{name} {human(entry.rates[name], unit)}" for name in order)
            made.add_row(str(1 << length - 1), human(float(1 << size), unit), rates, str(1 + runs.index(entry.run)))
        screen.print(Text(kind, "bold"), soft_wrap=True)
        print_table(screen, made, after=1)
    for number, run in enumerate(runs, 1):
        words = f"run {number}: {run.when[:10]}, {run.machine}, torch {run.torch}, {run.report}"
        screen.print(Text(words, "dim"), soft_wrap=True)
    if not runs:
        screen.print("nothing was measured: backends are ordered by their default ranks")

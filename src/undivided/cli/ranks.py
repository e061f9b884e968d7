"""``undivided ranks``: the measured table by which selection orders backends: show it, or put reports into it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from undivided import _measured
from undivided._measured import Entry, Table
from undivided.benchmarking.ranks import add
from undivided.cli._terminal import complain, console, human, print_json
from undivided.cli._terminal import table as columns
from undivided.errors import InputError


def ranks(
    reports: Annotated[
        list[Path] | None, typer.Argument(metavar="[REPORT]...", help="Written by `undivided bench --json`.")
    ] = None,
    into: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The table; UNDIVIDED_RANKS or a file in your cache folder if not said.")
    ] = None,
    filter: Annotated[str, typer.Option(help="Show only kinds with this in them, such as amx/bfloat16/forward.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print what is in force as JSON.")] = False,
) -> None:  # fmt: skip
    """What backends were measured at, which orders those that can run; with reports, measure by them from now on.

    Rates of a report take the place of those that the table has for the same problems. Nothing else ever changes it; delete
    the file to go back to what the package was measured at.
    """
    path = into or _measured.users_path()
    for report in reports or ():
        try:
            read = json.loads(report.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(
                "REPORT", "be written by `undivided bench --json`", f"{report} ({error})"
            ) from None
        complain(f"{path}: {add(read, report.name, path)}")
    if reports:
        return
    found = _measured.in_force() if into is None else _measured.read(into)
    shown = {kind: places for kind, places in sorted(found.items()) if filter in kind}
    if as_json:
        print_json([row for kind in shown for row in _rows(kind, shown[kind])])
    else:
        _show(shown)


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
    made = columns("kind", "keys", "work", "a second, the fastest first", "run", right=("keys", "work"))
    for kind, places in shown.items():
        for (length, size), entry in sorted(places.items()):
            unit = "B" if "/decode/" in kind else "FLOP"
            order = sorted(entry.rates, key=lambda name: -entry.rates[name])
            rates = ", ".join(f"{name} {human(entry.rates[name], unit)}" for name in order)
            made.add_row(
                kind,
                str(1 << length - 1),
                human(float(1 << size), unit),
                rates,
                f"{entry.run.when[:10]} {entry.run.report}",
            )
    screen = console()
    screen.print(made if made.row_count else "nothing was measured: backends are ordered by belief")

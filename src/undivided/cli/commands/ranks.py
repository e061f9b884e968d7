"""``undivided ranks``: shows the measured ranks by which selection orders backends, measures them, or adds reports."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.text import Text

from undivided._files import read_json
from undivided._units import human
from undivided.benchmarking.ranks import add
from undivided.cli._flags import refuse_together
from undivided.cli._paths import file_to_write, reason_of
from undivided.cli._terminal import complain, console, print_json, print_table
from undivided.cli._terminal import table as empty_table
from undivided.cli.commands._measure_ranks import measure_levels
from undivided.errors import InputError
from undivided.machine import Machine
from undivided.selection import measured as _measured
from undivided.selection.measured import MeasuredRates, Table
from undivided.selection.measured.cells import architecture


def ranks(
    reports: Annotated[
        list[Path] | None, typer.Argument(metavar="[REPORT]...", help="Reports of `undivided bench --json`.")
    ] = None,
    into: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The table; default: UNDIVIDED_RANKS, or a file in your cache folder."),
    ] = None,
    filter: Annotated[
        str,
        typer.Option(
            help="Show only kinds that contain this text, such as amx/bfloat16/forward; with --measure, measure only "
            "problems whose name does, such as bf16-decode."
        ),
    ] = "",
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure the backends on this CPU and write your table.")
    ] = False,
    seconds: Annotated[
        float | None, typer.Option(help="Time limit of --measure, 5 to 3600; default: 160.", show_default=False)
    ] = None,
    level: Annotated[
        list[str] | None,
        typer.Option(
            help="With --measure: measure at this level of the native kernel, such as avx2, or all; may be repeated. "
            "The levels share the time. Default: the level in use."
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="With --measure: also write the timed problems to this file, for `undivided ranks FILE`.",
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="With --report: continue FILE; problems that it contains are not timed again."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
) -> None:
    """Show the measured rates that order the backends; measure them here; or add the rates of reports.

    Without arguments it shows the rates for this machine's processors; --filter and --json show those of others too.

    --measure takes less than three minutes and writes your table, which selection reads from the next process on. It
    replaces what an earlier --measure wrote at the same level. The rates of a report replace those of the same problems
    in the table. Nothing else changes the table: no call measures by itself. Delete the file to return to the rates of
    the package.
    """
    path = into or _measured.user_table_path()
    path_name = "--into" if into else "UNDIVIDED_RANKS" if os.environ.get("UNDIVIDED_RANKS") else "your table of ranks"
    if not measure:
        for flag, value in (("--seconds", seconds), ("--level", level), ("--report", report)):
            if value is not None:
                raise InputError(flag, "be given together with --measure", str(value))
    if resume and report is None:
        raise InputError("--resume", "be given together with --report", "no report")
    if measure:
        refuse_together("--measure", {"REPORT": reports})
        new, code = measure_levels(path, path_name, seconds, level or [], filter, report, resume)
        _print(dict(sorted(new.items())), as_json)
        raise typer.Exit(code)
    if reports:
        refuse_together("REPORT", {"--filter": filter, "--json": as_json})
        _add(reports, path)
        return
    if into is not None or "UNDIVIDED_RANKS" in os.environ:
        _check_exists(path_name, path)
        _measured.read(path)  # what calls would only warn of is refused here
    table = _filtered(_measured.merged_tables() if into is None else _measured.read(into), filter)
    if as_json or filter or into is not None:
        _print(table, as_json)
    else:
        _show_this_machine(table)


def _show_this_machine(table: Table) -> None:
    """Print the kinds of this machine's architectures, and the names of the others."""
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    own = {architecture(device, Machine.this(device)) for device in devices}
    others = sorted({kind.split("/")[0] for kind in table} - own)
    _show({kind: places for kind, places in table.items() if kind.split("/")[0] in own})
    if others:
        words = f"other processors, shown by --filter NAME/: {', '.join(others)}"
        console().print(Text(words))


def _add(reports: Sequence[Path], path: Path) -> None:
    """Add the rates of reports to a table."""
    file_to_write("--into", path)
    for report in reports:
        try:
            content = read_json(report)
        except (OSError, ValueError) as error:
            got = f"{report} ({reason_of(error)})"
            raise InputError("REPORT", "be a report of `undivided bench --json`", got) from None
        complain(f"{path}: {add(content, report.name, path)}")


def _filtered(table: Table, text: str) -> Table:
    """The kinds that contain a text, in order; InputError if there is none."""
    matching = {kind: places for kind, places in sorted(table.items()) if text in kind}
    if table and not matching:
        heads = sorted({kind.split("/")[0] for kind in table})
        raise InputError("--filter", f"be contained in a kind; kinds start with {', '.join(heads)}", repr(text))
    return matching


def _check_exists(name: str, path: Path) -> None:
    if not path.exists():
        raise InputError(
            name,
            "be a file that exists, unless reports are added to it",
            str(path),
            hint=f"undivided bench --json REPORT, then undivided ranks REPORT --into {path}",
        )


def _print(table: Table, as_json: bool) -> None:
    if as_json:
        print_json([row for kind, places in table.items() for row in _rows(kind, places)])
    else:
        _show(table)


def _rows(kind: str, places: Mapping[tuple[int, int], MeasuredRates]) -> list[dict[str, Any]]:
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


def _show(table: Table) -> None:
    """Print a table for each kind of problem, and the runs to which their last column refers."""
    screen = console()
    runs = sorted({entry.run for places in table.values() for entry in places.values()})
    for kind, places in table.items():
        rows = empty_table("keys", "work", "rate per second, fastest first", "run", right=("keys", "work"))
        for (length, size), entry in sorted(places.items()):
            unit = "B" if "/decode/" in kind else "FLOP"
            order = sorted(entry.rates, key=lambda name: -entry.rates[name])
            rates = ", ".join(f"{name} {human(entry.rates[name], unit)}" for name in order)
            rows.add_row(str(1 << length - 1), human(float(1 << size), unit), rates, str(1 + runs.index(entry.run)))
        screen.print(Text(kind, "bold"), soft_wrap=True)
        print_table(screen, rows, after=1)
    for number, run in enumerate(runs, 1):
        words = f"run {number}: {run.when[:10]}, {run.machine}, torch {run.torch}, {run.report}"
        screen.print(Text(words, "dim"))
    if not runs:
        screen.print("no measurements: backends are ordered by their default ranks")

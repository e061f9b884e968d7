"""``undivided bench``: how fast, next to what else computes the same and to what the machine can do; verified first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.padding import Padding
from rich.text import Text

from undivided.backends import get
from undivided.benchmarking import DTYPES, SUITES, execute, markdown, plan, tables
from undivided.benchmarking.catalogue import GPU_SUITES
from undivided.benchmarking.competitors import OTHERS, selectable_backends
from undivided.benchmarking.ranks import add
from undivided.benchmarking.report import headline
from undivided.benchmarking.runs import Settings
from undivided.cli._paths import file_to_write, refuse_beside
from undivided.cli._terminal import complain, console, print_json, print_table, progress, table
from undivided.errors import InputError
from undivided.selection.measured import read

TONES = {"good": "green", "bad": "red", "": ""}


def bench(
    suite: Annotated[
        list[str] | None,
        typer.Option(
            help=f"{', '.join((*SUITES, *GPU_SUITES))} or all; may be repeated. All of the device's if not given."
        ),
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(DTYPES)}; may be repeated. All if not given.")
    ] = None,
    filter: Annotated[str, typer.Option(help="Only what has this in suite/name, such as forward/bf16-d128.")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="Few problems and short runs: about a minute.")] = False,
    backend: Annotated[
        list[str] | None,
        typer.Option(
            help="Also time this backend; may be repeated. native if not given, and on a GPU or "
            "with --ranks all that it has."
        ),
    ] = None,
    competitor: Annotated[
        list[str] | None,
        typer.Option(
            help=f"{', '.join(OTHERS)}; may be repeated. All but flex, which compiles for seconds, if not given."
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Of every competitor; PyTorch's if not given.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    as_json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the report there; - is stdout.")
    ] = None,
    ranks: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Put the rates into this table for selection, see `undivided ranks`; on a GPU "
            "beside --json if not given.",
        ),
    ] = None,
    as_markdown: Annotated[
        Path | None,
        typer.Option("--markdown", metavar="FILE", help="Run nothing: print this report's tables as Markdown."),
    ] = None,
) -> None:
    """Time attention against PyTorch's, onnxruntime's and the machine's own limits; minutes for all of it.

    Competitors take turns in one run. Every result is held against an fp64 oracle first, and no speed is shown where it
    is wrong; exit code 1 if one of ours is. Probes of the machine run before and after each problem, which is repeated
    where they say that something else was running.
    """
    if as_markdown is not None:
        refuse_beside(
            "--markdown",
            {
                "--suite": suite,
                "--dtype": dtype,
                "--filter": filter,
                "--quick": quick,
                "--backend": backend,
                "--competitor": competitor,
                "--threads": threads,
                "--json": as_json,
                "--ranks": ranks,
            },
        )
        typer.echo(_as_markdown(as_markdown), nl=False)
        return
    if device != "cpu" and not (device == "cuda" and torch.cuda.is_available()):
        known = "cpu or cuda" if torch.cuda.is_available() else "cpu (this machine has no CUDA device)"
        raise InputError("--device", f"be {known}", repr(device))
    for word in backend or ():
        get(word)  # also where the suites time no backend by name
    everything = SUITES if device == "cpu" else GPU_SUITES
    suites = everything if not suite or "all" in suite else tuple(suite)
    planned = plan(suites, dtype or tuple(DTYPES), filter, quick)
    if not planned.single and not planned.small:  # the overhead and the memory have one way to run
        refuse_beside(
            ", ".join(suites),
            {
                "--dtype": dtype,
                "--backend": backend,
                "--competitor": competitor,
                "--threads": threads,
                "--ranks": ranks,
            },
        )
    ours = ("native",) if device == "cpu" and ranks is None else selectable_backends(device)
    settings = Settings(backend or ours, _others(competitor), device)
    settings = settings.hurried() if quick else settings
    to_stdout = as_json is not None and str(as_json) == "-"
    kept = None if to_stdout else as_json
    if ranks is None and kept is not None and device != "cpu":
        ranks = kept.with_suffix(".ranks.json")
    for flag, path in (("--json", kept), ("--ranks", ranks)):  # what fails does so before minutes are spent
        if path is not None:
            file_to_write(flag, path)
    if ranks is not None:
        read(ranks)
    with progress(planned.steps) as step:
        report = execute(planned, settings, threads, step)
    _keep(report, kept, ranks)
    if to_stdout:
        print_json(report)
    else:
        _show(report)
    for name, why in report["failed"].items():
        complain(f"{name}: {why}")
    if _wrong(report) or report["failed"]:
        raise typer.Exit(1)


def _keep(report: dict[str, Any], kept: Path | None, ranks: Path | None) -> None:
    if kept is not None:
        kept.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    if ranks is not None:
        complain(f"{ranks}: {add(report, kept.name if kept else 'a report that was not kept', ranks)}")


def _others(words: list[str] | None) -> tuple[str, ...]:
    for word in words or ():
        if word not in OTHERS:
            raise InputError("--competitor", f"be one of {', '.join(OTHERS)}", repr(word))
    return tuple(words) if words else tuple(name for name in OTHERS if name != "flex")


def _as_markdown(path: Path) -> str:
    try:
        return markdown(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError("--markdown", "be a report written by --json", f"{path} ({error})") from None


def _show(report: dict[str, Any]) -> None:
    screen = console()
    for found in tables(report):
        made = table(*found.columns, right=found.numbers, title=found.title)
        for row in found.rows:
            made.add_row(*(Text(cell.text, TONES[cell.tone]) for cell in row))
        print_table(screen, made, before=1)
        for note in found.notes:
            screen.print(Padding(Text(note, "dim"), (0, 2), expand=False))
    screen.print(Padding(Text(f"{headline(report)}.", "dim"), (1, 2, 0, 2), expand=False))


def _wrong(report: dict[str, Any]) -> bool:
    """Whether the library gave a wrong answer anywhere."""
    return any(not entry["ok"] for case in report["cases"] for entry in case["entries"] if entry["name"] not in OTHERS)

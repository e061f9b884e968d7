"""``undivided bench``: how fast, next to what else computes the same and to what the machine can do; verified first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.padding import Padding
from rich.text import Text

from undivided._measured import read
from undivided.benchmarking import DTYPES, SUITES, execute, markdown, plan, tables
from undivided.benchmarking.catalogue import GPU_SUITES
from undivided.benchmarking.competitors import OTHERS, rivals
from undivided.benchmarking.ranks import add
from undivided.benchmarking.report import headline
from undivided.benchmarking.runs import Settings
from undivided.cli._terminal import complain, console, print_json, progress, table
from undivided.errors import InputError

TONES = {"good": "green", "bad": "red", "": ""}


def bench(
    suite: Annotated[
        list[str] | None,
        typer.Option(help=f"{', '.join((*SUITES, *GPU_SUITES))} or all; may be repeated. All of the device's if not said."),
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(DTYPES)}; may be repeated. All if not said.")
    ] = None,
    filter: Annotated[str, typer.Option(help="Only what has this in suite/name, such as forward/bf16-d128.")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="Few problems and short runs: about a minute.")] = False,
    backend: Annotated[
        list[str] | None,
        typer.Option(
            help="Also this backend of ours; may be repeated. If not said native, and on a GPU or with --ranks all there are."
        ),
    ] = None,
    competitor: Annotated[
        list[str] | None,
        typer.Option(help=f"{', '.join(OTHERS)}; may be repeated. All but flex, which compiles for seconds, if not said."),
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Of every competitor; PyTorch's number if not said.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    as_json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the report there; - is stdout.")] = None,
    ranks: Annotated[
        Path | None, typer.Option(
            metavar="FILE",
            help="Put the rates into this table for selection, see `undivided ranks`; on a GPU beside --json if not said.",
        ),
    ] = None,
    as_markdown: Annotated[
        Path | None, typer.Option("--markdown", metavar="FILE", help="Run nothing: print this report's tables as Markdown.")
    ] = None,
) -> None:  # fmt: skip
    """Time attention against PyTorch's, onnxruntime's and the machine's own limits; minutes for all of it.

    Competitors take turns in one run. Every result is held against an fp64 oracle first, and no speed is shown where it is
    wrong; exit code 1 if one of ours is. Probes of the machine run before and after each problem, which is repeated where
    they say that something else was running.
    """
    if as_markdown is not None:
        typer.echo(markdown(_read(as_markdown)), nl=False)
        return
    if device != "cpu" and not torch.cuda.is_available():
        raise InputError("--device", "be cpu (no CUDA device here)", repr(device))
    everything = SUITES if device == "cpu" else GPU_SUITES
    suites = everything if not suite or "all" in suite else tuple(suite)
    planned = plan(suites, dtype or tuple(DTYPES), filter, quick)
    ours = ("native",) if device == "cpu" and ranks is None else rivals(device)
    settings = Settings(backend or ours, _others(competitor), device)
    settings = settings.hurried() if quick else settings
    to_stdout = as_json is not None and str(as_json) == "-"
    kept = None if to_stdout else as_json
    if ranks is None and kept is not None and device != "cpu":
        ranks = kept.with_suffix(".ranks.json")
    if ranks is not None:
        read(ranks)  # what is no table is found before minutes are spent
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
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    if ranks is not None:
        complain(f"{ranks}: {add(report, kept.name if kept else 'a report that was not kept', ranks)}")


def _others(words: list[str] | None) -> tuple[str, ...]:
    for word in words or ():
        if word not in OTHERS:
            raise InputError("--competitor", f"be one of {', '.join(OTHERS)}", repr(word))
    return tuple(words) if words else tuple(name for name in OTHERS if name != "flex")


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError("--markdown", "be a report written by --json", f"{path} ({error})") from None


def _show(report: dict[str, Any]) -> None:
    screen = console()
    for found in tables(report):
        made = table(*found.columns, right=found.numbers, title=found.title)
        for column in made.columns[: 1 + len(found.numbers)]:
            column.no_wrap = True
        made.columns[-1].min_width = len("2.4 x sdpa -50 %")
        for row in found.rows:
            made.add_row(*(Text(cell.text, TONES[cell.tone]) for cell in row))
        screen.print(Padding(made, (1, 2, 0, 2), expand=False))
        for note in found.notes:
            screen.print(Padding(Text(note, "dim"), (0, 2, 0, 2)))
    screen.print(Padding(Text(f"{headline(report)}.", "dim"), (1, 2, 0, 2)))


def _wrong(report: dict[str, Any]) -> bool:
    """Whether the library gave a wrong answer anywhere."""
    return any(
        not entry["ok"]
        for case in report["cases"]
        for entry in case["entries"]
        if entry["name"] not in OTHERS
    )

"""``undivided bench``: verified speed, compared with other implementations and with the peak of the machine."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.text import Text

from undivided._files import read_json, replace_text
from undivided.backends import get
from undivided.benchmarking import DTYPES, SUITES, Plan, execute, markdown, tables
from undivided.benchmarking import plan as make_plan
from undivided.benchmarking.catalogue import GPU_SUITES
from undivided.benchmarking.competitors import OTHERS, selectable_backends, wrong_entries
from undivided.benchmarking.ranks import add
from undivided.benchmarking.report import CONTENTION, Table, headline
from undivided.benchmarking.runs import Settings
from undivided.cli._exit_codes import INTERRUPTED
from undivided.cli._flags import flag_name, flags, refuse_together
from undivided.cli._options import dtype_flag, short_dtype
from undivided.cli._paths import file_to_write, folder_to_write, reason_of
from undivided.cli._signals import sigterm_as_interrupt
from undivided.cli._terminal import complain, console, print_json, print_table, print_text, progress, table
from undivided.cli.commands.report import read_report
from undivided.errors import InputError
from undivided.masks._drawing import require_matplotlib
from undivided.report import compare as comparison
from undivided.report import plots
from undivided.selection.measured import read

TONES = {"good": "green", "bad": "red", "": ""}


@dataclass(frozen=True)
class RunFlags:
    """The flags of a run: what is timed, and how."""

    suite: Annotated[
        list[str] | None,
        typer.Option(help=f"{', '.join((*SUITES, *GPU_SUITES))} or all; may be repeated. Default: all of the device."),
    ] = None
    dtype: Annotated[
        list[str] | None,
        dtype_flag(f"{', '.join(DTYPES)}; may be repeated. Default: all.", names=DTYPES, parser=short_dtype),
    ] = None
    filter: Annotated[
        str, typer.Option(help="Run only problems whose suite/name contains this text, such as forward/bf16-d128.")
    ] = ""
    quick: Annotated[bool, typer.Option("--quick", help="Few problems and short runs, about a minute.")] = False
    backend: Annotated[
        list[str] | None,
        typer.Option(help="Also time this backend; may be repeated. Default: native; on a GPU or with --ranks all."),
    ] = None
    competitor: Annotated[
        list[str] | None,
        typer.Option(help=f"{', '.join(OTHERS)}; may be repeated. Default: all but flex, which compiles for seconds."),
    ] = None
    threads: Annotated[
        int | None,
        typer.Option(min=1, max=1024, help="Number of threads of every competitor; default: that of PyTorch."),
    ] = None
    processor_time: Annotated[
        bool,
        typer.Option(
            "--processor-time",
            help="Count the time in which the core runs this process: for one thread on a machine that others use.",
        ),
    ] = False
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu"
    ranks: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Add the rates to this table for selection, see `undivided ranks`. Default: on a GPU, a file next to "
            "that of --json.",
        ),
    ] = None

    def values(self) -> dict[str, object]:
        """The value of each flag but --device, which has a default."""
        return {flag_name(name): value for name, value in vars(self).items() if name != "device"}

    def plan(self) -> Plan:
        """What to run; InputError for an unknown device, and for an option that these suites do not use."""
        if self.device != "cpu" and not (self.device == "cuda" and torch.cuda.is_available()):
            known = "cpu or cuda" if torch.cuda.is_available() else "cpu (this machine has no CUDA device)"
            raise InputError("--device", f"be {known}", repr(self.device))
        all_suites = SUITES if self.device == "cpu" else GPU_SUITES
        suites = all_suites if not self.suite or "all" in self.suite else tuple(self.suite)
        planned = make_plan(suites, self.dtype or tuple(DTYPES), self.filter, self.quick)
        if not planned.single and not planned.small:  # overhead and memory take none of these options
            values, unused = self.values(), ("--dtype", "--backend", "--competitor", "--threads", "--ranks")
            refuse_together(", ".join(suites), {name: values[name] for name in unused})
        return planned

    def settings(self) -> Settings:
        """The implementations to time, how long, and by which clock."""
        for name in self.backend or ():
            get(name)  # raises for an unknown name, even if the suites time no backend by name
        ours = ("native",) if self.device == "cpu" and self.ranks is None else selectable_backends(self.device)
        settings = Settings(self.backend or ours, _others(self.competitor), self.device)
        if self.quick:
            settings = settings.hurried()
        if self.processor_time:
            settings = _by_processor_time(settings, self.threads or torch.get_num_threads())
        return settings


@dataclass(frozen=True)
class ReportFlags:
    """The flags of what happens to the report of a run, or to an old report."""

    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the report to this file; - is stdout.")
    ] = None
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Print the tables of this report as Markdown, and run nothing.")
    ] = None
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Write charts (PNG) to this folder: throughput over length, ratios to each competitor, roofline.",
        ),
    ] = None
    compare: Annotated[
        Path | None,
        typer.Option(metavar="OLD.json", help=f"Also show what changed since this report. {comparison.RULE}"),
    ] = None
    source: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="Show, plot or compare this report, and run nothing.")
    ] = None

    @property
    def to_stdout(self) -> bool:
        """Whether the report is written to stdout as JSON."""
        return self.json is not None and str(self.json) == "-"

    @property
    def path(self) -> Path | None:
        """The file that the report is written to; None if there is none."""
        return None if self.to_stdout else self.json


@flags(run=RunFlags, output=ReportFlags)
def bench(run: RunFlags, output: ReportFlags) -> None:
    """Time attention and compare it with PyTorch, onnxruntime and the peak of the machine. All suites take minutes.

    Competitors alternate in one run. Every result is first compared with an fp64 oracle, and the speed of a wrong
    result is never shown; the exit code is 1 if one of our results is wrong. Probes of the machine run before and after
    each problem, which is repeated if they detect other load. Ctrl-C, and SIGTERM as `timeout` and batch systems send
    it, end the run and show the results so far; the exit code is then 130.
    """
    if output.markdown is not None:
        others = {"--json": output.json, "--plot": output.plot, "--compare": output.compare, "--from": output.source}
        refuse_together("--markdown", run.values() | others)
        typer.echo(_as_markdown(output.markdown), nl=False)
        return
    if output.plot is not None:
        require_matplotlib("--plot")
        folder_to_write("--plot", output.plot)
    old = None if output.compare is None else read_report("--compare", output.compare)
    if output.source is not None:
        refuse_together("--from", run.values() | {"--json": output.path})
        _present(read_report("--from", output.source), output, old)
        return
    ranks = run.ranks
    if ranks is None and output.path is not None and run.device != "cpu":
        ranks = output.path.with_suffix(".ranks.json")
    report = _run(run, output.path, ranks)
    try:
        _save(report, output.path, ranks)
    finally:  # what was measured is not lost with a full disk
        _present(report, output, old)
    _exit_with_failures(report)


def _run(flags: RunFlags, path: Path | None, ranks: Path | None) -> dict[str, Any]:
    """The report of a run, if it can be written to these files afterwards."""
    planned, settings = flags.plan(), flags.settings()
    _check_files(path, ranks)
    with sigterm_as_interrupt(), progress(planned.steps) as step:
        return execute(planned, settings, flags.threads, step)


def _exit_with_failures(report: dict[str, Any]) -> None:
    """Print what failed; exit if there is any such thing, or a wrong result, or if the run was interrupted."""
    for name, why in report["failed"].items():
        complain(f"{name}: {why}")
    if report["interrupted"]:
        raise typer.Exit(INTERRUPTED)
    if report["failed"] or any(map(wrong_entries, report["cases"])):
        raise typer.Exit(1)


def _by_processor_time(settings: Settings, threads: int) -> Settings:
    """The settings with the clock of the processor; InputError for several threads, whose times it adds."""
    if threads != 1 or settings.device != "cpu":
        raise InputError("--processor-time", "be given for one thread of a CPU", f"{threads} on {settings.device}")
    return replace(settings, clock=time.process_time)


def _check_files(report: Path | None, ranks: Path | None) -> None:
    """InputError if a result could not be written, before minutes are spent."""
    for flag, path in (("--json", report), ("--ranks", ranks)):
        if path is not None:
            file_to_write(flag, path)
    if ranks is not None:
        read(ranks)


def _present(report: dict[str, Any], output: ReportFlags, old: dict[str, Any] | None) -> None:
    """Print a report, or write it as JSON to stdout; then its charts and its changes since an old report."""
    if output.to_stdout:
        print_json(report)
    else:
        _show(report)
    if old is not None and not output.to_stdout:
        _show_table(comparison.comparison(old, report))
    if output.plot is not None:
        paths = plots.write(report, output.plot)
        for path in paths:
            complain(f"written {path}")
        if not paths:
            complain(f"nothing to plot: the report has no timed cases, and {output.plot} stays as it was")


def _save(report: dict[str, Any], path: Path | None, ranks: Path | None) -> None:
    """Write the report, and add its rates to the table; InputError if the report cannot be written."""
    if path is not None:
        text = json.dumps(report, indent=1, allow_nan=False) + "\n"
        try:
            if path.is_file() or not path.exists():
                replace_text(path.resolve(), text)
            else:  # a device or a pipe
                path.write_text(text, encoding="utf-8")
        except OSError as error:
            must, got = "be a file that can be written", f"{path} ({reason_of(error)})"
            raise InputError("--json", must, got, "--json - writes it to stdout") from error
    if ranks is not None:
        complain(f"{ranks}: {add(report, path.name if path else 'a report that was not saved', ranks)}")


def _others(names: list[str] | None) -> tuple[str, ...]:
    for name in names or ():
        if name not in OTHERS:
            raise InputError("--competitor", f"be one of {', '.join(OTHERS)}", repr(name))
    return tuple(names) if names else tuple(name for name in OTHERS if name != "flex")


def _as_markdown(path: Path) -> str:
    try:
        return markdown(read_json(path))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError("--markdown", "be a report that --json wrote", f"{path} ({reason_of(error)})") from None


def _show(report: dict[str, Any]) -> None:
    suites = tables(report)
    for suite in suites:
        _show_table(replace(suite, notes=tuple(note for note in suite.notes if note != CONTENTION)))
    if any(CONTENTION in suite.notes for suite in suites):
        print_text(console(), CONTENTION, "dim", before=1)
    print_text(console(), f"{headline(report)}.", "dim", before=1)


def _show_table(figures: Table) -> None:
    screen = console()
    rows = table(*figures.columns, right=figures.numbers, title=figures.title)
    for row in figures.rows:
        rows.add_row(*(Text(cell.text, TONES[cell.tone]) for cell in row))
    print_table(screen, rows, before=1)
    for note in figures.notes:
        print_text(screen, note, "dim")

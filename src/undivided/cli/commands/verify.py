"""``undivided verify``: compares every backend of this machine with an fp64 oracle on one problem."""

from __future__ import annotations

import re
import textwrap
import time
from typing import TYPE_CHECKING, Annotated

import torch
import typer

from undivided.cli._flags import flags
from undivided.cli._options import ProblemFlags
from undivided.cli._terminal import console, print_json
from undivided.errors import InputError

if TYPE_CHECKING:
    from undivided.verification.report import Report


@flags(problem=ProblemFlags)
def verify(
    problem: ProblemFlags,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    gradients: Annotated[bool, typer.Option(help="Also check the gradients.")] = True,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the random tensors.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the Report as JSON.")] = False,
) -> None:
    """Compare every backend that can run this problem here with an fp64 oracle, on random tensors.

    Exit code 1 if a backend exceeds its error budget, if plain attention gives no budget, or if none can run.
    """
    from undivided.verification import verify as check

    if (device == "cuda" and not torch.cuda.is_available()) or device not in ("cpu", "cuda"):
        must = "be cpu or cuda" if torch.cuda.is_available() else "be cpu (no CUDA device here)"
        raise InputError("--device", must, repr(device))
    torch.manual_seed(seed)
    start = time.perf_counter()
    report = check(**problem.arguments(device, grad=False), gradients=gradients)
    seconds = time.perf_counter() - start
    if as_json:
        print_json(report.to_dict())
    else:
        screen = console()
        for line in (report.problem, *str(report).splitlines()[1:], _summary(report, seconds)):
            screen.print(_wrap(line, screen.width), markup=False, soft_wrap=True)
    if not report.ok:
        raise typer.Exit(1)


def _summary(report: Report, seconds: float) -> str:
    """How many backends passed, were refused and failed, and the time."""
    failed = {row.backend for row in report.failures}
    undecided = {row.backend for row in report.rows if row.undecided} - failed
    counts = {
        "passed": len(report.backends) - len(failed) - len(undecided),
        "failed": len(failed),
        "undecided": len(undecided),
        "refused": len(report.refused),
    }
    words = ", ".join(f"{count} {word}" for word, count in counts.items() if count or word != "undecided")
    return f"backends: {words}, in {seconds:.1f} s"


def _wrap(line: str, width: int) -> str:
    """A line of the report, wrapped to the width of the terminal and indented to the start of its reason."""
    begin = re.match(r" +(\S+ +(refused|not checked): )?", line)
    indent = " " * (len(begin[0]) if begin else 2)
    return textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)

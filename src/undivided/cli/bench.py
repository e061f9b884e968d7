"""``undivided bench``: what a small call costs, interleaved with PyTorch's, verified first."""

from __future__ import annotations

import dataclasses
import json
import platform
import subprocess
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.padding import Padding
from rich.text import Text

from undivided.cli._terminal import complain, console, print_json, progress, table


def bench(
    turns: Annotated[
        int, typer.Option(min=1, help="Turns of each competitor; a figure is the median over them.")
    ] = 31,
    calls: Annotated[int, typer.Option(min=1, help="Calls in a turn.")] = 200,
    out: Annotated[Path | None, typer.Option(help="Write the JSON to this file as well.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Time a repeated small call of attention against its own backend and against PyTorch's SDPA, on one thread.

    Every problem is verified first; exit code 1, and no figures, if one is wrong.
    """
    from undivided.benchmarking import BUDGET_MICROSECONDS, overhead

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads would wait for each other longer than these calls last
    try:
        with progress(6, quiet=as_json) as step:
            rows = overhead(turns, calls, step)
    except RuntimeError as error:
        complain(str(error))
        raise typer.Exit(1) from None
    finally:
        torch.set_num_threads(threads)
    report = {
        "machine": _machine(),
        "commit": _commit(),
        "turns": turns,
        "calls": calls,
        "budget_microseconds": BUDGET_MICROSECONDS,
        "overhead": [dataclasses.asdict(row) | {"above_backend": row.above_backend} for row in rows],
    }
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report, indent=2) + "\n")
    if as_json:
        print_json(report)
    else:
        _show(report)


def _show(report: dict[str, Any]) -> None:
    right = ("call", "backend alone", "above it", "torch SDPA")
    made = table("microseconds", *right, right=right)
    for row in report["overhead"]:
        above = Text(
            f"{row['above_backend']:.1f}",
            "green" if row["above_backend"] < report["budget_microseconds"] else "red",
        )
        sdpa = "" if row["sdpa"] is None else f"{row['sdpa']:.1f}"
        made.add_row(row["problem"], f"{row['call']:.1f}", f"{row['backend_alone']:.1f}", above, sdpa)
    screen = console()
    screen.print(Padding(made, (1, 2, 0, 2), expand=False))
    screen.print(Text(f"  Medians of {report['turns']} turns of {report['calls']} calls, one thread. Below "
                      f"{report['budget_microseconds']:.0f} above the backend is green.", "dim"))  # fmt: skip


def _machine() -> dict[str, Any]:
    return {
        "processor": platform.machine(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _commit() -> str | None:
    """The commit of a checkout, where this is one."""
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return None
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or None

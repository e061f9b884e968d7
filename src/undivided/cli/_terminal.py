"""What the commands print with: a console, tables of decisions, pictures of masks, JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from undivided._measured import Estimate
from undivided._selection import Decision
from undivided.masks import NormalForm
from undivided.masks._drawing import density

SHADES = " ░▒▓█"
"""From no allowed pair under a character to all of them."""


def console() -> Console:
    """Where results go. Made at each use, so that a redirected stdout is respected."""
    return Console(highlight=False, soft_wrap=False)


def complain(message: str) -> None:
    """One message on stderr, as plain text."""
    typer.echo(f"undivided: {message}", err=True)


def print_json(answer: Any) -> None:
    """The whole answer as JSON on stdout."""
    typer.echo(json.dumps(answer, indent=2, ensure_ascii=False))


@contextmanager
def progress(total: int, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """A bar on stderr; what it gives is called with the name of each step as it begins."""
    bar = Progress(
        SpinnerColumn(), BarColumn(bar_width=24), TextColumn("{task.description}"), TimeElapsedColumn(),
        console=Console(file=sys.stderr), transient=True, disable=quiet or not sys.stderr.isatty(),
    )  # fmt: skip
    with bar:
        task = bar.add_task("", total=total)
        begun = 0

        def step(name: str) -> None:
            nonlocal begun
            bar.update(task, description=name, completed=begun)
            begun += 1

        yield step


def table(*columns: str, right: Sequence[str] = (), title: str | None = None) -> Table:
    """An empty table in the style of all tables here; the columns named in `right` hold numbers."""
    made = Table(
        box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", title=title, title_justify="left"
    )
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return made


def decision_table(decision: Decision) -> Table:
    """Every backend in the order it was tried, with what stands against it, and by what those that can run are ordered."""
    made = table("backend", "family", "verdict")
    for verdict in decision.verdicts:
        backend, standing = verdict.backend, decision.standing(verdict)
        style = "bold green" if backend is decision.chosen else "" if verdict.can_run else "dim"
        words = Text("\n".join(verdict.reasons or (verdict.note or "chosen",)), style)
        if standing:
            words.append(f"; {standing}", "" if style == "bold green" else style)
        made.add_row(Text(backend.name, style), Text(backend.family, style), words)
    return made


def decision_json(decision: Decision) -> dict[str, Any]:
    """A Decision for programs."""
    return {
        "chosen": decision.chosen.name if decision.chosen else None,
        "problem": str(decision.problem),
        "machine": str(decision.machine),
        "backends": [
            {
                "name": verdict.backend.name,
                "family": verdict.backend.family,
                "can_run": verdict.can_run,
                "reasons": list(verdict.reasons),
                "note": verdict.note,
                "estimate": _estimate_json(verdict.estimate),
            }
            for verdict in decision.verdicts
        ],
    }


def _estimate_json(estimate: Estimate | None) -> dict[str, Any] | None:
    return None if estimate is None else {**estimate._asdict(), "run": estimate.run._asdict()}


def shaded(form: NormalForm, width: int = 48, height: int = 24) -> str:
    """A mask of any size as characters: the darker, the more of the pairs under it are allowed."""
    lines = []
    for row in density(form, height, width).tolist():
        levels = [0 if share == 0 else max(1, round(share * (len(SHADES) - 1))) for share in row]
        lines.append("".join(SHADES[level] for level in levels))
    return "\n".join(lines)


def human(count: float, unit: str = "") -> str:
    """``human(56623104)`` -> ``'56.6 M'``."""
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= size:
            return f"{count / size:.3g} {prefix}{unit}"
    return f"{count:g} {unit}".rstrip()

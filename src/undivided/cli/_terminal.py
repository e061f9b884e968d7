"""Output of the commands: the console, tables, decisions, drawings of masks, JSON."""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any, TextIO, cast

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from undivided.cli._exit_codes import BROKEN_PIPE
from undivided.masks import NormalForm
from undivided.masks._drawing import density
from undivided.selection.decision import DEFAULT_RANK, Decision
from undivided.selection.measured import Estimate

SHADES = " ░▒▓█"
"""Shades for no allowed pair under a character up to all of them."""

IN_ASCII = dict(zip("■·░▒▓█▁▂▃▄▅▆▇✓✗…", "#..:+#_.-~=+*+-.", strict=True))
"""ASCII replacements for characters that stdout cannot encode; all others become a question mark."""

UNBOUNDED = 100_000
"""Width of an output that is not a terminal, which is not wrapped."""


def console() -> Console:
    """A console on stdout, as wide as the terminal. It is created at each use, because stdout may be redirected."""
    if sys.stdout.isatty():
        return _Console(highlight=False, color_system=None if os.environ.get("NO_COLOR") else "auto")
    columns = os.environ.get("COLUMNS", "")
    width = None if columns.isdecimal() else UNBOUNDED
    return _Console(highlight=False, width=width, file=cast(IO[str], _Trimmed(sys.stdout)))


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """End if the reader of the output has, as ``head`` does, with the code of a shell for SIGPIPE; rich's is 1."""
        with contextlib.suppress(SystemExit):
            super().on_broken_pipe()
        raise SystemExit(BROKEN_PIPE)


class _Trimmed:
    """A stream that removes trailing spaces."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        return self.stream.write(re.sub(r" +$", "", text, flags=re.MULTILINE))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def ignore_zero_columns() -> None:
    """Forget a COLUMNS of 0, with which rich prints nothing."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and not int(columns):
        del os.environ["COLUMNS"]


def print_whatever_the_encoding() -> None:
    """Let stdout and stderr replace what they cannot encode, and stdin what it cannot decode, for the whole process."""
    codecs.register_error("undivided", _in_ascii)
    for stream, errors in ((sys.stdout, "undivided"), (sys.stderr, "undivided"), (sys.stdin, "replace")):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=errors)


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(IN_ASCII.get(one, "?") for one in error.object[error.start : error.end]), error.end


def complain(message: str) -> None:
    """Print a message on stderr, as plain text."""
    typer.echo(f"undivided: {message}", err=True)


def print_json(answer: Any) -> None:
    """Print a value as JSON on stdout."""
    in_unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    typer.echo(json.dumps(answer, indent=2, ensure_ascii=not in_unicode))


@contextmanager
def progress(total: int, quiet: bool = False, plain: bool = False) -> Iterator[Callable[[str], None]]:
    """A progress bar with the time left, on stderr; the function that it yields is called with the name of each step
    before it starts. With `plain`, one line per step if stderr is not a terminal; otherwise nothing there."""
    lines = plain and not quiet and not sys.stderr.isatty()
    bar = Progress(
        SpinnerColumn(),
        BarColumn(bar_width=24),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        TextColumn("left", style="dim"),
        TimeRemainingColumn(),
        console=Console(file=sys.stderr),
        transient=True,
        disable=quiet or not sys.stderr.isatty(),
    )
    with bar:
        task = bar.add_task("", total=total)
        started = 0

        def step(name: str) -> None:
            nonlocal started
            bar.update(task, description=name, completed=started)
            started += 1
            if lines:
                complain(f"{started}/{total} {name}")

        yield step


GAP, INDENT = 2, 2
"""Columns between two columns of a table, and to the left of texts and tables."""


def print_text(screen: Console, text: str | Text, style: str = "", before: int = 0, after: int = 0) -> None:
    """Print a text, indented as tables are, with empty lines before and after it."""
    body = text if isinstance(text, Text) else Text(text, style)
    screen.print(Padding(body, (before, INDENT, after, INDENT), expand=False))


def print_title(screen: Console, text: str) -> None:
    """Print the title of a section, after an empty line."""
    screen.print()
    screen.print(Text(text, "bold"))


def mark(is_right: bool) -> Text:
    """The sign of a right or of a wrong result."""
    return Text("✓", "green") if is_right else Text("✗", "bold red")


def table(*columns: str, right: Sequence[str] = (), title: str | None = None, header: bool = True) -> Table:
    """An empty table in the common style, for `print_table`; the columns named in `right` are right-aligned."""
    result = Table(
        box=None,
        pad_edge=False,
        padding=(0, GAP, 0, 0),
        header_style="dim",
        show_header=header,
        title=title,
        title_justify="left",
    )
    for column in columns:
        result.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return result


def pairs(rows: Iterable[tuple[str | Text, str | Text]], style: str = "dim") -> Table:
    """A table of names and texts without a header; names that are not a `Text` have this style."""
    result = table("", "", header=False)
    for name, text in rows:
        result.add_row(name if isinstance(name, Text) else Text(name, style), text)
    return result


def print_table(screen: Console, rows: Table, before: int = 0, after: int = 0, indent: int = INDENT) -> None:
    """Print a table without breaking words: with narrower columns if they fit, otherwise as one block per row."""
    cells = [
        [cell if isinstance(cell, Text) else screen.render_str(str(cell)) for cell in column.cells]
        for column in rows.columns
    ]
    headers = [str(column.header) if rows.show_header else "" for column in rows.columns]
    texts = [[header, *(cell.plain for cell in column)] for header, column in zip(headers, cells, strict=True)]
    room = screen.width - indent
    gap, widths = _column_widths(texts, room)
    if sum(widths) + gap * (len(widths) - 1) <= room:
        rows.padding = (0, gap, 0, 0)
        for column, width in zip(rows.columns, widths, strict=True):
            column.width = width
        screen.print(Padding(rows, (before, 0, after, indent), expand=False))
        return
    screen.print("\n" * before + f"{rows.title or ''}", style="italic", end="\n" if rows.title else "")
    for row in zip(*cells, strict=True):
        _print_block(screen, headers, row)
    screen.print("\n" * after, end="")


def _print_block(screen: Console, headers: Sequence[str], row: Sequence[Text]) -> None:
    """Print a row of a table that is too wide: its first cell, and below it the others with their headers."""
    screen.print(Padding(row[0], (0, 0, 0, INDENT), expand=False))
    for header, cell in zip(headers[1:], row[1:], strict=True):
        if cell.plain:
            line = Text(f"{header}: " if header else "", "dim") + cell
            screen.print(Padding(line, (0, 0, 0, 2 * INDENT), expand=False))


def _column_widths(texts: Sequence[Sequence[str]], room: int) -> tuple[int, list[int]]:
    """(gap between columns, widths): the widest columns are narrowed first, none below its longest word."""
    widths = [max(cell_len(line) for cell in column for line in cell.split("\n")) for column in texts]
    least = [max((cell_len(word) for cell in column for word in cell.split()), default=0) for column in texts]
    gaps = len(texts) - 1
    if room - GAP * gaps < sum(widths) <= room - gaps:
        return 1, widths
    wide = list(range(len(texts)))
    while sum(widths) > room - GAP * gaps and (wide := [n for n in wide if widths[n] > least[n]]):
        widths[max(wide, key=lambda n: widths[n])] -= 1
    return GAP, widths


def decision_table(decision: Decision) -> tuple[Table, str]:
    """A table of all backends in the order in which they are tried, with their reasons and their ranks; and a sentence
    on the ranks that the rows leave out, because several have the same note."""
    result = table("backend", "family", "verdict")
    standings = [decision.standing(verdict) for verdict in decision.verdicts]
    default = [standing for standing in standings if standing.startswith(DEFAULT_RANK)]
    note = ""
    if len(default) > 1:
        note = f"{DEFAULT_RANK}s{default[0].removeprefix(DEFAULT_RANK)}"
        note = f"Rows without a time have {note}." if any(v.estimate for v in decision.verdicts) else f"{note}."
        note = note[0].upper() + note[1:]
    for verdict, standing in zip(decision.verdicts, standings, strict=True):
        backend = verdict.backend
        style = "bold green" if backend is decision.chosen else "" if verdict.can_run else "dim"
        reasons = Text("\n".join(verdict.reasons or (verdict.note or "chosen",)), style)
        if standing and not (note and standing in default):
            reasons.append(f"; {standing}", "" if style == "bold green" else style)
        result.add_row(Text(backend.name, style), Text(backend.family, style), reasons)
    return result, note


def print_decision(screen: Console, decision: Decision, before: int = 0) -> None:
    """Print the table of a decision, and the note on its ranks, after some empty lines."""
    rows, note = decision_table(decision)
    print_table(screen, rows, before=before)
    if note:
        print_text(screen, note, "dim", before=1)


def decision_json(decision: Decision) -> dict[str, Any]:
    """A Decision as plain values for JSON."""
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
    """A mask of any size as characters; darker characters cover more allowed pairs."""
    lines = []
    for row in density(form, height, width).tolist():
        levels = [0 if share == 0 else max(1, round(share * (len(SHADES) - 1))) for share in row]
        lines.append("".join(SHADES[level] for level in levels))
    return "\n".join(lines)

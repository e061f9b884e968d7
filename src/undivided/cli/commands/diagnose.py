"""``undivided diagnose``: looks up an error."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.padding import Padding
from rich.syntax import Syntax
from rich.text import Text

from undivided.cli._flags import refuse_together
from undivided.cli._terminal import console, pairs, print_json, print_table, print_text, table
from undivided.diagnosis import Diagnosis, Finding
from undivided.diagnosis import diagnose as look_up
from undivided.diagnosis._report import HELPFUL
from undivided.diagnosis.entries import AREAS, TABLE
from undivided.errors import InputError


def diagnose(
    text: Annotated[
        str | None, typer.Argument(help="The text of the error, or an id of --list; default: standard input.")
    ] = None,
    every: Annotated[bool, typer.Option("--list", help="Print all known errors.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
) -> None:
    """Explain an attention error of any library and how to fix it. Exit code 1 if the error is unknown.

    Example: undivided diagnose "No available kernel. Aborting execution."

    Example: python train.py 2>&1 | undivided diagnose
    """
    if every:
        refuse_together("--list", {"TEXT": text})
        _list(as_json)
        return
    answer = look_up(_text(text))
    if as_json:
        print_json(answer.to_dict())
    else:
        _show(console(), answer)
    if not answer.known:
        raise typer.Exit(1)


def _text(text: str | None) -> str:
    """The text of the argument, else that on standard input."""
    if text is not None and text != "-":
        return text
    piped = "" if sys.stdin.isatty() else sys.stdin.read()
    if not piped.strip():
        hint = 'undivided diagnose "the error", or python train.py 2>&1 | undivided diagnose'
        raise InputError("TEXT", "be given as an argument or on standard input", "neither", hint)
    return piped


def _list(as_json: bool) -> None:
    if as_json:
        print_json([entry.to_dict() for entry in TABLE])
        return
    screen = console()
    for area, entries in AREAS.items():
        screen.print(Text(area, "bold"))
        print_table(screen, pairs(((entry.id, entry.title) for entry in entries), "cyan"), after=1)


def _show(screen: Console, answer: Diagnosis) -> None:
    if answer.known:
        _finding(screen, answer.findings[0])
    else:
        screen.print(Text("This attention error is unknown.", "bold red"))
        screen.print("This information would help to find the cause:\n")
        print_table(screen, pairs((("-", Text(line)) for line in HELPFUL), ""), after=1)
    if answer.findings[1:]:
        rows = table("also in this text", "")
        for finding in answer.findings[1:]:
            rows.add_row(Text(finding.entry.id, "cyan"), Text(finding.entry.title))
        print_table(screen, rows, after=1)
    if answer.observed:
        values = "; ".join(f"{name} {value}" for name, value in answer.observed)
        screen.print(Text(f"Found in the text: {values}", "dim"))


def _finding(screen: Console, finding: Finding) -> None:
    entry = finding.entry
    screen.print(Text(entry.title, "bold") + Text(f"  {entry.id}", "cyan"))
    parts = (
        (Text(name, "yellow" if name == "here" else "dim"), Text(prose)) for name, prose in finding.parts().items()
    )
    print_table(screen, pairs(parts), after=1)
    code = Syntax("", "python", background_color="default").highlight(entry.snippet.rstrip())
    screen.print(Padding(code, (0, 2, 1, 4), expand=False))
    print_text(screen, f"source: {entry.source}", "dim", after=1)

"""The page of every command's options: what ``undivided COMMAND --help`` prints, as tables."""

from __future__ import annotations

import enum
from typing import Any, Literal, get_args, get_origin

import typer

from undivided.cli._app import application

HEAD = """# Options of the commands

What `undivided COMMAND --help` prints, on one page. [Command line](command-line.md) has what scripts rely on: exit
codes and output.
"""


def page() -> str:
    """The page."""
    group: Any = typer.main.get_command(application())
    return "\n\n".join([HEAD.strip(), *(_section(name, command) for name, command in group.commands.items())]) + "\n"


def _section(name: str, command: Any) -> str:
    arguments = "".join(f" {parameter.name.upper()}" for parameter in command.params if _is_argument(parameter))
    rows = [_row(parameter) for parameter in command.params]
    table = ["| option | value | default | meaning |", "|---|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)]
    title = f"## {name}\n\n`undivided {name}{arguments}`"
    return "\n\n".join([title, command.help.strip(), *(["\n".join(table)] if rows else [])])


def _row(parameter: Any) -> tuple[str, str, str, str]:
    """The cells of an option or argument."""
    names = [parameter.name.upper()] if _is_argument(parameter) else [*parameter.opts, *parameter.secondary_opts]
    default = "" if parameter.default in (None, False, "", ()) or callable(parameter.default) else parameter.default
    shown = getattr(default, "value", default)
    if isinstance(shown, bool):
        shown = parameter.opts[0]
    text = " ".join((parameter.help or "").split()).replace("|", "\\|")
    return ", ".join(f"`{name}`" for name in names), _values(parameter), f"`{shown}`" if shown != "" else "", text


def _is_argument(parameter: Any) -> bool:
    return not parameter.opts[0].startswith("-")


def _values(parameter: Any) -> str:
    """What a value may be: the words of a choice, or its type and limits; empty for a flag."""
    kind: Any = parameter.type_descriptor.annotation
    if get_origin(kind) is list:
        (kind,) = get_args(kind)
    if kind is bool:
        return ""
    if get_origin(kind) is Literal:
        return ", ".join(map(str, get_args(kind)))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return ", ".join(str(choice.value) for choice in kind)
    word = {int: "number", float: "number", str: "text"}.get(kind, "path")
    if parameter.min is not None and parameter.max is not None:
        return f"{word}, {parameter.min} to {parameter.max}"
    limits = {"at least": parameter.min, "at most": parameter.max}
    return ", ".join([word, *(f"{words} {limit}" for words, limit in limits.items() if limit is not None)])

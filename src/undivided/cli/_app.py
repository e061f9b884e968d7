"""The commands, and the one place where errors become messages and exit codes.

Exit codes: 0 success; 1 a negative result (no backend, a failed verification); 2 a wrong request; 130 interrupted.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from undivided._version import __version__
from undivided.cli._exit_codes import BROKEN_PIPE
from undivided.cli._terminal import complain
from undivided.errors import InputError, NoBackendError

COMMANDS = (
    "demo",
    "doctor",
    "explain",
    "verify",
    "bench",
    "report",
    "ranks",
    "mask",
    "plan",
    "diagnose",
    "tune",
    "init_example",
)
"""In the order of the help. Each is a function in the module of its name in `undivided.cli.commands`."""


class _Command(TyperCommand):
    """A command whose --help shows no type for flags without a value, where typer writes <bool>."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The options, --help included."""
        return _without_type_of_flags(super().get_params(ctx))

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        """The context; --help prints while the arguments are read."""
        with _exit_code_of_broken_pipes():
            return super().make_context(*arguments, **options)


class _Group(TyperGroup):
    """A group that prints InputError, NoBackendError and OSError without a traceback; any other exception is a bug."""

    def get_params(self, ctx: Any) -> list[Any]:
        """As `_Command.get_params`."""
        return _without_type_of_flags(super().get_params(ctx))

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        """The context; --help and --version print while the arguments are read."""
        _open_closed_streams()
        with _errors_as_messages(), _exit_code_of_broken_pipes():
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: Any) -> Any:
        with _errors_as_messages():
            return super().invoke(ctx)


def _without_type_of_flags(options: list[Any]) -> list[Any]:
    for option in options:
        if getattr(option, "is_flag", False) and option.metavar is None:
            option.metavar = ""
    return options


@contextlib.contextmanager
def _exit_code_of_broken_pipes() -> Iterator[None]:
    """Exit with the code of a shell for SIGPIPE if the reader of the help has ended; rich's code is 1."""
    try:
        yield
    except SystemExit:
        raise SystemExit(BROKEN_PIPE) from None


@contextlib.contextmanager
def _errors_as_messages() -> Iterator[None]:
    """Print the errors of a user as messages, and exit with their codes."""
    try:
        yield
    except InputError as error:
        complain(str(error))
        raise typer.Exit(2) from None
    except NoBackendError as error:
        complain(str(error))
        raise typer.Exit(1) from None
    except OSError as error:
        if error.errno == errno.EPIPE:  # the reader of the output has ended: typer exits silently
            raise
        complain(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}")
        raise typer.Exit(2) from None


def _open_closed_streams() -> None:
    """Replace standard streams that the caller has closed (None in Python), as in ``command >&-``."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115  until the process ends


def _version(is_requested: bool) -> None:
    if is_requested:
        typer.echo(f"undivided {__version__}")
        raise typer.Exit


def _common(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Options of the command itself."""


def application(first: str = "") -> typer.Typer:
    """The command line, with the commands that it may need.

    Args:
        first: the first word of the user. If it is a command, only that one is imported: all of them together take
            a second.
    """
    app = typer.Typer(
        cls=_Group,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
        help="Undivided attention: one call, any layout, any mask, any device, and the same answer from every kernel.",
    )
    app.callback(help=app.info.help)(_common)
    for name in _commands_to_import(first):
        app.command(cls=_Command)(getattr(import_module(f"undivided.cli.commands.{name}"), name))
    return app


def _commands_to_import(first: str) -> tuple[str, ...]:
    """The commands that a call with this first word may need."""
    if first == "--version":
        return ()
    command = first.replace("-", "_")
    return (command,) if command in COMMANDS else COMMANDS

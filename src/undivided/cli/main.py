"""The entry point. It needs typer and rich, which are optional, and prints how to install them if they are missing."""

from __future__ import annotations

import sys

from undivided.cli._exit_codes import INTERRUPTED

EXTRAS = {"report": "cli,report"}
"""The extras of a command that needs more than the command line itself."""


def main() -> None:
    """Run the command line."""
    try:
        _run()
    except KeyboardInterrupt:  # during the imports: they take seconds, and typer's own handler is not yet in place
        raise SystemExit(INTERRUPTED) from None


def _run() -> None:
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as missing:
        extras = EXTRAS.get(sys.argv[1] if len(sys.argv) > 1 else "", "cli")
        print(f"undivided: the command line needs {missing.name}: pip install 'undivided[{extras}]'", file=sys.stderr)
        raise SystemExit(2) from None
    from undivided.cli._app import application
    from undivided.cli._terminal import ignore_zero_columns, print_whatever_the_encoding

    ignore_zero_columns()
    print_whatever_the_encoding()
    application(*sys.argv[1:2])(prog_name="undivided")

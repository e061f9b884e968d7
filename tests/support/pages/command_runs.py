"""Runs of the command line in this process."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner

from undivided.cli._app import application

QUICK = ["demo", "--documents", "5", "--longest", "128", "--rounds", "0"]


def run(*arguments: str, env: dict[str, str] | None = None) -> Any:
    app = application(*arguments[:1])
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "100", **(env or {})}, catch_exceptions=False)


def answer(*arguments: str, code: int = 0) -> Any:
    done = run(*arguments, "--json")
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


def refused(*arguments: str) -> str:
    """What stands on stderr where the request is wrong."""
    done = run(*arguments)
    assert done.exit_code == 2, done.output
    assert not done.stdout
    assert "Traceback" not in done.stderr
    return str(done.stderr)

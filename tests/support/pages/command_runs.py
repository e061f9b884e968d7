"""Runs of the command line, in this process and in others."""

from __future__ import annotations

import functools
import json
import subprocess
from typing import Any

import forked_processes
import pytest
from typer.testing import CliRunner

from undivided.cli._app import application
from undivided.report import values
from undivided.verification import Report

QUICK = ["demo", "--documents", "5", "--longest", "128", "--rounds", "0"]


@functools.cache
def _verification(compute: Any = values.verifications) -> list[tuple[str, Report]]:
    return list(compute(lambda step: None))


def verify_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All reports of this process show one verification, which compiles for seconds, and is the same in each."""
    monkeypatch.setattr(values, "verifications", lambda step: _verification())


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


def command_line(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """What ``python -m undivided`` does, in a process of its own that need not import PyTorch, without input."""
    program = "import runpy; runpy.run_module('undivided', run_name='__main__', alter_sys=True)"
    return forked_processes.run(program, *arguments, environment=variables)

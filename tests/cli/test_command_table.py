"""docs/reference/command-line.md: every command in every situation of its tables."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_runs import verify_once
from typer.testing import CliRunner

from undivided.cli import _app

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "command-line.md"

COMMANDS: dict[str, tuple[tuple[str, ...], int, tuple[str, ...]]] = {
    "demo": (("demo", "--documents", "2", "--longest", "64", "--rounds", "0"), 0, ("--rounds", "x")),
    "doctor": (("doctor",), 0, ("--nothing",)),
    "explain": (("explain", "--q", "1x8x2x16"), 0, ("--q", "8")),
    "verify": (("verify", "--q", "1x8x2x16", "--backend", "reference"), 0, ("--device", "tpu")),
    "bench": (("bench", "--from", "bench.json"), 0, ("--quick",)),
    "report": (("report", "--no-bench", "--out", "report.html"), 0, ("--mask", "casual()")),
    "ranks": (("ranks",), 0, ("--filter", "nothing")),
    "mask": (("mask", "causal()", "--q-len", "6"), 0, ("--mask", "casual()")),
    "plan": (("plan", "4096", "--world", "4"), 0, ("--strategy", "x")),
    "diagnose": (("diagnose", "No available kernel. Aborting execution."), 0, ("--list",)),
    "tune": (("tune",), 2, ("--head-dim", "3")),
    "init-example": (("init-example",), 0, ("nothing",)),
}
"""A request of each command, its exit code here (without a GPU), and options that make it a bad request."""

SITUATIONS = {
    "pipe": {"COLUMNS": ""},
    "80": {"COLUMNS": "80"},
    "200": {"COLUMNS": "200"},
    "no-colour": {"COLUMNS": "100", "NO_COLOR": "1", "FORCE_COLOR": "1"},
    "json": {"COLUMNS": "80"},
    "wrong": {"COLUMNS": "80"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a benchmark report of one case."""
    path = tmp_path_factory.mktemp("commands")
    report = {"when": "2026-01-01", "commit": "", "quick": True, "interrupted": False, "failed": {}, "schema": 1}
    machine = {
        "processor": "a CPU",
        "threads": 1,
        "native": "avx2",
        "UNDIVIDED_ISA": None,
        "torch": "2",
        "onnxruntime": None,
    }
    entry = {"name": "undivided", "label": "native", "ok": True, "seconds": 1e-3, "of_ours": 1.0, "fraction": 0.5}
    case = {
        "suite": "forward", "name": "fp32-d64-512-full", "problem": "", "backward": False, "operations": 1.0,
        "bytes": None, "entries": [entry], "goals": [],
        "rate": {"what": "multiply-adds", "unit": "FLOP/s", "used": 1.0, "contended": False},
    }  # fmt: skip
    (path / "bench.json").write_text(json.dumps(report | {"machine": machine, "cases": [case]}), encoding="utf-8")
    return path


def run(folder: Path, arguments: tuple[str, ...], env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(folder)
    monkeypatch.delenv("UNDIVIDED_RANKS", raising=False)
    verify_once(monkeypatch)
    return CliRunner().invoke(_app.application(*arguments[:1]), list(arguments), env=env, catch_exceptions=False)


REQUESTS = [
    pytest.param(name, situation, marks=[pytest.mark.slow] * (name == "report" and situation in {"200", "no-colour"}))
    for name in COMMANDS
    for situation in SITUATIONS
]
"""A report takes seconds: where not all tests run, each kind of output is shown once."""


@pytest.mark.parametrize(("name", "situation"), REQUESTS)
def test_command_behaves_as_the_tables_say(
    name: str, situation: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, code, wrong = COMMANDS[name]
    env = SITUATIONS[situation]
    if situation == "wrong":
        done = run(folder, (*arguments, *wrong), env, monkeypatch)
        assert done.exit_code == 2, done.output
        assert done.stdout == ""
        assert done.stderr
        assert "Traceback" not in done.stderr
        return
    if situation == "json":
        done = run(folder, (*arguments, "--json", *(("-",) if name == "bench" else ())), env, monkeypatch)
        assert done.exit_code == code, done.output
        if code == 0:
            json.loads(done.stdout)
            assert done.stderr == ""
        return
    done = run(folder, arguments, env, monkeypatch)
    assert done.exit_code == code, done.output
    lines = done.stdout.splitlines()
    if situation == "no-colour":
        assert not re.search(r"\x1b\[(?:\d+;)*(?:3|4|9|10)\d", done.stdout), "a colour"
        return
    assert "\x1b" not in done.output
    assert all(line == line.rstrip() for line in lines)
    if situation != "pipe":
        assert max(map(len, lines), default=0) <= int(situation)
    assert done.stderr == "" or code == 2


def test_the_page_names_every_command_and_its_json_once() -> None:
    rows = re.findall(r"^\| `([a-z][a-z-]*)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    registered = [name.replace("_", "-") for name in _app.COMMANDS]
    assert sorted(rows) == sorted(registered) == sorted(COMMANDS)


def test_a_real_terminal_has_colour_unless_no_color_is_set() -> None:
    pty = pytest.importorskip("pty", reason="no pseudo-terminals here")

    def shown(**env: str) -> str:
        leader, follower = pty.openpty()
        command = [sys.executable, "-m", "undivided", "diagnose", "No available kernel. Aborting execution."]
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", **env}
        done = subprocess.run(command, stdin=follower, stdout=follower, stderr=follower, env=environment, timeout=120)
        os.close(follower)
        text = b""
        while True:
            try:
                part = os.read(leader, 65536)
            except OSError:  # Linux: the other side is closed
                break
            if not part:
                break
            text += part
        os.close(leader)
        assert done.returncode == 0
        return text.decode()

    colour = r"\x1b\[(?:\d+;)*3\d"
    assert re.search(colour, shown())
    assert "\x1b" not in shown(NO_COLOR="1")

"""Ctrl-C and SIGTERM: exit code 130 without a traceback, and which results are kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_runs import run, verify_once

import undivided_command
from undivided.benchmarking import suites
from undivided.cli._exit_codes import INTERRUPTED

ROOT = Path(__file__).parents[2]


NO_SIGNALS = pytest.mark.skipif(sys.platform == "win32", reason="os.kill ends a process there")


def interrupt(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def terminate(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)


def test_an_interrupt_while_the_command_line_is_imported_prints_no_traceback() -> None:
    """The imports take seconds, and the interrupt reached the user as a traceback through them."""
    code = """
import sys
from undivided.cli.main import main

class Interrupt:
    def find_spec(self, name, *_):
        if name == "undivided.cli._app":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupt())
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@NO_SIGNALS
@pytest.mark.parametrize("module", ["torch", "undivided.masks", "undivided.cli.main"])
def test_an_interrupt_while_pytorch_is_imported_ends_the_command_without_a_traceback(module: str) -> None:
    """The command imported PyTorch before it handled interrupts, and printed its traceback."""
    code = f"""
import os, signal, sys
import undivided_command
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it

class Interrupt:
    def find_spec(self, name, *_):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
undivided_command.main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_the_installed_command_handles_interrupts_before_it_imports_pytorch() -> None:
    code = "import sys, undivided_command; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    assert 'undivided = "undivided_command:main"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert undivided_command.INTERRUPTED == INTERRUPTED


@pytest.mark.parametrize("end", [interrupt, pytest.param(terminate, marks=NO_SIGNALS)])
def test_an_ended_benchmark_shows_and_writes_its_results_and_exits_with_130(
    end: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It exited with 0, so that a script took the part for the whole. SIGTERM ended it at once: `timeout 600 undivided
    bench` lost ten minutes of results."""
    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(suites, "run", end)
    file = tmp_path / "bench.json"
    done = run("bench", "--quick", "--suite", "forward", "--json", str(file))
    assert done.exit_code == 130
    assert "interrupted" in done.stdout
    assert json.loads(file.read_text())["interrupted"]
    assert signal.getsignal(signal.SIGTERM) is handler


def test_an_interrupted_report_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt during its benchmark wrote a page with a part of the results, and exited with 0."""
    monkeypatch.setattr(suites, "run", interrupt)
    verify_once(monkeypatch)
    file = tmp_path / "report.html"
    file.write_text("an earlier page")
    done = run("report", "--out", str(file))
    assert done.exit_code == 130
    assert f"interrupted: {file} was not written" in done.stderr
    assert file.read_text() == "an earlier page"

"""`undivided init-example`: names, copies, and files that are never overwritten."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from undivided.cli._app import COMMANDS, application
from undivided.cli.commands.init_example import examples


def run(*arguments: str) -> Any:
    return CliRunner().invoke(
        application("init-example"), ["init-example", *arguments], env={"COLUMNS": "100"}, catch_exceptions=False
    )


def test_every_example_is_listed_with_its_first_line() -> None:
    listed = json.loads(run("--json").stdout)
    assert list(listed) == list(examples())
    assert all(title.endswith((".", ":")) or title for title in listed.values())


@pytest.mark.parametrize("name", ["04_masks", "masks", "04_masks.py", "masks.py"])
def test_an_example_is_copied(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = run(name)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "04_masks.py").read_bytes() == examples()["04_masks"].read_bytes()
    assert "python 04_masks.py" in done.stdout


def test_an_existing_file_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "04_masks.py").write_text("mine")
    done = run("masks")
    assert done.exit_code == 2
    assert "04_masks.py exists here" in done.stderr
    assert (tmp_path / "04_masks.py").read_text() == "mine"


@pytest.mark.parametrize(
    ("name", "hint"), [("../../etc/passwd", "undivided init-example lists them"), ("mask", "did you mean 'masks'?")]
)
def test_an_unknown_name_is_answered_with_a_hint(
    name: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run(name)
    assert done.exit_code == 2
    assert hint in done.stderr
    assert not list(tmp_path.iterdir())


def test_doctor_ends_with_three_commands_that_exist() -> None:
    done = CliRunner().invoke(application("doctor"), ["doctor"], env={"COLUMNS": "100"}, catch_exceptions=False)
    shown = done.stdout.partition("Try next")[2].strip().splitlines()
    assert len(shown) == 3
    assert {line.split()[1] for line in shown} <= {name.replace("_", "-") for name in COMMANDS}

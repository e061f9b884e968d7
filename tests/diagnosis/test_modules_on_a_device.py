"""The checks of layers and caches on a device, rehearsed on the CPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from undivided.diagnosis import modules
from undivided.verification.lines import Task


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", modules.CHECKS)
def test_a_check_gives_results_that_are_not_0_and_agree_with_themselves(name: str, dtype: str) -> None:
    found = modules.results(name, "cpu", getattr(torch, dtype))
    assert all(bool(result.isfinite().all()) and bool(result.any()) for result in found)
    (line,) = modules.task_lines(Task("cpu", name, dtype, ("chosen",)))
    assert (line.verdict, line.detail) == ("right", ())


def test_one_wrong_row_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = modules.results

    def spoiled(name: str, device: str, dtype: torch.dtype) -> list[Tensor]:
        first, *rest = right(name, "cpu", dtype)
        if device == "elsewhere":
            first = first.clone()
            first[3] = first[4]
        return [first, *rest]

    monkeypatch.setattr(modules, "results", spoiled)
    (line,) = modules.task_lines(Task("elsewhere", "layer-packed", "bfloat16", ("chosen",)))
    assert line.verdict == "wrong"
    assert len(line.detail) == 1
    assert line.detail[0].startswith("result 0 [40, 64]")


def test_a_check_that_raises_is_wrong_and_says_why() -> None:
    (line,) = modules.task_lines(Task("no such device", "layer-packed", "float32", ("chosen",)))
    assert line.verdict == "wrong"
    assert "no such device" in line.detail[0]


def test_the_command_writes_its_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["modules", "--device", "cpu", "--filter", "cache-paged", "--json", str(tmp_path / "modules.json")]
    monkeypatch.setattr(sys, "argv", words)
    assert modules.main() == 0
    assert "chosen: 2 right, 0 wrong, 0 refused" in capsys.readouterr().out
    assert (tmp_path / "modules.json").read_text().count('"verdict": "right"') == 2

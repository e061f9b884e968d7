"""The checks of layers and caches on a device, rehearsed on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from undivided.diagnosis import modules
from undivided.verification.lines import Line, Task


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", modules.CHECKS)
def test_a_check_gives_results_that_are_not_0_and_agree_with_themselves(name: str, dtype: str) -> None:
    found = modules.run_check(name, "cpu", getattr(torch, dtype))
    assert all(bool(result.isfinite().all()) and bool(result.any()) for result in found)
    (line,) = modules.task_lines(Task("cpu", name, dtype, ("chosen",)))
    assert (line.verdict, line.detail) == ("right", ())


def test_one_wrong_row_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = modules.run_check

    def spoiled(name: str, device: str, dtype: torch.dtype) -> list[Tensor]:
        first, *rest = right(name, "cpu", dtype)
        if device == "elsewhere":
            first = first.clone()
            first[3] = first[4]
        return [first, *rest]

    monkeypatch.setattr(modules, "run_check", spoiled)
    (line,) = modules.task_lines(Task("elsewhere", "layer-packed", "bfloat16", ("chosen",)))
    assert line.verdict == "wrong"
    assert len(line.detail) == 1
    assert line.detail[0].startswith("result 0 [40, 64]")


@contextmanager
def changed_gradients(name: str, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """In the ``with`` block, the gradient of each parameter of this name is replaced by what `change` returns."""

    def watch(module: torch.nn.Module, _arguments: object) -> None:
        for own, parameter in module.named_parameters(recurse=False):
            if own == name:
                parameter.register_hook(change)

    handle = torch.nn.modules.module.register_module_forward_pre_hook(watch)
    try:
        yield
    finally:
        handle.remove()


def multihead_line(monkeypatch: pytest.MonkeyPatch, dtype: str, name: str, change: Callable[[Tensor], Tensor]) -> Line:
    """The line of multi-head attention on a device that computes the gradient of this parameter otherwise."""
    right = modules.run_check

    def elsewhere(check: str, device: str, dtype: torch.dtype) -> list[Tensor]:
        if device == "cpu":
            return right(check, device, dtype)
        with changed_gradients(name, change):
            return right(check, "cpu", dtype)

    monkeypatch.setattr(modules, "run_check", elsewhere)
    (line,) = modules.task_lines(Task("elsewhere", "multihead-window", dtype, ("chosen",)))
    return line


def bias_gradients(dtype: str) -> dict[str, Tensor]:
    """The gradients of the biases of queries and keys, by name."""
    found: dict[str, Tensor] = {}
    with (
        changed_gradients("query_bias", lambda grad: found.setdefault("query_bias", grad)),
        changed_gradients("key_bias", lambda grad: found.setdefault("key_bias", grad)),
    ):
        modules.run_check("multihead-window", "cpu", getattr(torch, dtype))
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("change", [torch.neg, torch.zeros_like])
def test_rounding_errors_of_the_key_bias_are_no_difference(
    change: Callable[[Tensor], Tensor], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gradient is 0 without rounding: on an H200 it differed from the CPU's by all of its norm."""
    sizes = {name: float(grad.norm()) for name, grad in bias_gradients(dtype).items()}
    assert 0 < sizes["key_bias"] < modules.TOLERANCE[getattr(torch, dtype)] * sizes["query_bias"] / 4
    line = multihead_line(monkeypatch, dtype, "key_bias", change)
    assert (line.verdict, line.detail) == ("right", ())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("part", [1.0, None], ids=["as large as the query bias'", "twice the tolerance"])
@pytest.mark.parametrize("name", ["key_bias", "query_bias"])
def test_a_wrong_gradient_of_either_bias_is_found(
    name: str, part: float | None, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = bias_gradients(dtype)["query_bias"].norm() * (part or 2 * modules.TOLERANCE[getattr(torch, dtype)])

    def wrong(grad: Tensor) -> Tensor:
        return grad + size * len(grad) ** -0.5

    line = multihead_line(monkeypatch, dtype, name, wrong)
    assert line.verdict == "wrong"
    assert len(line.detail) == 1
    assert line.detail[0].startswith("result 3 [96]: differs by")


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

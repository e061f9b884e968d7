"""Remembered launches of Triton kernels, with a kernel that records its calls, because there is no GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from undivided._bounded import Bounded
from undivided.backends import triton
from undivided.backends.triton import forward, gradients, launches
from undivided.request.normalise import normalise
from undivided.request.request import Request
from undivided.verification import inputs
from undivided.verification.cases import CASES


class Kernel:
    """What `launches` uses of a ``triton.jit`` function; `compiled` counts compilations, `calls` has the arguments."""

    arg_names = ("x", "x_stride", "scale", "BLOCK", "y")

    def __init__(self) -> None:
        self.compiled = 0
        self.calls: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def run(num_warps: int, **arguments: Any) -> Kernel.Compiled:
            assert arguments.keys() == set(self.arg_names)
            self.compiled += 1
            compiled = Kernel.Compiled(self)
            compiled[grid](*(arguments[name] for name in self.arg_names))
            return compiled

        return run

    class Compiled:
        def __init__(self, kernel: Kernel) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, int, int]) -> Any:
            return lambda *arguments: self.kernel.calls.append((grid, *arguments))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(launches, "_launches", {})
    return Kernel()


def launch(kernel: Kernel, x: Tensor, y: Tensor, scale: float = 2.0, **more: Any) -> None:
    launches.launch(
        kernel,
        (4, 1, 1),
        (scale,),
        {"x": x, "y": y},
        lambda: {"x_stride": x.stride(0), "scale": scale, "BLOCK": 16, "num_warps": 4},
        **more,
    )


def test_a_second_launch_gets_its_own_tensors_and_the_same_other_arguments(kernel: Kernel) -> None:
    first, second = (tuple(torch.zeros(8, 4) for _ in range(2)) for _ in range(2))
    launch(kernel, *first)
    launch(kernel, *second)
    assert kernel.compiled == 1
    for call, (x, y) in zip(kernel.calls, (first, second), strict=True):
        grid, *arguments = call
        assert grid == (4, 1, 1)
        assert arguments[0] is x
        assert arguments[4] is y
        assert arguments[1:4] == [4, 2.0, 16]


def test_no_tensor_is_kept(kernel: Kernel) -> None:
    launch(kernel, torch.zeros(8, 4), torch.zeros(8, 4))
    (known,) = launches._launches.values()
    assert not any(isinstance(value, Tensor) for value in known.arguments)


def test_an_object_replaces_its_tensor_in_every_launch(kernel: Kernel) -> None:
    x, y = torch.zeros(8, 4), torch.zeros(8, 4)
    launch(kernel, x, y, replaced={"x": "one descriptor"})
    launch(kernel, x, y, replaced={"x": "another"})
    assert kernel.compiled == 1
    assert [call[1] for call in kernel.calls] == ["one descriptor", "another"]


@pytest.mark.parametrize("change", ["dtype", "sizes", "strides", "alignment", "facts"])
def test_what_the_arguments_or_the_compilation_depend_on_is_not_reused(kernel: Kernel, change: str) -> None:
    x, y = torch.zeros(8, 4), torch.zeros(8, 4)
    launch(kernel, x, y)
    others = {
        "dtype": torch.zeros(8, 4, dtype=torch.int32),
        "sizes": torch.zeros(9, 4),
        "strides": torch.zeros(8, 8)[:, :4],
        "alignment": torch.zeros(33)[1:].view(8, 4),
    }
    launch(kernel, others.get(change, x), y, scale=3.0 if change == "facts" else 2.0)
    assert kernel.compiled == 2
    stride, scale = kernel.calls[1][2:4]
    assert (stride, scale) == (others.get(change, x).stride(0), 3.0 if change == "facts" else 2.0)


def test_the_memory_is_bounded(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "_launches", Bounded(3))
    x = torch.zeros(8, 4)
    for n in range(10):
        launch(kernel, x, x, scale=float(n))
        assert len(launches._launches) <= 3
    assert [call[3] for call in kernel.calls] == [float(n) for n in range(10)]


def test_launches_of_the_whole_contract_with_one_key_have_the_same_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward of every case and dtype, without running a kernel."""
    known: dict[Any, dict[str, Any]] = {}
    repeated = 0

    def checked(
        kernel: Any, grid: Any, facts: Any, tensors: Any, others: Callable[[], dict[str, Any]], replaced: Any = None
    ) -> None:
        nonlocal repeated
        arguments = {name: str(x) if isinstance(x, Tensor) else x for name, x in others().items()}
        assert arguments.keys() | tensors.keys() >= set(kernel.arg_names)
        key = launches.key_of(kernel, grid, facts, tensors)
        repeated += key in known
        assert known.setdefault(key, arguments) == arguments

    monkeypatch.setattr(forward, "launch", checked)
    monkeypatch.setattr(gradients, "launch", checked)
    backend = triton.BACKEND
    for case in CASES.values():
        for dtype in case.dtypes:
            built = inputs.build(case, dtype)
            call, given = normalise(Request.from_keywords(**built.arguments))
            if dtype == torch.float64 or 0 in (call.problem.batch, call.problem.q_len, call.problem.kv_len):
                continue  # refused
            with torch.no_grad():
                result = backend.forward(call, given)
                if any(call.needs):
                    backend.backward(call, given, result, built.grad_out, built.grad_lse)
    assert len(known) > 500
    assert repeated > 20

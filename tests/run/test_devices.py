"""Kernels run on the device of their tensors, with a stand-in for a second GPU, because there is none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import undivided
from undivided.backends import get
from undivided.run import autograd

ELSEWHERE, HERE = 1, 0


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The current device, last; every tensor is on device 1."""
    stack = [HERE]

    @contextlib.contextmanager
    def device(_: Any) -> Iterator[None]:
        stack.append(ELSEWHERE)
        yield
        stack.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(autograd, "is_on_other_gpu", lambda q: stack[-1] != ELSEWHERE)
    return stack


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("backend", ["reference", "torch_flash"])
def test_a_backend_runs_with_the_device_of_its_tensors_as_the_current_one(
    current: list[int], monkeypatch: pytest.MonkeyPatch, grad: bool, backend: str
) -> None:
    found = []
    chosen = get(backend)

    def recording(name: str) -> Any:
        run = getattr(chosen, name)

        def record(*arguments: Any) -> Any:
            found.append((name, current[-1]))
            return run(*arguments)

        return record

    for name in ("forward", "backward"):
        monkeypatch.setattr(chosen, name, recording(name))
    monkeypatch.setattr(type(chosen), "recorded", lambda *_: None)
    q = torch.randn(1, 8, 2, 16, requires_grad=grad)
    out = undivided.attention(q, q, q, layout="bshd", backend=backend)
    if grad:
        out.sum().backward()
    assert found == [("forward", ELSEWHERE), ("backward", ELSEWHERE)][: 1 + grad]
    assert current == [HERE], "the current device is as before"


def test_a_tensor_on_a_cpu_is_never_elsewhere() -> None:
    assert not autograd.is_on_other_gpu(torch.zeros(1))

"""What the tests of kept launches share."""

from __future__ import annotations

from typing import Any

import pytest
from interpreted_launches import Compiler

from undivided.backends.triton import forward, gradients, kept_launches, launches
from undivided.request.call import Call
from undivided.request.request import Tensors


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[kept_launches.ForwardLaunches]:
    """Remembered launches of interpreted kernels; the list has the launches of every forward that ran some."""
    compilers: dict[int, Compiler] = {}

    def launch(kernel: Any, *arguments: Any, **more: Any) -> launches.Launch | None:
        compiler = compilers.setdefault(id(kernel), Compiler(kernel))
        return launches.launch(compiler, *arguments, **more)

    found: list[kept_launches.ForwardLaunches] = []
    find = kept_launches.find

    def noted(call: Call, tensors: Tensors) -> kept_launches.ForwardLaunches | None:
        kept = find(call, tensors)
        if kept is not None:
            found.append(kept)
        return kept

    monkeypatch.setattr(launches, "_launches", {})
    monkeypatch.setattr(forward, "launch", launch)
    monkeypatch.setattr(gradients, "launch", launch)
    monkeypatch.setattr(kept_launches, "find", noted)
    return found

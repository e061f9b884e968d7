"""The live bytes of a rank during attention, counted by storage, for the tests of plans."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

from undivided.context_parallel.exchange.simulate import SimulatedGroup
from undivided.run import autograd


class LiveBytes(TorchDispatchMode):
    """Bytes of floating-point storages that this thread has made and that are alive: now, and at most.

    Index tensors are not counted: they belong to the mask and its schedule.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        self.see(found)
        return found

    def see(self, found: Any) -> None:
        """Count what was returned, unless it is a view of what is known."""
        for tensor in tree_leaves(found):
            if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.is_meta:
                continue
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key not in self._known and size:
                self._known.add(key)
                self.now += size
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def count_as_on_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scratch memory of kernels and messages of the simulation are not counted; sent tensors are held until the
    exchange ends."""
    for name in ("forward", "backward"):
        monkeypatch.setattr(autograd, name, _only_results(getattr(autograd, name)))
    exchange = SimulatedGroup.exchange

    def quietly(self: SimulatedGroup, sends: Any, receives: Any, *step: str) -> Any:
        with _disable_current_modes():
            wait = exchange(self, sends, receives, *step)
        held = [sends]

        def wait_quietly() -> None:
            with _disable_current_modes():
                wait()
            held.clear()

        return wait_quietly

    monkeypatch.setattr(SimulatedGroup, "exchange", quietly)


def _only_results(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        mode = _get_current_dispatch_mode()
        with _disable_current_modes():
            found = function(*arguments)
        if isinstance(mode, LiveBytes):
            mode.see(found)
        return found

    return run

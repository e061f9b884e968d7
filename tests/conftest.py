"""What every test file has: Triton's interpreter, and fixtures."""

import os

# Before anything imports Triton: its kernels run under its interpreter here, and need no GPU.
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest

from undivided import _autograd, _sdpa, functional


@pytest.fixture
def seen_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A TorchDispatchMode of the test sees the operations of a backend, not the one operator that a mode sees
    otherwise."""
    for module in (functional, _autograd, _sdpa):
        monkeypatch.setattr(module, "is_observed", lambda *_: False)

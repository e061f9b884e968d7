"""What the tests of benchmarks share."""

from __future__ import annotations

import pytest
from tiny_benchmarks import QUIET

from undivided.benchmarking import peak


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that always does the same, and is asked at no cost."""
    monkeypatch.setattr(peak, "arithmetic_probe", lambda dtype, device, clock: QUIET)
    monkeypatch.setattr(peak, "read_probe", lambda size, device, clock: QUIET)
    monkeypatch.setattr(peak, "witness_call", lambda: None)

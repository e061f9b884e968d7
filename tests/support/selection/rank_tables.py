"""Tables of measured rates for the tests of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import undivided
from undivided import Machine, masks
from undivided.selection import measured as _measured
from undivided.selection.measured import MeasuredRates, Run, Table

PACKAGES = {"triton": "3.5.0", "flash_attn": "2.8.3", "cudnn_frontend": "1.15.0"}


H100 = Machine("cuda", "H100", (9, 0), "9.16.0", {**PACKAGES, "flash_attn_3": "3.0.0"})


RUN = Run("2027-01-02T03:04:05+00:00", "NVIDIA H100", "abcdef0", "2.13.0", "made.json")


CAUSAL = "sm90/bfloat16/forward/128/causal"


Measured = Callable[[Table], None]


def q(length: int = 4096, dtype: torch.dtype = torch.bfloat16, heads: int = 16) -> torch.Tensor:
    return torch.empty(4, length, heads, 128, dtype=dtype, device="meta")


def explain(length: int = 4096, machine: Machine = H100, **arguments: Any) -> undivided.Decision:
    x = q(length)
    return undivided.explain(x, x, x, layout="bshd", machine=machine, **{"mask": masks.causal(), **arguments})


def table(kind: str = CAUSAL, length: int = 4096, run: Run = RUN, **rates: float) -> Table:
    """One entry, where `explain(length)` stands."""
    at = _measured.table_cell(explain(length).problem, H100)
    assert at is not None
    return {kind: {(at.length, at.work): MeasuredRates(run, rates)}}


def order(decision: undivided.Decision) -> list[str]:
    """Those that can run, in order."""
    return [verdict.backend.name for verdict in decision.verdicts if verdict.can_run]

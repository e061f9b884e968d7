"""Benchmarks of a tiny case."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from undivided.benchmarking import peak
from undivided.benchmarking.catalogue import SUITES, Benchmark
from undivided.benchmarking.runs import Settings
from undivided.benchmarking.timing import ProbeResult
from undivided.verification.cases import Case

SINGLE = tuple(suite for suite in SUITES if suite not in ("overhead", "memory"))


TINY = Case("tiny", layout="bhsd", batch=1, q_len=24, heads=2, qk_dim=16, needs=())


QUIET = peak.Probe("a rate", "FLOP/s", lambda: ProbeResult(1e9))


def tiny(**changes: Any) -> Benchmark:
    """A benchmark that takes no time, with whatever is to be tried."""
    case = {name: changes.pop(name) for name in list(changes) if name in TINY.__dataclass_fields__}
    return Benchmark("forward", replace(TINY, **case), changes.pop("dtype", torch.float32), **changes)


def hurried(**changes: Any) -> Settings:
    return Settings(
        **{"patience": 0.0, "small_patience": 0.0, "attempts": 1, "backends": (), "others": ("sdpa", "math"), **changes}
    )


def entries(case: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in case["entries"]}

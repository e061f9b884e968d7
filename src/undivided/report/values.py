"""The values of a report, measured on this machine: verification of a few masks, and a quick benchmark."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from undivided import masks
from undivided.benchmarking import execute, plan
from undivided.benchmarking.runs import Settings
from undivided.verification import Report, verify

PROBLEMS: tuple[tuple[str, masks.Mask, int, int], ...] = (
    ("full", masks.FULL, 48, 48),
    ("causal", masks.causal(), 48, 48),
    ("window", masks.window(8, 0), 48, 48),
    ("documents", masks.causal() & masks.documents([0, 13, 48]), 48, 48),
    ("decode", masks.causal(align="bottom_right"), 1, 64),
)
"""The verified problems: name, mask, queries, keys; GQA with 4 heads on 2."""


def verifications(step: Callable[[str], None]) -> list[tuple[str, Report]]:
    """The verification of every problem on this machine's CPU."""
    verified = []
    for name, mask, q_len, kv_len in PROBLEMS:
        step(f"verify: {name}")
        draw = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(1, n, heads, 32, generator=draw) for n, heads in ((q_len, 4), (kv_len, 2), (kv_len, 2)))
        verified.append((name, verify(q, k, v, layout="bshd", mask=mask)))
    return verified


def quick_plan() -> Any:
    """The plan of the quick benchmark."""
    return plan(("forward", "decode"), ("fp32", "bf16"), "", quick=True)


def quick_benchmark(step: Callable[[str], None]) -> dict[str, Any]:
    """The report of a quick benchmark against PyTorch."""
    settings = Settings(("native",), ("sdpa", "math"), "cpu").hurried()
    return execute(quick_plan(), settings, None, step)

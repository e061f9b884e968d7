"""Timing, interleaved and gated by verification: no speed is reported for a wrong answer.

Competitors take turns in one run, so that what disturbs the machine disturbs them alike; a figure is the median over the
turns. Machines are shared and noisy: compare figures of one run with each other, not with those of another.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from undivided import _problem, masks
from undivided._machine import Machine
from undivided._policy import policy
from undivided._selection import select
from undivided.functional import attention
from undivided.verification import verify

BUDGET_MICROSECONDS = 15.0
"""What a repeated small call may cost above the backend's own time."""


def interleaved(competitors: Mapping[str, Callable[[], object]], turns: int, calls: int) -> dict[str, float]:
    """Median seconds of one call of each competitor; they take turns of `calls` calls each.

    >>> times = interleaved({"a": lambda: sum(range(10)), "b": lambda: sum(range(10_000))}, turns=5, calls=20)
    >>> times["a"] < times["b"]
    True
    """
    seconds: dict[str, list[float]] = {name: [] for name in competitors}
    for function in competitors.values():
        function()  # first calls fill caches and start threads
    for _ in range(turns):
        for name, function in competitors.items():
            start = time.perf_counter()
            for _ in range(calls):
                function()
            seconds[name].append((time.perf_counter() - start) / calls)
    return {name: statistics.median(times) for name, times in seconds.items()}


@dataclass(frozen=True)
class Overhead:
    """One small problem: microseconds of a whole `attention` call, of its backend alone, and of PyTorch's SDPA."""

    problem: str
    backend: str
    call: float
    backend_alone: float
    sdpa: float | None

    @property
    def above_backend(self) -> float:
        """What normalising, selecting and restoring cost."""
        return self.call - self.backend_alone


def overhead(turns: int = 31, calls: int = 200) -> list[Overhead]:
    """What a repeated small call costs above its backend, for a few small problems. Verified first.

    Raises:
        RuntimeError: a problem's verification is red.
    """
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 8, 4, 32), torch.randn(1, 8, 4, 32), torch.randn(1, 8, 4, 32)
    step, cache = torch.randn(1, 1, 4, 32), torch.randn(1, 24, 4, 32)
    packed = masks.documents([0, 3, 8]) & masks.causal()
    arguments: dict[
        str, tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any], Callable[[], object] | None]
    ] = {
        "8 tokens, bshd": ((q, k, v), {"layout": "bshd"}, _sdpa(q, k, v)),
        "8 tokens, bhsd": (
            (_heads_first(q), _heads_first(k), _heads_first(v)),
            {"layout": "bhsd"},
            _sdpa(q, k, v),
        ),
        "8 tokens, causal": (
            (q, k, v),
            {"layout": "bshd", "mask": masks.causal()},
            _sdpa(q, k, v, is_causal=True),
        ),
        "1 token over a cache of 24": ((step, cache, cache), {"layout": "bshd"}, _sdpa(step, cache, cache)),
        "two packed documents": ((q[0], k[0], v[0]), {"layout": "thd", "mask": packed}, None),
    }
    return [_overhead(name, *case, turns, calls) for name, case in arguments.items()]


def _overhead(
    name: str, tensors: tuple[Tensor, Tensor, Tensor], arguments: dict[str, Any], sdpa: Callable[[], object] | None,
    turns: int, calls: int,
) -> Overhead:  # fmt: skip
    report = verify(*tensors, **arguments)
    if not report.ok:
        raise RuntimeError(f"verification is red, so nothing is timed\n{report}")
    problem, operands = _problem.normalise(*tensors, **arguments)
    backend = select(problem, Machine.this(tensors[0].device), policy()).backend
    competitors: dict[str, Callable[[], object]] = {
        "call": lambda: attention(*tensors, **arguments),
        "backend": lambda: backend.forward(problem, operands),
    }
    if sdpa is not None:
        competitors["sdpa"] = sdpa
    with torch.no_grad():
        micro = {key: 1e6 * seconds for key, seconds in interleaved(competitors, turns, calls).items()}
    return Overhead(name, backend.name, micro["call"], micro["backend"], micro.get("sdpa"))


def _heads_first(tensor_BSHD: Tensor) -> Tensor:
    return tensor_BSHD.transpose(1, 2).contiguous()


def _sdpa(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Callable[[], object]:
    """PyTorch's own call on the same numbers, in the layout that it takes."""
    query, key, value = (_heads_first(t) for t in (q, k, v))
    return lambda: torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=is_causal)

"""The overhead of a repeated small call of `attention` over its backend: validation, selection, autograd, layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from undivided import masks
from undivided.benchmarking.timing import interleaved
from undivided.functional import attention
from undivided.machine import Machine
from undivided.request.normalise import normalise
from undivided.request.request import Request
from undivided.selection.decision import select
from undivided.selection.policy import policy
from undivided.verification import verify

BUDGET_MICROSECONDS = 15.0
"""Target for the overhead of a repeated small call over its backend."""


@dataclass(frozen=True)
class Overhead:
    """One small problem: microseconds of an `attention` call, of its backend alone, and of PyTorch's SDPA."""

    problem: str
    backend: str
    call: float
    backend_alone: float
    sdpa: float | None

    @property
    def above_backend(self) -> float:
        """Microseconds of the call without those of the backend."""
        return self.call - self.backend_alone


class _Case(NamedTuple):
    tensors: tuple[Tensor, Tensor, Tensor]
    arguments: dict[str, Any]
    sdpa: Callable[[], object] | None


def overhead(turns: int = 31, calls: int = 200, step: Callable[[str], None] = lambda _: None) -> list[Overhead]:
    """The overhead of a repeated small call, for a few small problems on the CPU, each verified first.

    Args:
        turns, calls: each competitor has `turns` turns of `calls` calls; a figure is the median over the turns.
        step: called with the name of each problem before it starts.

    Raises:
        RuntimeError: the result of a problem is outside its error budget.
    """
    rows = []
    for name, case in _overhead_cases().items():
        step(name)
        rows.append(_overhead(name, case, turns, calls))
    return rows


def _overhead_cases() -> dict[str, _Case]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 8, 4, 32) for _ in range(3))
    heads_first = tuple(t.transpose(1, 2).contiguous() for t in (q, k, v))
    one, cache = torch.randn(1, 1, 4, 32), torch.randn(1, 24, 4, 32)
    leaves = tuple(t.clone().requires_grad_() for t in (q, k, v))
    packed = masks.documents([0, 3, 8]) & masks.causal()
    return {
        "8 tokens, bshd": _Case((q, k, v), {"layout": "bshd"}, _sdpa(q, k, v)),
        "8 tokens, bhsd": _Case(heads_first, {"layout": "bhsd"}, _sdpa(q, k, v)),  # type: ignore[arg-type]
        "8 tokens, causal": _Case(
            (q, k, v), {"layout": "bshd", "mask": masks.causal()}, _sdpa(q, k, v, is_causal=True)
        ),
        "1 token over 24 keys": _Case((one, cache, cache), {"layout": "bshd"}, _sdpa(one, cache, cache)),
        "2 packed documents": _Case((q[0], k[0], v[0]), {"layout": "thd", "mask": packed}, None),
        "8 tokens, recording for the backward": _Case(
            leaves,  # type: ignore[arg-type]
            {"layout": "bshd"},
            _sdpa(*leaves),  # type: ignore[arg-type]
        ),
    }


def _overhead(name: str, case: _Case, turns: int, calls: int) -> Overhead:
    tensors, arguments, sdpa = case
    call, inputs = normalise(Request.from_keywords(*tensors, **arguments))
    backend = select(call.problem, Machine.this(tensors[0].device), policy()).backend
    report = verify(*tensors, **arguments, backends=[backend.name])
    if not report.ok:
        raise RuntimeError(f"the verification failed, so nothing is timed\n{report}")

    def alone() -> object:
        with torch.no_grad():
            return backend.forward(call, inputs)

    competitors: dict[str, Callable[[], object]] = {
        "call": lambda: attention(*tensors, **arguments),
        "alone": alone if tensors[0].requires_grad else lambda: backend.forward(call, inputs),
    }
    if sdpa is not None:
        competitors["sdpa"] = sdpa
    micro = {key: 1e6 * seconds for key, seconds in interleaved(competitors, turns, calls).items()}
    return Overhead(name, backend.name, micro["call"], micro["alone"], micro.get("sdpa"))


def _sdpa(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Callable[[], object]:
    """PyTorch's call on the same values, in its own layout."""
    query, key, value = (t.transpose(1, 2).contiguous() for t in (q, k, v))
    return lambda: torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=is_causal)

"""The overhead of a repeated small call of `attention` over its backend: validation, selection, autograd, layout.

And the host's time of small calls on a GPU: how long Python and the driver take to launch one, whatever the device
computes. A model of many small layers waits for that, if nothing is captured in CUDA graphs. It needs none of the
packages of the command line:

    python -m undivided.benchmarking --host --device cuda --json host.json
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from undivided import masks
from undivided.benchmarking.competitors import selectable_backends
from undivided.benchmarking.timing import interleaved
from undivided.errors import NoBackendError
from undivided.functional import attention
from undivided.machine import Machine
from undivided.request.normalise import normalise
from undivided.request.request import Request
from undivided.selection.decision import select
from undivided.selection.policy import current_policy
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
    backend = select(call.problem, Machine.this(tensors[0].device), current_policy()).backend
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
    return lambda: scaled_dot_product_attention(query, key, value, is_causal=is_causal)


_attend: Callable[..., Tensor] = attention


TURN = 0.05
"""Longest turn in seconds, for calls that the CPU computes."""


class HostTime(NamedTuple):
    """Microseconds of one call on the host: a problem, and a backend, "chosen" or "sdpa"."""

    problem: str
    competitor: str
    microseconds: float


class _Small(NamedTuple):
    """A small problem: the call with a backend, and PyTorch's own call of the same, if it has one."""

    call: Callable[[str | None], object]
    sdpa: Callable[[], object] | None


def _problems(device: str) -> Iterator[tuple[str, _Small]]:
    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    q, k, v = (draw(2, 128, 8, 64) for _ in range(3))
    causal = partial(_attend, q, k, v, layout="bshd", mask=masks.causal())
    first, keys, values = (t.transpose(1, 2) for t in (q, k, v))
    yield (
        "causal, 128 tokens",
        _Small(
            lambda backend: causal(backend=backend),
            lambda: scaled_dot_product_attention(first, keys, values, is_causal=True),
        ),
    )
    leaf, grad = draw(2, 128, 8, 64).requires_grad_(), draw(2, 128, 8, 64)
    trained = partial(_attend, leaf, k, v, layout="bshd", mask=masks.causal())
    yield (
        "the same, and its gradient",
        _Small(lambda backend: torch.autograd.grad(trained(backend=backend), leaf, grad), None),
    )
    one, cache, lengths = draw(16, 1, 32, 128), draw(16, 512, 8, 128), torch.full((16,), 400, device=device)
    mask = masks.lengths(lengths)
    decode = partial(_attend, one, cache, cache, layout="bshd")
    yield "decoding, the lengths of an earlier call", _Small(lambda backend: decode(mask=mask, backend=backend), None)
    yield ("decoding, new lengths", _Small(lambda backend: decode(mask=masks.lengths(lengths), backend=backend), None))
    offsets = torch.tensor([0, 100, 200, 256], device=device, dtype=torch.int32)
    tokens, packed = draw(256, 8, 64), masks.documents(offsets, max_q=100, max_kv=100) & masks.causal()
    documents = partial(_attend, tokens, tokens, tokens, layout="thd", mask=packed)
    yield "3 packed documents", _Small(lambda backend: documents(backend=backend), None)


def host_times(device: str, calls: int = 50, turns: int = 7) -> Iterator[HostTime]:
    """The host's time of every small problem with every backend that can run it, and of PyTorch's call.

    Args:
        device: "cpu", on which a call also computes, or "cuda".
        calls: consecutive calls of a turn, fewer if they take longer than `TURN`; the device may still compute when the
            host has launched the last one.
        turns: the median over so many turns counts.

    >>> next(host_times("cpu", calls=1, turns=1)).problem
    'causal, 128 tokens'
    """
    wait: Callable[[], None] = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    for name, (call, sdpa) in _problems(device):
        competitors: dict[str, Callable[[], object]] = {"chosen": partial(call, None)}
        competitors |= {backend: partial(call, backend) for backend in selectable_backends(device)}
        competitors |= {} if sdpa is None else {"sdpa": sdpa}
        for competitor, run in competitors.items():
            try:
                run()
            except NoBackendError:
                continue
            start = time.perf_counter()
            run()
            number = min(calls, max(1, int(TURN / (time.perf_counter() - start))))
            times = []
            for _ in range(turns):
                wait()
                start = time.perf_counter()
                for _ in range(number):
                    run()
                times.append((time.perf_counter() - start) / number)
            wait()
            yield HostTime(name, competitor, round(1e6 * statistics.median(times), 1))

"""The overhead of a repeated small call of `attention` over its backend: validation, selection, autograd, layout.

And the host's time of small calls on a GPU: how long Python and the driver take to launch one, whatever the device
computes. A model of many small layers waits for that, if nothing is captured in CUDA graphs. It needs none of the
packages of the command line:

    python -m undivided.benchmarking --host --device cuda --json host.json
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from undivided import masks
from undivided.arguments.layout import heads_first
from undivided.benchmarking.competitors import selectable_backends
from undivided.benchmarking.timing import interleaved, stopwatch
from undivided.errors import NoBackendError
from undivided.functional import attention
from undivided.machine import Machine
from undivided.request.normalise import normalise
from undivided.request.request import Request
from undivided.selection.decision import select
from undivided.selection.policy import current_policy
from undivided.verification import verify

_attend: Callable[..., Tensor] = attention  # typed for calls with tuples and dictionaries

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


def overhead(turns: int = 31, calls: int = 200, step: Callable[[str], None] = lambda _: None) -> list[Overhead]:
    """The overhead of a repeated small call, for a few small problems on the CPU, each verified first.

    Args:
        turns, calls: each competitor has `turns` turns of `calls` calls; a figure is the median over the turns.
        step: called with the name of each problem before it starts.

    Raises:
        RuntimeError: the result of a problem is outside its error budget.
    """
    rows = []
    for name, (tensors, arguments) in _problems().items():
        step(name)
        rows.append(_overhead(name, tensors, arguments, turns, calls))
    return rows


def _problems() -> dict[str, tuple[tuple[Tensor, ...], dict[str, Any]]]:
    """q, k, v and the other arguments of each small problem."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 8, 4, 32) for _ in range(3))
    bhsd = tuple(t.transpose(1, 2).contiguous() for t in (q, k, v))
    one, cache = torch.randn(1, 1, 4, 32), torch.randn(1, 24, 4, 32)
    leaves = tuple(t.clone().requires_grad_() for t in (q, k, v))
    packed = masks.documents([0, 3, 8]) & masks.causal()
    return {
        "8 tokens, bshd": ((q, k, v), {"layout": "bshd"}),
        "8 tokens, bhsd": (bhsd, {"layout": "bhsd"}),
        "8 tokens, causal": ((q, k, v), {"layout": "bshd", "mask": masks.causal()}),
        "1 token over 24 keys": ((one, cache, cache), {"layout": "bshd"}),
        "2 packed documents": ((q[0], k[0], v[0]), {"layout": "thd", "mask": packed}),
        "8 tokens, recording for the backward": (leaves, {"layout": "bshd"}),
    }


def _overhead(name: str, tensors: tuple[Tensor, ...], arguments: dict[str, Any], turns: int, calls: int) -> Overhead:
    call, inputs = normalise(Request.from_keywords(*tensors, **arguments))
    backend = select(call.problem, Machine.this(tensors[0].device), current_policy()).backend
    report = verify(*tensors, **arguments, backends=[backend.name])
    if not report.ok:
        raise RuntimeError(f"the verification failed, so nothing is timed\n{report}")

    def alone() -> object:
        with torch.no_grad():
            return backend.forward(call, inputs)

    competitors: dict[str, Callable[[], object]] = {
        "call": lambda: _attend(*tensors, **arguments),
        "alone": alone if tensors[0].requires_grad else lambda: backend.forward(call, inputs),
    }
    if arguments["layout"] != "thd":  # PyTorch's call on the same values, in its own layout
        query, key, value = (heads_first(t, arguments["layout"]).contiguous() for t in tensors)
        is_causal = "mask" in arguments
        competitors["sdpa"] = lambda: scaled_dot_product_attention(query, key, value, is_causal=is_causal)
    micro = {kind: 1e6 * seconds for kind, seconds in interleaved(competitors, turns, calls).items()}
    return Overhead(name, backend.name, micro["call"], micro["alone"], micro.get("sdpa"))


TURN = 0.05
"""Longest turn in seconds, for calls that the CPU computes."""


class HostTime(NamedTuple):
    """Microseconds of one call on the host: a problem, and a backend, "chosen" or "sdpa"."""

    problem: str
    competitor: str
    microseconds: float


def _host_problems(device: str) -> Iterator[tuple[str, Callable[..., object], Callable[[], object] | None]]:
    """Small problems: the name, the call, which takes a backend, and PyTorch's own call of the same, if it has one."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    q, k, v = (draw(2, 128, 8, 64) for _ in range(3))
    first, keys, values = (t.transpose(1, 2) for t in (q, k, v))
    yield (
        "causal, 128 tokens",
        partial(_attend, q, k, v, layout="bshd", mask=masks.causal()),
        lambda: scaled_dot_product_attention(first, keys, values, is_causal=True),
    )
    leaf, grad = draw(2, 128, 8, 64).requires_grad_(), draw(2, 128, 8, 64)
    trained = partial(_attend, leaf, k, v, layout="bshd", mask=masks.causal())
    yield (
        "the same, and its gradient",
        lambda backend: torch.autograd.grad(trained(backend=backend), leaf, grad),
        None,
    )
    one, cache, lengths = draw(16, 1, 32, 128), draw(16, 512, 8, 128), torch.full((16,), 400, device=device)
    decode = partial(_attend, one, cache, cache, layout="bshd")
    yield "decoding, the lengths of an earlier call", partial(decode, mask=masks.lengths(lengths)), None
    yield "decoding, new lengths", lambda backend: decode(mask=masks.lengths(lengths), backend=backend), None
    offsets = torch.tensor([0, 100, 200, 256], device=device, dtype=torch.int32)
    tokens, packed = draw(256, 8, 64), masks.documents(offsets, max_q=100, max_kv=100) & masks.causal()
    yield "3 packed documents", partial(_attend, tokens, tokens, tokens, layout="thd", mask=packed), None


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
    clock = stopwatch()
    for name, call, sdpa in _host_problems(device):
        competitors: dict[str, Callable[[], object]] = {"chosen": partial(call, backend=None)}
        competitors |= {backend: partial(call, backend=backend) for backend in selectable_backends(device)}
        competitors |= {} if sdpa is None else {"sdpa": sdpa}
        for competitor, run in competitors.items():
            try:
                run()
            except NoBackendError:
                continue
            number = min(calls, max(1, int(TURN / clock(run, 1))))
            times = []
            for _ in range(turns):
                wait()
                times.append(clock(run, number) / number)
            wait()
            yield HostTime(name, competitor, round(1e6 * statistics.median(times), 1))

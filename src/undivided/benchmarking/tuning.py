"""`undivided tune`: measure tiles of the Triton kernels on this GPU, and remember the fastest.

A candidate that does not compile, does not fit, or gives another answer than the tiles of the table is passed over: no
speed is taken of a wrong answer.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from undivided import masks
from undivided._call import Call
from undivided._normalise import normalise
from undivided._request import Request, Tensors
from undivided.backends._triton_inputs import architecture
from undivided.backends.triton import BACKEND
from undivided.kernels.triton import config
from undivided.kernels.triton.config import Config


class Work(NamedTuple):
    """What tiles of a pass are measured on, and those that it has so far."""

    name: str
    tile: Config
    run: Callable[[], tuple[Tensor, ...]]


class Found(NamedTuple):
    """The fastest tiles of a pass, their seconds and those of the table's, and how many candidates ran and were
    right."""

    name: str
    itemsize: int
    width: int
    tile: Config
    seconds: float
    before: float
    tried: int


def tune(
    device: str,
    dtypes: Iterable[torch.dtype],
    widths: Iterable[int],
    *,
    length: int = 4096,
    turns: int = 5,
    candidates: tuple[Config, ...] | None = None,
    step: Callable[[str], None] = lambda name: None,
) -> Iterator[Found]:
    """The fastest tiles for each pass, dtype and head size.

    Args:
        length: tokens of the causal sequence that is measured; decoding has as many keys.
        candidates: what to try; None asks `config.candidates`.
        turns: timings of each candidate; the median counts.
        step: called with the name of each pass as its turn comes.
    """
    for dtype in dtypes:
        for width in widths:
            for work in _works(device, dtype, width, length):
                step(f"{work.name} {str(dtype).removeprefix('torch.')} head size {width}")
                tried = candidates
                if tried is None:
                    tried = config.candidates(work.name, architecture(torch.device(device)))
                yield _fastest(work, dtype.itemsize, width, tried, turns)


def _works(device: str, dtype: torch.dtype, width: int, length: int) -> Iterator[Work]:
    torch.manual_seed(0)

    def made(q_len: int, heads: int, grad: bool, mask: masks.Mask) -> tuple[Call, Tensors]:
        q = torch.randn(1, q_len, heads, width, device=device, dtype=dtype, requires_grad=grad)
        k, v = (torch.randn(1, length, 4, width, device=device, dtype=dtype, requires_grad=grad) for _ in range(2))
        return normalise(Request.of(q, k, v, layout="bshd", mask=mask))

    causal = masks.causal()
    for name, q_len, heads, grad in (
        ("forward", length, 8, False),
        ("rows", length, 8, True),
        ("keys", length, 8, True),
        ("decode", 1, 32, False),
    ):
        call, tensors = made(q_len, heads, grad, causal if q_len > 1 else masks.causal("bottom_right"))
        tile = config.config(name, dtype.itemsize, width, architecture(tensors.q.device))
        yield Work(name, tile, _runner(call, tensors, grad))


def _runner(call: Call, tensors: Tensors, grad: bool) -> Callable[[], tuple[Tensor, ...]]:
    if not grad:
        return lambda: (BACKEND.forward(call, tensors).out,)
    with torch.no_grad():
        result = BACKEND.forward(call, tensors)
    upstream = torch.randn_like(result.out)
    return lambda: tuple(g for g in BACKEND.backward(call, tensors, result, upstream, None) if g is not None)


@torch.no_grad()
def _fastest(work: Work, itemsize: int, width: int, candidates: tuple[Config, ...], turns: int) -> Found:
    right = work.run()
    before = _seconds(work.run, turns)
    best, seconds, tried = work.tile, before, 0
    for tile in candidates:
        with config.trial(work.name, tile):
            try:
                answer = work.run()
            except (
                Exception
            ):  # too much shared memory, too many registers, a shape that Triton refuses: not a candidate
                continue
            if not all(_same(a, b) for a, b in zip(answer, right, strict=True)):
                continue
            tried += 1
            taken = _seconds(work.run, turns)
        if taken < seconds:
            best, seconds = tile, taken
    return Found(work.name, itemsize, width, best, seconds, before, tried)


def _same(a: Tensor, b: Tensor) -> bool:
    """Within a few roundings: other tiles add in another order."""
    scale = b.float().abs().max().clamp(min=1e-6)
    return bool((a.float() - b.float()).abs().max() <= 8 * torch.finfo(b.dtype).eps * scale)


def _seconds(run: Callable[[], object], turns: int) -> float:
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    times = []
    for _ in range(turns):
        if device is not None:
            torch.accelerator.synchronize()
        begun = time.perf_counter()
        run()
        if device is not None:
            torch.accelerator.synchronize()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)

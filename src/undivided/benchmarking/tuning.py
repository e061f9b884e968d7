"""`undivided tune`: measures tile sizes of the Triton kernels on this GPU and stores the fastest.

A candidate that does not compile, does not fit, or gives another result than the current tiles is skipped: the speed of
a wrong result is never measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from undivided import masks
from undivided.arguments.tensors import dtype_name
from undivided.backends.triton import BACKEND
from undivided.backends.triton.inputs import architecture
from undivided.benchmarking.timing import stopwatch
from undivided.kernels.triton import config
from undivided.kernels.triton.config import Config
from undivided.request.call import Call
from undivided.request.normalise import normalise
from undivided.request.request import Request, Tensors


class Pass(NamedTuple):
    """One pass of the kernels: its name, its current tiles, and a call that runs it."""

    name: str
    tile: Config
    run: Callable[[], tuple[Tensor, ...]]


class TuneResult(NamedTuple):
    """The fastest tiles of a pass: their seconds, those of the tiles before, and the number of candidates that ran."""

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
) -> Iterator[TuneResult]:
    """The fastest tiles for each pass, dtype and head size.

    Args:
        device: a CUDA device.
        dtypes: the dtypes to tune.
        widths: the head sizes to tune.
        length: number of tokens of the causal sequence that is measured, and number of keys for decoding.
        candidates: the tiles to try; None is those of `config.candidates`.
        turns: timings per candidate; the median counts.
        step: called with the name of each pass before it starts.
    """
    watch = stopwatch(device)

    def median_seconds(run: Callable[[], object]) -> float:
        return statistics.median(watch(run, 1) for _ in range(turns))

    for dtype in dtypes:
        for width in widths:
            for one_pass in _passes(device, dtype, width, length):
                step(f"{one_pass.name} {dtype_name(dtype)} head size {width}")
                tiles = candidates
                if tiles is None:
                    tiles = config.candidates(one_pass.name, architecture(torch.device(device)))
                yield _fastest(one_pass, dtype.itemsize, width, tiles, median_seconds)


def _passes(device: str, dtype: torch.dtype, width: int, length: int) -> Iterator[Pass]:
    """The passes of one dtype and head size."""
    torch.manual_seed(0)

    def build(q_len: int, heads: int, grad: bool, mask: masks.Mask) -> tuple[Call, Tensors]:
        q = torch.randn(1, q_len, heads, width, device=device, dtype=dtype, requires_grad=grad)
        k, v = (torch.randn(1, length, 4, width, device=device, dtype=dtype, requires_grad=grad) for _ in range(2))
        return normalise(Request.from_keywords(q, k, v, layout="bshd", mask=mask))

    causal = masks.causal()
    for name, q_len, heads, grad in (
        ("forward", length, 8, False),
        ("rows", length, 8, True),
        ("keys", length, 8, True),
        ("decode", 1, 32, False),
    ):
        call, tensors = build(q_len, heads, grad, causal if q_len > 1 else masks.causal("bottom_right"))
        tile = config.config(name, dtype.itemsize, width, architecture(tensors.q.device))
        yield Pass(name, tile, _runner(call, tensors, grad))


def _runner(call: Call, tensors: Tensors, grad: bool) -> Callable[[], tuple[Tensor, ...]]:
    if not grad:
        return lambda: (BACKEND.forward(call, tensors).out,)
    with torch.no_grad():
        result = BACKEND.forward(call, tensors)
    upstream = torch.randn_like(result.out)
    return lambda: tuple(g for g in BACKEND.backward(call, tensors, result, upstream, None) if g is not None)


@torch.no_grad()
def _fastest(
    one_pass: Pass,
    itemsize: int,
    width: int,
    candidates: tuple[Config, ...],
    median_seconds: Callable[[Callable[[], object]], float],
) -> TuneResult:
    right = one_pass.run()
    before = median_seconds(one_pass.run)
    best, best_seconds, tried = one_pass.tile, before, 0
    for tile in candidates:
        with config.trial(one_pass.name, tile):
            try:
                result = one_pass.run()
            except Exception:  # too much shared memory, too many registers, a shape that Triton refuses
                continue
            if not all(_are_close(a, b) for a, b in zip(result, right, strict=True)):
                continue
            tried += 1
            seconds = median_seconds(one_pass.run)
        if seconds < best_seconds:
            best, best_seconds = tile, seconds
    return TuneResult(one_pass.name, itemsize, width, best, best_seconds, before, tried)


def _are_close(a: Tensor, b: Tensor) -> bool:
    """Whether two results agree within a few roundings: other tiles sum in another order."""
    scale = b.float().abs().max().clamp(min=1e-6)
    return bool((a.float() - b.float()).abs().max() <= 8 * torch.finfo(b.dtype).eps * scale)

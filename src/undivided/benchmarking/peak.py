"""The peak rates of a machine, measured in the same run as every figure, so that figures can be given as fractions.

- Multiply-adds (fp32, and half types if `UNDIVIDED_ISA` is set): independent multiply-adds on every thread, with the
  instructions that the native kernel uses and its loads of vectors from L1. Without loads an Intel core runs AVX-512 at
  a clock that no product of matrices reaches. `UNDIVIDED_ISA=avx2` is so compared with the peak of AVX2.
- Matrix products (half types; all dtypes on a GPU): `torch.mm` of large square matrices, or the multiply-adds above if
  these are faster, because a processor without fp16 arithmetic computes fp16 in fp32. Matrix units (AMX) reach more
  than twice that rate from registers alone, which no product of matrices in memory comes near.
- Reads (decoding): one pass of `torch.sum` over a buffer as large as the keys and values of the problem. It alternates
  with the competitors, so that the caches hold as much of it as of their data; alone, a buffer might stay in a cache.
  On a GPU, a copy between two halves of a buffer of at least 1 GiB, larger than any cache; bytes read and written
  count.
"""

from __future__ import annotations

import functools
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from undivided.arguments.tensors import dtype_name
from undivided.benchmarking.timing import Clock, ProbeResult, stopwatch
from undivided.kernels import cpu

BURSTS = 5
BURST = 0.012
"""Seconds of a burst of multiply-adds; a probe is the median of five bursts."""

SIDE = 2048
"""Rows of the matrices of a product: 8 MiB per matrix in half types; larger ones reach no higher rate."""

GPU_SIDE = 8192
"""Rows of the matrices on a GPU: smaller products do not fill it, and are faster than the events that time them."""

WITNESS_SIDE, WITNESS_PRODUCTS = 256, 20
"""Size and number of the products of a witness: 128 KiB per matrix, 0.8 ms on one core."""

MATRIX_UNIT_LEVELS = {torch.bfloat16: ("amx_bf16", "amx"), torch.float16: ("amx",)}
"""The levels of the native library that use matrix units, by dtype."""

MIN_COPY_BYTES = 1 << 30
"""Smallest copy in bytes: more than twenty times the level-2 cache of a large GPU."""

MAX_SECONDS = 0.1
"""Seconds after which no further product or read starts; there are at least two."""


@dataclass(frozen=True, eq=False)
class Probe:
    """A peak rate of this machine.

    what: its name. unit: "FLOP/s" or "B/s". measure: measures it now.
    turn: a call that does `work` and alternates with the competitors; then its rate is the peak.
    """

    what: str
    unit: str
    measure: Callable[[], ProbeResult]
    turn: Callable[[], object] | None = None
    work: float = 0.0


def arithmetic_probe(dtype: torch.dtype, device: str = "cpu", clock: Clock = time.perf_counter) -> Probe:
    """The probe of the arithmetic peak for attention in this dtype.

    With `time.process_time`, the rate is that of one thread while it runs, whatever else the machine does.

    >>> arithmetic_probe(torch.float32).unit
    'FLOP/s'
    """
    name, library = dtype_name(dtype), cpu.load()
    if device != "cpu" or isinstance(library, str):
        return Probe(f"{name} matrix product", "FLOP/s", lambda: matrix_product_rate(dtype, device, clock=clock))
    if dtype != torch.float32 and "UNDIVIDED_ISA" not in os.environ:
        if library.level in MATRIX_UNIT_LEVELS[dtype]:
            return Probe(f"{name} matrix product", "FLOP/s", lambda: matrix_product_rate(dtype, clock=clock))
        if _products_are_fast(library, dtype):

            def larger_rate() -> ProbeResult:
                return max(matrix_product_rate(dtype, clock=clock), multiply_add_rate(library, dtype, clock))

            return Probe(f"{name} matrix product or multiply-adds", "FLOP/s", larger_rate)
    return Probe(f"{name} multiply-adds, {library.level}", "FLOP/s", lambda: multiply_add_rate(library, dtype, clock))


def witness_call() -> Callable[[], object] | None:
    """The call of a witness, matrix products in the caches; None if the native library uses no matrix unit."""
    library = cpu.load()
    if isinstance(library, str) or library.level not in MATRIX_UNIT_LEVELS[torch.bfloat16]:
        return None
    a, b = (torch.randn(WITNESS_SIDE, WITNESS_SIDE).bfloat16() for _ in range(2))
    return lambda: [torch.mm(a, b) for _ in range(WITNESS_PRODUCTS)]


@functools.cache
def _products_are_fast(library: cpu.Library, dtype: torch.dtype) -> bool:
    """Whether products come near the rate of multiply-adds; without instructions for the dtype they take seconds."""
    return matrix_product_rate(dtype, side=512).rate > 0.3 * multiply_add_rate(library, dtype).rate


def read_probe(size: int, device: str = "cpu", clock: Clock = time.perf_counter) -> Probe:
    """The probe of the rate at which a buffer of `size` bytes is read.

    >>> read_probe(1 << 20).what
    'read of 1 MiB'
    """
    if device != "cpu":
        size = max(size, MIN_COPY_BYTES)
        return Probe(f"copy of {round(size / 2**20)} MiB", "B/s", lambda: copy_rate(size, device))
    buffer = torch.ones(max(size // 4, 1), device=device)
    name, work = f"read of {round(size / 2**20)} MiB", float(buffer.numel() * buffer.element_size())
    return Probe(name, "B/s", lambda: read_rate(buffer, clock), buffer.sum, work)


def multiply_add_rate(library: cpu.Library, dtype: torch.dtype, clock: Clock = time.perf_counter) -> ProbeResult:
    """FLOP/s of independent multiply-adds on all threads of torch; a multiply-add is two operations."""
    code, threads = cpu.DTYPES[dtype], torch.get_num_threads()
    start, repeats = clock(), 1 << 15
    library.peak(code, repeats)
    repeats = max(int(repeats * BURST / (clock() - start)), 1)
    rates = []
    with ThreadPoolExecutor(threads) as pool:
        cpu_start, start_time = time.process_time(), clock()
        for _ in range(BURSTS):
            start = clock()
            done = sum(pool.map(lambda _: library.peak(code, repeats), range(threads)))
            rates.append(done / (clock() - start))
        share = (time.process_time() - cpu_start) / (clock() - start_time) / threads
    return ProbeResult(statistics.median(rates), share)


def matrix_product_rate(
    dtype: torch.dtype, device: str = "cpu", side: int | None = None, clock: Clock = time.perf_counter
) -> ProbeResult:
    """FLOP/s of large matrix products."""
    side = side or (SIDE if device == "cpu" else GPU_SIDE)
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return _rate(2 * side**3, lambda: torch.mm(a, b), device, clock)


def copy_rate(size: int, device: str) -> ProbeResult:
    """B/s, read and written, of a copy from one half of `size` bytes to the other."""
    source, target = torch.ones(2, max(size // 2, 1), dtype=torch.uint8, device=device)
    return _rate(2 * source.numel(), lambda: target.copy_(source), device, time.perf_counter)


def read_rate(buffer: Tensor, clock: Clock = time.perf_counter) -> ProbeResult:
    """B/s of one pass over a buffer."""
    return _rate(buffer.numel() * buffer.element_size(), buffer.sum, buffer.device.type, clock)


def _rate(work: float, call: Callable[[], object], device: str, clock: Clock) -> ProbeResult:
    """The work per second, by the median of a few calls after a first one that does not count."""
    call()
    watch, times = stopwatch(device, clock), list[float]()
    cpu_start, start_time = time.process_time(), clock()
    while len(times) < 2 or (sum(times) < MAX_SECONDS and len(times) < 3 * BURSTS):
        times.append(watch(call, 1))
    share = (time.process_time() - cpu_start) / (clock() - start_time) / torch.get_num_threads()
    return ProbeResult(work / statistics.median(times), share if device == "cpu" else 1.0)

"""The problems that are timed, by suite, and the goal of each.

A problem is a `Case`, as in the catalogue of the verification but larger, with a dtype, a direction and a goal. A
fraction is of what the probe of the machine reaches in the same run (`undivided.benchmarking.peak`), a ratio is to a
competitor in the same run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from undivided.benchmarking.catalogue import cpu, gpu
from undivided.benchmarking.catalogue.benchmark import DTYPES, Benchmark, Goal
from undivided.benchmarking.catalogue.serving import serving
from undivided.errors import InputError

__all__ = ["DTYPES", "GPU_SUITES", "SUITES", "Benchmark", "Goal", "benchmarks"]


def benchmarks(suite: str) -> tuple[Benchmark, ...]:
    """The problems of a suite.

    Raises:
        InputError: there is no such suite, or it is not made of problems (overhead, memory).

    >>> [benchmark.name for benchmark in benchmarks("decode")][:2]
    ['fp32-bhsd-batch1', 'fp32-bhsd-batch8']
    """
    if suite not in _PROBLEMS:
        raise InputError("suite", f"be one of {', '.join(_PROBLEMS)}", repr(suite))
    return tuple(_PROBLEMS[suite]())


_PROBLEMS: Mapping[str, Callable[[], Iterator[Benchmark]]] = MappingProxyType(
    {
        "forward": cpu.forward,
        "backward": cpu.backward,
        "mask": cpu.mask,
        "decode": cpu.decode,
        "serving": serving,
        "small": cpu.small,
        "gpu": gpu.gpu,
        "gpu-decode": gpu.gpu_decode,
    }
)
GPU_SUITES = ("gpu", "gpu-decode")
"""The suites that would take a CPU hours."""
SUITES = (*(name for name in _PROBLEMS if name not in GPU_SUITES), "overhead", "memory")
"""All suites for a CPU, in the order in which they run."""

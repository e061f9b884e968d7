"""What is timed: problems by suite, and what each is meant to reach.

A problem is a `Case` as the verification's catalogue has them, but large, with a dtype, a direction and a goal. The
goals are those that the native kernel was built to (two cores, AVX-512 with BF16); a fraction is of what the same run's
probe of the machine shows (`undivided.benchmarking.peak`), a ratio is to a competitor in the same run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from undivided import masks
from undivided._layout import Layout
from undivided.errors import InputError
from undivided.masks import Mask
from undivided.verification.cases import Case

__all__ = ["DTYPES", "GPU_SUITES", "SUITES", "Benchmark", "Goal", "benchmarks"]

FLOAT, BFLOAT, HALF = torch.float32, torch.bfloat16, torch.float16
DTYPES: Mapping[str, torch.dtype] = MappingProxyType({"fp32": FLOAT, "bf16": BFLOAT, "fp16": HALF})
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Goal:
    """What a figure should reach; None where nothing is asked.

    fraction: of the peak, or of the read rate. faster: (competitor, times as fast as it). within: times the time of the
    same problem without its feature. allowance: (times PyTorch's time, seconds on top).
    pairs: times what the same problem without its mask takes, scaled by the pairs that the mask allows.
    best: times the time of the fastest other. kernel: fraction of the peak by our own kernel, also where another was
        chosen;
    kernel_faster: (competitor, times as fast as it), of our own kernel.
    """

    fraction: float | None = None
    faster: tuple[tuple[str, float], ...] = ()
    within: float | None = None
    allowance: tuple[float, float] | None = None
    pairs: float | None = None
    best: float | None = None
    kernel: float | None = None
    kernel_faster: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Benchmark:
    """One problem to time.

    suite, case, dtype: what. backward: the backward alone; else the forward alone.
    without: the same problem without what the case adds, timed beside it.
    reads: the fraction is of the read rate, not of the arithmetic peak.
    quick: it stands for others where there is little time.
    """

    suite: str
    case: Case
    dtype: torch.dtype
    backward: bool = False
    without: Case | None = None
    goal: Goal = Goal()
    reads: bool = False
    quick: bool = False

    @property
    def name(self) -> str:
        """``bf16-d128-2048-causal``."""
        return f"{_NAMES[self.dtype]}-{self.case.name}"


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


# forward and backward: what prototypes of these loops reached, and more

_FULL, _CAUSAL = None, masks.causal
_FORWARD_GOALS = {  # (dtype, head size): (full, causal)
    (FLOAT, 128): (0.90, 0.87),
    (FLOAT, 64): (0.87, 0.84),
    (BFLOAT, 128): (0.88, 0.84),
    (BFLOAT, 64): (0.83, 0.80),
    (HALF, 128): (0.87, None),
}
_SHORT_GOALS = {FLOAT: (0.85, 0.78), BFLOAT: (0.83, 0.76), HALF: (None, None)}
_FASTER = {FLOAT: (("sdpa", 2.4), ("onnxruntime", 1.2)), BFLOAT: (("sdpa", 4.7),), HALF: (("sdpa", 3.3),)}
_BACKWARD_GOALS = {FLOAT: (0.90, 0.87), BFLOAT: (0.87, 0.82), HALF: (None, None)}
_BACKWARD_FASTER = {FLOAT: 2.5, BFLOAT: 2.8, HALF: 10.0}
_HEADS = {512: 8, 2048: 4, 8192: 1}
"""Fewer heads where the sequence is long: a call takes a few milliseconds to a few tenths of a second for every
competitor."""


def _square(name: str, length: int, heads: int, dim: int, **rest: object) -> Case:
    return Case(name, layout="bhsd", batch=1, q_len=length, heads=heads, qk_dim=dim, needs=(), **rest)  # type: ignore[arg-type]


def _forward() -> Iterator[Benchmark]:
    for (dtype, dim), goals in _FORWARD_GOALS.items():
        for length, heads in _HEADS.items():
            short = length == 512
            for causal in (False, True):
                case = _square(
                    f"d{dim}-{length}-{'causal' if causal else 'full'}",
                    length,
                    heads,
                    dim,
                    mask=_CAUSAL if causal else _FULL,
                )
                fraction = (_SHORT_GOALS[dtype] if short else goals)[causal]
                goal = Goal(fraction, () if short else _FASTER[dtype])
                yield Benchmark(
                    "forward", case, dtype, goal=goal, quick=dim == 128 and length == 2048 and dtype != HALF
                )


def _backward() -> Iterator[Benchmark]:
    for dtype in (FLOAT, BFLOAT, HALF):
        for dim in (128,) if dtype == HALF else (128, 64):
            for causal in (False, True):
                case = _square(
                    f"d{dim}-2048-{'causal' if causal else 'full'}-backward",
                    2048,
                    4,
                    dim,
                    mask=_CAUSAL if causal else _FULL,
                )
                goal = Goal(_BACKWARD_GOALS[dtype][causal], (("sdpa", _BACKWARD_FASTER[dtype]),))
                yield Benchmark(
                    "backward",
                    replace(case, needs=None),
                    dtype,
                    backward=True,
                    goal=goal,
                    quick=dim == 128 and causal and dtype != HALF,
                )


# masks and what changes the scores


@functools.cache
def _packed(shortest: int, longest: int, tokens: int = 8192) -> Mask:
    """Causal documents of random lengths."""
    draw = torch.Generator().manual_seed(0)
    offsets = [0]
    while offsets[-1] < tokens:
        offsets.append(offsets[-1] + int(torch.randint(shortest, longest + 1, (), generator=draw)))
    return masks.documents([*offsets[:-1], tokens]) & masks.causal()


@functools.cache
def _random_pairs() -> Mask:
    """Three pairs of four, the same for every head."""
    return masks.dense(torch.rand(1, 1, 2048, 2048, generator=torch.Generator().manual_seed(0)) < 0.75)


def _mask() -> Iterator[Benchmark]:
    plain = _square("plain", 2048, 8, 128)
    altered = [
        ("dense-mask", {"mask": _random_pairs}, (1.35, 1.35)),
        ("bias", {"bias": "1hqk"}, (1.35, 1.35)),
        ("softcap", {"softcap": 30.0}, (1.35, 1.35)),
        ("alibi", {"alibi": "h"}, (1.35, 1.35)),
        ("dropout", {"dropout_p": 0.1}, (1.4, 1.7)),
    ]
    for index, dtype in enumerate((FLOAT, BFLOAT)):
        window = _square("window256-8192", 8192, 2, 128, mask=lambda: masks.window(255, 0))
        yield Benchmark("mask", window, dtype, goal=Goal((0.75, 0.65)[index], (("sdpa", 60.0),)))
        for shortest, longest, fraction in ((64, 512, 0.60), (16, 128, 0.35)):
            packed = Case(
                f"documents-{shortest}-{longest}",
                layout="thd",
                batch=1,
                q_len=8192,
                heads=8,
                qk_dim=128,
                needs=(),
                mask=functools.partial(_packed, shortest, longest),
            )
            yield Benchmark("mask", packed, dtype, goal=Goal(fraction), quick=index == 0 and longest == 512)
        for name, changes, within in altered:
            yield Benchmark(
                "mask",
                replace(plain, name=name, **changes),  # type: ignore[arg-type]
                dtype,
                without=plain,
                goal=Goal(within=within[index]),
                quick=index == 1 and name in ("dense-mask", "dropout"),
            )


# decoding

_LENGTHS = [16384, 2048, 12288, 4096, 16384, 1024, 8192, 6144]


def _decode() -> Iterator[Benchmark]:
    for dtype in (FLOAT, BFLOAT):
        for kind, layout, page in (("bhsd", "bhsd", None), ("bshd", "bshd", None), ("paged16", "bshd", 16)):
            for batch in (1, 8):
                case = _decoding(f"{kind}-batch{batch}", layout, batch, page)  # type: ignore[arg-type]
                goal = Goal(0.85 if kind == "bhsd" else 0.75)
                yield Benchmark("decode", case, dtype, goal=goal, reads=True, quick=batch == 1 and kind != "bshd")


def _decoding(name: str, layout: Layout, batch: int, page_size: int | None) -> Case:
    unequal: Callable[[], Mask] | None = (lambda: masks.lengths(_LENGTHS)) if batch > 1 else None
    if page_size is not None and unequal is None:
        unequal = lambda: masks.lengths([16384])  # noqa: E731
    return Case(
        name,
        layout=layout,
        batch=batch,
        q_len=1,
        kv_len=16384,
        heads=32,
        kv_heads=8,
        qk_dim=128,
        mask=unequal,
        page_size=page_size,
        needs=(),
    )


# small problems

SMALL_LIMIT = 1 << 31
"""Multiply-adds of a problem of the grid at most: above it a call takes tens of milliseconds and is not small."""


def _small() -> Iterator[Benchmark]:
    goal = Goal(allowance=(1.05, 15e-6))
    for dtype in (FLOAT, BFLOAT, HALF):
        for backward in (False, True):
            for dim in (32, 64, 128, 256):
                for batch, heads in ((1, 1), (1, 8), (8, 1), (8, 32)):
                    for length in (1, 16, 100, 256, 1024):
                        if batch * heads * length * length * dim * 2 > SMALL_LIMIT:
                            continue
                        direction = "-backward" if backward else ""
                        case = Case(
                            f"b{batch}-h{heads}-{length}-d{dim}{direction}",
                            layout="bhsd",
                            batch=batch,
                            q_len=length,
                            heads=heads,
                            qk_dim=dim,
                            needs=None if backward else (),
                        )
                        quick = dim == 64 and dtype != HALF and heads == 8 and length in (1, 100)
                        yield Benchmark("small", case, dtype, backward=backward, goal=goal, quick=quick)


# a GPU

_CHOICE = 1.03
"""Times the fastest peer's time that the library's own choice may take, dispatch included."""
_KERNEL = {False: 0.65, True: 0.5}
"""Fraction of the matrix product that our own kernel is to reach at head size 128 without a mask; True is backward."""


def _gpu() -> Iterator[Benchmark]:
    """Training and serving shapes of a large GPU, most of them bf16: every one forward and backward."""
    for dim in (64, 128, 256):
        for length in (1024, 4096, 16384, 65536):
            for name, mask in (("full", None), ("causal", masks.causal)):
                yield from _both_ways(
                    f"d{dim}-{length}-{name}",
                    length,
                    dim,
                    mask=mask,
                    quick=length == 4096 and dim == 128,
                    aimed=dim == 128 and length >= 4096 and mask is None,
                )
    yield from _both_ways("window1024-32768", 32768, 128, mask=lambda: masks.window(1023, 0), pairs=True, quick=True)
    yield from _both_ways("prefix-lm-16384", 16384, 128, mask=lambda: masks.causal() | masks.prefix(2048), quick=True)
    for name, changes in (("alibi", {"alibi": "h"}), ("softcap", {"softcap": 30.0}), ("sinks", {"sinks": True})):
        yield from _both_ways(f"{name}-8192", 8192, 128, mask=masks.causal, **changes)
    packed = Case(
        "documents-512-4096",
        layout="thd",
        batch=1,
        q_len=32768,
        heads=16,
        qk_dim=128,
        mask=functools.partial(_packed, 512, 4096, 32768),
    )
    yield from _directions(packed, pairs=True, quick=True)
    yield from _directions(replace(packed, name=f"{packed.name}-gqa", kv_heads=4))
    yield from _gpu_kinds()


def _gpu_kinds() -> Iterator[Benchmark]:
    """One or two of every further kind that backends are ranked by (`undivided._measured`)."""
    for dim in (64, 128):
        for length in (4096, 16384):
            yield from _both_ways(f"d{dim}-{length}-causal-gqa", length, dim, mask=masks.causal, kv_heads=512 // dim)
        for dtype in (HALF, FLOAT):
            for name, mask in (("full", None), ("causal", masks.causal)):
                yield from _both_ways(f"d{dim}-4096-{name}", 4096, dim, dtype=dtype, mask=mask)
    mla = Case("d192-v128-4096-causal", batch=4, q_len=4096, heads=16, qk_dim=192, v_dim=128, mask=masks.causal)
    yield from _directions(mla)


def _both_ways(
    name: str,
    length: int,
    dim: int,
    *,
    pairs: bool = False,
    quick: bool = False,
    aimed: bool = False,
    dtype: torch.dtype = BFLOAT,
    **rest: Any,
) -> Iterator[Benchmark]:
    """About 16k tokens and 2048 features in all, whatever the length and the head size."""
    case = Case(name, layout="bshd", batch=max(16384 // length, 1), q_len=length, heads=2048 // dim, qk_dim=dim, **rest)
    yield from _directions(case, pairs, quick, aimed, dtype)


def _directions(
    case: Case, pairs: bool = False, quick: bool = False, aimed: bool = False, dtype: torch.dtype = BFLOAT
) -> Iterator[Benchmark]:
    """Forward and backward, with the goals of a large GPU."""
    for backward in (False, True):
        goal = Goal(
            best=_CHOICE,
            kernel=_KERNEL[backward] if aimed else None,
            pairs=1.15 if pairs else None,
            kernel_faster=(("flex", 1.0),),
        )
        this = replace(case, name=f"{case.name}-backward", needs=None) if backward else replace(case, needs=())
        without = replace(this, mask=None) if pairs else None
        yield Benchmark("gpu", this, dtype, backward, without, goal, quick=quick)


def _gpu_decode() -> Iterator[Benchmark]:
    """One query a sequence over caches of 8k to 128k keys, as many as 40 GB hold."""
    goal = Goal(fraction=0.8, best=_CHOICE)
    for batch in (1, 64):
        for length in (8192, 32768, 131072):
            if batch * length <= 64 * 32768:
                case = Case(
                    f"decode-batch{batch}-{length}",
                    batch=batch,
                    q_len=1,
                    kv_len=length,
                    heads=32,
                    kv_heads=8,
                    qk_dim=128,
                    needs=(),
                )
                yield Benchmark("gpu-decode", case, BFLOAT, goal=goal, reads=True, quick=length == 8192)
    for batch, length in ((64, 8192), (8, 32768)):
        for name, page in (("lengths", None), ("paged16", 16), ("paged256", 256)):
            case = Case(
                f"{name}-batch{batch}-{length}",
                batch=batch,
                q_len=1,
                kv_len=length,
                heads=32,
                kv_heads=8,
                qk_dim=128,
                mask=functools.partial(_unequal, batch, length),
                page_size=page,
                needs=(),
            )
            yield Benchmark("gpu-decode", case, BFLOAT, goal=goal, reads=True)


def _unequal(batch: int, longest: int) -> Mask:
    """Lengths spread evenly from half of the longest."""
    return masks.lengths([longest - n * longest // (2 * batch) for n in range(batch)])


_PROBLEMS: Mapping[str, Callable[[], Iterator[Benchmark]]] = MappingProxyType(
    {
        "forward": _forward,
        "backward": _backward,
        "mask": _mask,
        "decode": _decode,
        "small": _small,
        "gpu": _gpu,
        "gpu-decode": _gpu_decode,
    }
)
GPU_SUITES = ("gpu", "gpu-decode")
"""Those that would take a CPU hours."""
SUITES = (*(name for name in _PROBLEMS if name not in GPU_SUITES), "overhead", "memory")
"""Every suite for a CPU, in the order they run."""

"""The GPU suites: training, serving and decoding shapes of a large GPU."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from undivided import masks
from undivided.benchmarking.catalogue.benchmark import BFLOAT, FLOAT, HALF, Benchmark, Goal, backward_of, decoding
from undivided.benchmarking.catalogue.cpu import packed_documents
from undivided.masks import Mask
from undivided.verification.cases import Case

_CHOICE = 1.03
"""Largest ratio of the chosen backend's time, dispatch included, to that of the fastest competitor."""
_KERNEL = {False: 0.65, True: 0.5}
"""Target of our own kernel at head size 128 without a mask, as a fraction of the matrix product; True is backward."""


def gpu() -> Iterator[Benchmark]:
    """Training and serving shapes of a large GPU, most of them in bf16, each forward and backward."""
    for dim in (64, 128, 256):
        for length in (1024, 4096, 16384, 65536):
            for name, mask in (("full", None), ("causal", masks.causal)):
                yield from _sized(
                    f"d{dim}-{length}-{name}",
                    length,
                    dim,
                    mask=mask,
                    quick=length == 4096 and dim == 128,
                    has_target=dim == 128 and length >= 4096 and mask is None,
                )
    yield from _sized("window1024-32768", 32768, 128, mask=lambda: masks.window(1023, 0), pairs=True, quick=True)
    yield from _sized("prefix-lm-16384", 16384, 128, mask=lambda: masks.causal() | masks.prefix(2048), quick=True)
    for name, changes in (("alibi", {"alibi": "h"}), ("softcap", {"softcap": 30.0}), ("sinks", {"sinks": True})):
        yield from _sized(f"{name}-8192", 8192, 128, mask=masks.causal, **changes)
    packed = Case(
        "documents-512-4096",
        layout="thd",
        batch=1,
        q_len=32768,
        heads=16,
        qk_dim=128,
        mask=functools.partial(packed_documents, 512, 4096, 32768),
    )
    yield from _forward_and_backward(packed, pairs=True, quick=True)
    yield from _forward_and_backward(replace(packed, name=f"{packed.name}-gqa", kv_heads=4))
    yield from _gpu_kinds()


def _gpu_kinds() -> Iterator[Benchmark]:
    """One or two problems of every further kind by which backends are ranked (`undivided.selection.measured`)."""
    for dim in (64, 128):
        for length in (4096, 16384):
            yield from _sized(f"d{dim}-{length}-causal-gqa", length, dim, mask=masks.causal, kv_heads=512 // dim)
        for dtype in (HALF, FLOAT):
            for name, mask in (("full", None), ("causal", masks.causal)):
                yield from _sized(f"d{dim}-4096-{name}", 4096, dim, dtype=dtype, mask=mask)
    mla = Case("d192-v128-4096-causal", batch=4, q_len=4096, heads=16, qk_dim=192, v_dim=128, mask=masks.causal)
    yield from _forward_and_backward(mla)


def _sized(
    name: str,
    length: int,
    dim: int,
    *,
    pairs: bool = False,
    quick: bool = False,
    has_target: bool = False,
    dtype: torch.dtype = BFLOAT,
    **rest: Any,
) -> Iterator[Benchmark]:
    """Forward and backward of about 16k tokens and 2048 features, for any length and head size."""
    case = Case(name, layout="bshd", batch=max(16384 // length, 1), q_len=length, heads=2048 // dim, qk_dim=dim, **rest)
    yield from _forward_and_backward(case, pairs, quick, has_target, dtype)


def _forward_and_backward(
    case: Case, pairs: bool = False, quick: bool = False, has_target: bool = False, dtype: torch.dtype = BFLOAT
) -> Iterator[Benchmark]:
    """The forward and the backward of a case, with the goals of a large GPU."""
    for backward in (False, True):
        goal = Goal(
            best=_CHOICE,
            kernel=_KERNEL[backward] if has_target else None,
            pairs=1.15 if pairs else None,
            kernel_faster=(("flex", 1.0),),
        )
        directed = backward_of(case) if backward else replace(case, needs=())
        without = replace(directed, mask=None) if pairs else None
        yield Benchmark("gpu", directed, dtype, backward, without, goal, quick=quick)


def gpu_decode() -> Iterator[Benchmark]:
    """One query per sequence over caches of 8k to 128k keys, up to 40 GB of cache."""
    goal = Goal(fraction=0.8, best=_CHOICE)
    for batch in (1, 64):
        for length in (8192, 32768, 131072):
            if batch * length <= 64 * 32768:
                case = decoding(f"decode-batch{batch}-{length}", batch, length)
                yield Benchmark("gpu-decode", case, BFLOAT, goal=goal, reads=True, quick=length == 8192)
    for batch, length in ((64, 8192), (8, 32768)):
        for name, page in (("lengths", None), ("paged16", 16), ("paged256", 256)):
            lengths = functools.partial(_spread_lengths, batch, length)
            case = decoding(f"{name}-batch{batch}-{length}", batch, length, mask=lengths, page_size=page)
            yield Benchmark("gpu-decode", case, BFLOAT, goal=goal, reads=True)


def _spread_lengths(batch: int, longest: int) -> Mask:
    """Lengths that are spread evenly from half of the longest to the longest."""
    return masks.lengths([longest - n * longest // (2 * batch) for n in range(batch)])

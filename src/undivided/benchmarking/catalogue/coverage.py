"""The problems of ``undivided ranks --measure``: few, and spread over the kinds and places of the table of ranks.

A measured problem stands for those with half to twice its keys and a quarter to four times its work
(`undivided.selection.measured`). So the lengths are four times apart, and the most frequent kinds come first: the time
limit may end the list anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from undivided import masks
from undivided.benchmarking.catalogue.benchmark import BFLOAT, FLOAT, HALF, Benchmark, backward_of, decoding
from undivided.verification.cases import Case

__all__ = ["coverage"]

_STRUCTURES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("causal", {"mask": masks.causal}),
    ("full", {}),
    ("causal-gqa", {"mask": masks.causal, "kv_heads": 2}),
)
_HEADS = 8


def coverage() -> Iterator[tuple[Benchmark, ...]]:
    """The problems, the most important first; those of one tuple belong together (a forward and its backward).

    >>> [[one.name for one in group] for group in coverage()][:2]
    [['fp32-causal-512-d64', 'fp32-causal-512-d64-backward'], ['fp32-decode-gqa-4096-d64']]
    """
    for dtype, width in product((FLOAT, BFLOAT), (64, 128)):
        yield _square("causal", 512, width, dtype, backward=True, mask=masks.causal)
        yield _decoding("gqa", 4096, 4, width, dtype)
    for (name, options), dtype, width in product(_STRUCTURES, (FLOAT, BFLOAT), (64, 128)):
        yield _square(name, 2048, width, dtype, **options)
        yield _square(name, 128, width, dtype, backward=True, **options)
        if name != "causal":
            yield _square(name, 512, width, dtype, backward=True, **options)
    for dtype, width in product((FLOAT, BFLOAT), (64, 128)):
        yield _decoding("gqa", 1024, 16, width, dtype)
        yield _decoding("gqa", 16384, 1, width, dtype)
        yield _decoding("gqa-lengths", 4096, 4, width, dtype, mask=_halves)
        yield _square("window", 2048, width, dtype, mask=lambda: masks.window(255, 0))
    for length, heads, dtype, width in product((16, 32), (8, 64), (FLOAT, BFLOAT), (64, 128)):
        yield _square(f"causal-h{heads}", length, width, dtype, backward=True, mask=masks.causal, heads=heads)
        yield _square(f"full-h{heads}", length, width, dtype, backward=True, heads=heads)
    for heads, length, dtype, width in product((1, 64), (128, 512), (FLOAT, BFLOAT), (64, 128)):
        yield _square(f"causal-h{heads}", length, width, dtype, backward=True, mask=masks.causal, heads=heads)
    for (name, options), dtype, width in product(_STRUCTURES, (FLOAT, BFLOAT), (64, 128)):
        yield _square(name, 1024, width, dtype, backward=True, **options)
    for dtype, width in ((HALF, 64), (HALF, 128), (FLOAT, 32), (BFLOAT, 32), (FLOAT, 256), (BFLOAT, 256)):
        for length in (128, 512, 2048):
            yield _square("causal", length, width, dtype, backward=length == 512, mask=masks.causal)
        yield _decoding("gqa", 4096, 4, width, dtype)


def _halves() -> masks.Mask:
    """Lengths of four sequences, from half of 4096 keys to all."""
    return masks.lengths([4096, 2048, 3072, 3584])


def _square(
    name: str, length: int, width: int, dtype: torch.dtype, *, backward: bool = False, heads: int = _HEADS, **rest: Any
) -> tuple[Benchmark, ...]:
    """The forward of one sequence with as many keys as queries, and its backward."""
    case = Case(
        f"{name}-{length}-d{width}", layout="bshd", batch=1, q_len=length, heads=heads, qk_dim=width, needs=(), **rest
    )
    forward = Benchmark("ranks", case, dtype)
    if not backward:
        return (forward,)
    return forward, Benchmark("ranks", backward_of(case), dtype, backward=True)


def _decoding(name: str, keys: int, batch: int, width: int, dtype: torch.dtype, **rest: Any) -> tuple[Benchmark]:
    case = decoding(f"decode-{name}-{keys}-d{width}", batch, keys, layout="bshd", qk_dim=width, **rest)
    return (Benchmark("ranks", case, dtype, reads=True),)

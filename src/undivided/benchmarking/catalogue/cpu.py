"""The CPU suites. Their goals are those that the native kernel was built for (two cores, AVX-512 with BF16)."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from undivided import masks
from undivided.benchmarking.catalogue.benchmark import BFLOAT, FLOAT, HALF, Benchmark, Goal, backward_of, decoding
from undivided.masks import Mask
from undivided.verification.cases import Case

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
"""Heads per sequence length, so that a call takes between a few milliseconds and a few tenths of a second."""


def _square(name: str, length: int, heads: int, dim: int, *, batch: int = 1, **rest: Any) -> Case:
    """As many keys as queries; one sequence by default."""
    return Case(name, layout="bhsd", batch=batch, q_len=length, heads=heads, qk_dim=dim, needs=(), **rest)


def _causal_or_full(length: int, heads: int, dim: int, causal: bool) -> Case:
    kind = "causal" if causal else "full"
    return _square(f"d{dim}-{length}-{kind}", length, heads, dim, mask=masks.causal if causal else None)


def forward() -> Iterator[Benchmark]:
    """Square problems, causal and full."""
    for (dtype, dim), goals in _FORWARD_GOALS.items():
        for length, heads in _HEADS.items():
            short = length == 512
            for causal in (False, True):
                case = _causal_or_full(length, heads, dim, causal)
                fraction = (_SHORT_GOALS[dtype] if short else goals)[causal]
                goal = Goal(fraction, () if short else _FASTER[dtype])
                quick = dim == 128 and length == 2048 and dtype != HALF
                yield Benchmark("forward", case, dtype, goal=goal, quick=quick)


def backward() -> Iterator[Benchmark]:
    """The gradients of square problems, causal and full."""
    for dtype in (FLOAT, BFLOAT, HALF):
        for dim in (128,) if dtype == HALF else (128, 64):
            for causal in (False, True):
                case = backward_of(_causal_or_full(2048, 4, dim, causal))
                goal = Goal(_BACKWARD_GOALS[dtype][causal], (("sdpa", _BACKWARD_FASTER[dtype]),))
                quick = dim == 128 and causal and dtype != HALF
                yield Benchmark("backward", case, dtype, backward=True, goal=goal, quick=quick)


@functools.cache
def packed_documents(shortest: int, longest: int, tokens: int = 8192) -> Mask:
    """Causal documents of random lengths."""
    draw = torch.Generator().manual_seed(0)
    offsets = [0]
    while offsets[-1] < tokens:
        offsets.append(offsets[-1] + int(torch.randint(shortest, longest + 1, (), generator=draw)))
    return masks.documents([*offsets[:-1], tokens]) & masks.causal()


@functools.cache
def _random_pairs() -> Mask:
    """Three quarters of all pairs, the same for every head."""
    return masks.dense(torch.rand(1, 1, 2048, 2048, generator=torch.Generator().manual_seed(0)) < 0.75)


@functools.cache
def _padded_keys() -> Mask:
    """Keys as a padded batch has them: each of 8 sequences sees its first ones, the same for every head and row."""
    lengths = torch.tensor([4096, 512, 3072, 1024, 4096, 2048, 3584, 1536])
    return masks.dense((torch.arange(4096) < lengths[:, None])[:, None, None])


def mask() -> Iterator[Benchmark]:
    """Masks, and options that change the scores."""
    plain = _square("plain", 2048, 8, 128)
    features = [
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
                mask=functools.partial(packed_documents, shortest, longest),
            )
            yield Benchmark("mask", packed, dtype, goal=Goal(fraction), quick=index == 0 and longest == 512)
        for name, changes, within in features:
            yield Benchmark(
                "mask",
                replace(plain, name=name, **changes),  # type: ignore[arg-type]
                dtype,
                without=plain,
                goal=Goal(within=within[index]),
                quick=index == 1 and name in ("dense-mask", "dropout"),
            )
        decoded = decoding("decode", 8, 4096, layout="bhsd")
        for name, changes in (("dense-mask", {"mask": _padded_keys}), ("bias", {"bias": "bhqk"})):
            case = replace(decoded, name=f"decode-{name}", **changes)
            yield Benchmark("mask", case, dtype, without=decoded, goal=Goal(within=1.15))


_LENGTHS = [16384, 2048, 12288, 4096, 16384, 1024, 8192, 6144]


def decode() -> Iterator[Benchmark]:
    """One query per sequence over a long cache."""
    for dtype in (FLOAT, BFLOAT):
        for kind, layout, page in (("bhsd", "bhsd", None), ("bshd", "bshd", None), ("paged16", "bshd", 16)):
            for batch in (1, 8):
                lengths = functools.partial(masks.lengths, _LENGTHS[:batch]) if batch > 1 or page else None
                case = decoding(f"{kind}-batch{batch}", batch, 16384, layout=layout, page_size=page, mask=lengths)
                goal = Goal(0.85 if kind == "bhsd" else 0.75)
                yield Benchmark("decode", case, dtype, goal=goal, reads=True, quick=batch == 1 and kind != "bshd")


SMALL_LIMIT = 1 << 31
"""Largest problem of the grid, in multiply-adds: a larger call takes tens of milliseconds and is not small."""


def small() -> Iterator[Benchmark]:
    """A grid of problems whose time is mostly overhead."""
    goal = Goal(allowance=(1.05, 15e-6))
    for dtype in (FLOAT, BFLOAT, HALF):
        for backward in (False, True):
            for dim in (32, 64, 128, 256):
                for batch, heads in ((1, 1), (1, 8), (8, 1), (8, 32)):
                    for length in (1, 16, 100, 256, 1024):
                        if batch * heads * length * length * dim * 2 > SMALL_LIMIT:
                            continue
                        case = _square(f"b{batch}-h{heads}-{length}-d{dim}", length, heads, dim, batch=batch)
                        case = backward_of(case) if backward else case
                        quick = dim == 64 and dtype != HALF and heads == 8 and length in (1, 100)
                        yield Benchmark("small", case, dtype, backward=backward, goal=goal, quick=quick)

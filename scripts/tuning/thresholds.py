"""The thresholds that `scripts/tune-cpu` measures: values to try, and the problems that each decides on.

The first problems of a threshold lie where its values differ; the last ones are near them, and show what a value costs
beside its purpose.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import torch

from undivided import masks
from undivided.benchmarking.catalogue.benchmark import BFLOAT, FLOAT, Benchmark
from undivided.verification.case import Case

KIB = 1 << 10
_CHUNK_BYTES = (64 * KIB, 128 * KIB, 256 * KIB, 512 * KIB)
_PARALLEL = (1 << 16, 1 << 17, 1 << 18, 1 << 19)


class Threshold(NamedTuple):
    """A constant of tuning.h.

    name: as C++ writes it; a field of a struct follows a dot. decides: what, in words. values: to try.
    problems: to time. threads: of the calls; 0 is one per core. levels: at which it decides anything; empty is all.
    """

    name: str
    decides: str
    values: tuple[int, ...]
    problems: tuple[Benchmark, ...]
    threads: int = 1
    levels: tuple[str, ...] = ()


def _problem(name: str, dtype: torch.dtype, backward: bool = False, reads: bool = False, **sizes: Any) -> Benchmark:
    case = Case(name, **{"layout": "bhsd", "batch": 1, "qk_dim": 128, "needs": () if not backward else None, **sizes})
    return Benchmark("tuning", case, dtype, backward=backward, reads=reads)


def _squares(
    lengths: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    widths: tuple[int, ...] = (128,),
    heads: int = 4,
    causal: bool = False,
    **rest: Any,
) -> Iterator[Benchmark]:
    """Sequences with as many keys as queries."""
    for length, width, dtype in product(lengths, widths, dtypes):
        name = f"{length}-d{width}-h{heads}" + "-causal" * causal + "-backward" * bool(rest.get("backward"))
        mask = masks.causal if causal else None
        yield _problem(name, dtype, q_len=length, heads=heads, qk_dim=width, mask=mask, **rest)


def _decoding(batches: tuple[int, ...], keys: int, dtypes: tuple[torch.dtype, ...]) -> Iterator[Benchmark]:
    """One query per sequence, 32 heads on 8."""
    for batch, dtype in product(batches, dtypes):
        name = f"decode-{keys}-b{batch}"
        yield _problem(name, dtype, reads=True, batch=batch, q_len=1, kv_len=keys, heads=32, kv_heads=8)


BOTH = (FLOAT, BFLOAT)
_LONG = (*_squares((2048,), BOTH, (64, 128)), *_squares((2048,), BOTH, causal=True))


def _token_heads(problem: Benchmark) -> Benchmark:
    """The same problem with the heads of a token side by side, so that a row's stride is heads times as large."""
    return replace(problem, case=replace(problem.case, name=f"{problem.case.name}-bshd", layout="bshd"))


THRESHOLDS = (
    Threshold("kVectorRows", "query rows of a block, fp32", (192, 288, 384, 576), tuple(_squares(
        (512, 2048), (FLOAT,), (64, 128)))),
    Threshold("kRows16", "query rows of a block, 16-bit types", (192, 384, 512, 768), tuple(_squares(
        (512, 2048), (BFLOAT,), (64, 128)))),
    Threshold("kBlockKeys", "keys of a key block", (128, 192, 256, 384), _LONG),
    Threshold("kMaxNarrowBytes", "packed keys and values of a narrow block", (512 * KIB, 1024 * KIB, 2048 * KIB), (
        *_squares((1024, 2048), BOTH), *_squares((2048,), BOTH, causal=True))),
    Threshold("kMaxInPlaceStride", "stride of the keys from which on they are copied", (1024, 2048, 4096, 8192), tuple(
        map(_token_heads, (*_squares((2048,), BOTH, (64, 128)), *_squares((512,), BOTH, heads=8))))),
    Threshold("kMaxRowMajorKeys", "keys of rows whose second product works row by row, fp32", (0, 64, 128, 192), tuple(
        _squares((48, 96, 128, 160, 192), (FLOAT,), (64, 128), heads=32, causal=True)),
        levels=("avx512", "avx512_bf16")),
    Threshold("kMaxSmallForward32", "rows and keys of the small forward, fp32", (8, 16, 32, 48), tuple(
        _squares((4, 12, 16, 24, 32, 48), (FLOAT,), (64,), heads=128))),
    Threshold("kMaxSmallForward16", "rows and keys of the small forward, AMX and dot products", (8, 16, 24, 32), tuple(
        _squares((4, 12, 16, 24, 32), (BFLOAT,), (64,), heads=128)), levels=("amx_bf16", "amx", "avx512_bf16")),
    Threshold("kMaxSmallBackward", "rows and keys of the small backward, fp32", (32, 64, 96, 128), tuple(
        _squares((24, 48, 64, 96, 128), (FLOAT,), (64,), heads=32, backward=True))),
    Threshold("kMaxSmallBackwardDot", "rows and keys of the small backward, dot products", (16, 32, 64, 128), tuple(
        _squares((12, 24, 32, 64, 96), (BFLOAT,), (64,), heads=32, backward=True)), levels=("avx512_bf16",)),
    Threshold("kDecodeStepKeys", "keys of a step of decoding", (16, 32, 64, 128), tuple(
        _decoding((1, 8), 4096, BOTH))),
    Threshold("kOneHead.min_bytes", "keys and values of a chunk of decoding", _CHUNK_BYTES, tuple(
        _decoding((1, 4), 4096, BOTH)), threads=0),
    Threshold("kOneHead.max_keys", "keys of a chunk of decoding", (256, 512, 1024, 2048), tuple(
        _decoding((1, 4), 16384, BOTH)), threads=0),
    Threshold("kMinParallelWork", "multiply-adds from which on several threads work", _PARALLEL, tuple(
        _squares((8, 12, 16, 24, 32), (FLOAT,), (64,), heads=8)), threads=0),
    Threshold("kBackwardRows", "query rows of a block of gradients", (64, 128, 192, 256), tuple(
        _squares((2048,), BOTH, (64, 128), backward=True))),
    Threshold("kMaxUnitKeys", "keys of a unit of gradients", (256, 512, 768, 1024), tuple(
        _squares((2048,), BOTH, (64, 128), backward=True))),
)  # fmt: skip
BY_NAME = {one.name: one for one in THRESHOLDS}

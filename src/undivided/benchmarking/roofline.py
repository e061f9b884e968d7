"""The time that a problem should take: a model of what bounds it, from the peaks that its report measured.

It is a formula that can be read, with a known error, and not a simulation. Prefill is the sum of five terms. The first
four use the same arithmetic units:

- products: two matrix products of the allowed pairs, at the peak rate of multiply-adds (or of tiles);
- edges: the same for pairs that are computed and masked, because a micro-kernel covers whole vectors of rows;
- softmax: the vector instructions per pair (maximum, difference, exponential, sum, rescaled results), at the rate of
  multiply-adds: one instruction counts as one multiply-add;
- packing: what converting or interleaving keys and values costs, once per block of rows, in rows;
- memory: queries, keys and values read once and results written once (which reads their lines too), at the rate of a
  plain read: in a benchmark, as in a model, they are not in the caches when a call begins.

Decoding is the larger of reading every key and value once, at the rate of a plain read of the same run, and of its
multiply-adds. Left out: loads and stores of the micro-kernels, traffic between the caches, page walks and page faults,
threads that wait for each other, and the call itself.

`docs/reference/roofline.md` has the predictions beside the measurements.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from undivided.benchmarking.catalogue import benchmarks
from undivided.benchmarking.catalogue.benchmark import FLOAT, Benchmark

__all__ = [
    "LEVELS",
    "CasePrediction",
    "Level",
    "Prediction",
    "Rates",
    "case_predictions",
    "decode",
    "kind_of",
    "prefill",
]


class Rates(NamedTuple):
    """Measured peaks: FLOP/s of matrix products in the dtype, FLOP/s of fp32 multiply-adds, B/s of a plain read."""

    products: float
    vectors: float
    reads: float = math.inf


class Level(NamedTuple):
    """The shape of the micro-kernels of a level.

    lanes: query rows of a vector, and vectors: of a panel. group: keys that a micro-kernel takes at a time.
    rows: query rows of a block in fp32 and in 16-bit types. softmax: vector instructions per vector of pairs.
    packing: cost of packing the keys of a block for 16-bit types, in rows. splits_fp32: whether fp32 runs as several
    products of 16-bit parts, which are not modelled.
    """

    lanes: int
    vectors: int
    group: int
    rows: tuple[int, int]
    softmax: float
    packing: int
    splits_fp32: bool = False


_AVX512 = Level(16, 3, 8, (384, 512), softmax=12, packing=5)
LEVELS: Mapping[str, Level] = {
    # softmax: 1 maximum, 2 for (score - maximum) * factor, the exponential (simd/math.h), 1 sum, in bf16 half a packing
    "avx2": Level(8, 3, 4, (384, 512), softmax=16, packing=5),
    "avx512": _AVX512,
    "avx512_bf16": _AVX512,
    "amx_bf16": Level(16, 2, 16, (1024, 1024), softmax=10.5, packing=35, splits_fp32=True),
    "amx": Level(16, 2, 16, (1024, 1024), softmax=10.5, packing=35, splits_fp32=True),
}
KEY_BLOCK = 128
"""Keys after which the results of a panel are loaded, rescaled and stored again."""


class Prediction(NamedTuple):
    """Seconds by term. In decoding the terms overlap, and the largest counts; otherwise they add up."""

    terms: Mapping[str, float]
    overlap: bool = False

    @property
    def seconds(self) -> float:
        """The predicted time."""
        return max(self.terms.values()) if self.overlap else sum(self.terms.values())

    @property
    def bound(self) -> str:
        """The term that takes longest. The products do not count if all others are a tenth of the time: these are what
        a faster kernel would reduce."""
        rest = {name: time for name, time in self.terms.items() if name != "products"}
        if self.overlap or sum(rest.values()) < 0.1 * self.seconds:
            return max(self.terms, key=lambda name: self.terms[name])
        return max(rest, key=lambda name: rest[name])


def prefill(
    lengths: Sequence[int],
    heads: int,
    qk_dim: int,
    v_dim: int,
    level: Level,
    rates: Rates,
    *,
    causal: bool,
    left: int | None = None,
    sixteen_bit: bool = False,
) -> Prediction:
    """The prediction for sequences with as many keys as queries, on one thread or on rates of several.

    Args:
        lengths: tokens of each sequence.
        heads: number of query heads.
        qk_dim, v_dim: head sizes.
        level: the shape of the micro-kernels.
        rates: the peaks.
        causal: whether a query sees no later key.
        left: keys before its own that a query sees; None is all.
        sixteen_bit: whether keys and values are of a 16-bit type.

    >>> rates = Rates(products=2.5e11, vectors=2.5e11)
    >>> prediction = prefill([2048], 4, 128, 128, LEVELS["avx512"], rates, causal=False)
    >>> f"{prediction.terms['products'] / prediction.seconds:.2f}", prediction.bound
    ('0.95', 'products')
    """
    width, rows = qk_dim + v_dim, level.rows[sixteen_bit]
    allowed = computed = weighed = packed = 0.0
    for length in lengths:
        allowed += _pairs(length, 1, 1, 1, causal, left)
        computed += _pairs(length, level.lanes, level.lanes, level.group, causal, left)
        weighed += _pairs(length, level.lanes * level.vectors, level.lanes, 1, causal, left)
        packed += _pairs(length, rows, rows, 1, causal, left) / rows * level.packing * sixteen_bit
    product = 2.0 * heads * width / rates.products
    per_pair = 2.0 * heads * (level.softmax + v_dim / KEY_BLOCK) / rates.vectors
    return Prediction(
        {
            "products": allowed * product,
            "edges": (computed - allowed) * product,
            "softmax": weighed * per_pair,
            "packing": packed * product,
            "memory": sum(lengths) * heads * (2 * qk_dim + 3 * v_dim) * (2 if sixteen_bit else 4) / rates.reads,
        }
    )


def _pairs(length: int, rows: int, padded_to: int, keys: int, causal: bool, left: int | None) -> int:
    """The pairs of one head that are computed if a block of rows takes every key that one of them sees.

    Blocks have `rows` rows and are padded to a multiple of `padded_to`; keys are taken in groups of `keys`.

    >>> [_pairs(4, rows, rows, 1, True, None) for rows in (1, 2, 4)]
    [10, 12, 16]
    """
    total = 0
    for first in range(0, length, rows):
        last = min(first + rows, length)
        stop = last if causal else length
        start = 0 if left is None else max(first - left, 0)
        total += _round_up(last - first, padded_to) * _round_up(stop - start, keys)
    return total


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def decode(bytes_read: float, operations: float, rates: Rates) -> Prediction:
    """The prediction for one query per sequence: every key and value is read once.

    >>> decode(1e9, 1e9, Rates(products=1e11, vectors=1e11, reads=2e10)).bound
    'reads'
    """
    return Prediction({"reads": bytes_read / rates.reads, "products": operations / rates.vectors}, overlap=True)


class CasePrediction(NamedTuple):
    """A case of a report: its kind, the seconds that it took and those that were predicted, and what a peak allows.

    kind: "prefill", "window", "documents" or "decode". peak: seconds at the peak alone. disturbed: by other load.
    """

    kind: str
    name: str
    measured: float
    predicted: Prediction
    peak: float
    disturbed: bool

    @property
    def ratio(self) -> float:
        """The measured time divided by the predicted one."""
        return self.measured / self.predicted.seconds


def case_predictions(report: Mapping[str, Any]) -> Iterator[CasePrediction]:
    """The cases of a report of `undivided bench --json` that the model covers, in the order of the report.

    >>> list(case_predictions({"machine": {"native": "generic"}, "cases": []}))
    []
    """
    level = LEVELS.get(report["machine"]["native"])
    by_name = {one.name: one for suite in ("forward", "mask", "decode") for one in benchmarks(suite)}
    vectors, reads = _peak(report, "float32 multiply-adds"), _peak(report, "read of")
    if level is None or vectors is None:
        return
    for case in report["cases"]:
        benchmark, ours = by_name.get(case["name"]), case["entries"][0]
        if benchmark is None or (kind := kind_of(benchmark)) is None or "seconds" not in ours:
            continue
        if kind != "decode" and level.splits_fp32 and benchmark.dtype == FLOAT:
            continue
        used = case["rate"]["used"]
        if kind == "decode":
            predicted = decode(case["bytes"], case["operations"], Rates(vectors, vectors, used))
        else:
            predicted = _predict_prefill(benchmark, level, Rates(used, vectors, reads or math.inf))
        peak = (case["bytes"] or case["operations"]) / used
        yield CasePrediction(kind, case["name"], ours["seconds"], predicted, peak, case["rate"]["contended"])


def _peak(report: Mapping[str, Any], what: str) -> float | None:
    """The median of the peaks whose name starts so; None if the report has none."""
    rates = [case["rate"]["used"] for case in report["cases"] if case["rate"].get("what", "").startswith(what)]
    return statistics.median(rates) if rates else None


def kind_of(benchmark: Benchmark) -> str | None:
    """The kind of a benchmark; None if the model does not cover it."""
    if benchmark.suite == "decode":
        return "decode"
    if benchmark.suite == "forward" and benchmark.dtype != torch.float16:
        return "prefill"
    return next((kind for kind in ("window", "documents") if benchmark.case.name.startswith(kind)), None)


def _predict_prefill(benchmark: Benchmark, level: Level, rates: Rates) -> Prediction:
    """The prediction for a square problem of the catalogue."""
    _, length, _, heads, _, qk_dim, v_dim = benchmark.case.sizes
    lengths, left = [length], None
    mask = benchmark.case.mask() if benchmark.case.mask else None
    if mask is not None:
        ranges = mask.normal_form(1, 1, length, length, "cpu").ranges[0]
        own = torch.arange(length)
        if kind_of(benchmark) == "documents":  # the first row of a causal document sees itself alone
            firsts = [*own[ranges[:, 0] == own].tolist(), length]
            lengths = [following - first for first, following in itertools.pairwise(firsts)]
        elif kind_of(benchmark) == "window":
            left = int((own - ranges[:, 0]).max())
    return prefill(
        lengths, heads, qk_dim, v_dim, level, rates, causal=mask is not None, left=left,
        sixteen_bit=benchmark.dtype != FLOAT,
    )  # fmt: skip

"""The thresholds that `scripts/tune-cpu` measures: values to try, and the problems that each decides on.

The first problems of a threshold lie where its values differ; the last ones are near them, and show what a value costs
beside its purpose.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, chain, product
from typing import Any, NamedTuple

import torch

from undivided import masks
from undivided.benchmarking.catalogue.benchmark import BFLOAT, FLOAT, HALF, Benchmark
from undivided.benchmarking.catalogue.cpu import packed_documents
from undivided.verification.case import Case

KIB = 1 << 10
_CHUNK_BYTES = (64 * KIB, 128 * KIB, 256 * KIB, 512 * KIB)
_CHUNK_KEYS = (256, 512, 1024, 2048)
_PARALLEL = (1 << 16, 1 << 17, 1 << 18, 1 << 19)


class Threshold(NamedTuple):
    """A value of tuning.h or tuning_levels.h.

    name: a field of Tuning, or a constant, whose own field follows a dot. decides: what, in words. values: to try.
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
    window: int = 0,
    **rest: Any,
) -> Iterator[Benchmark]:
    """Sequences with as many keys as queries. window: keys that a row sees, its own included; 0: all."""
    for length, width, dtype in product(lengths, widths, dtypes):
        name = f"{length}-d{width}-h{heads}" + "-causal" * causal + "-backward" * bool(rest.get("backward"))
        mask = masks.causal if causal else functools.partial(masks.window, window - 1, 0) if window else None
        yield _problem(f"{name}-window{window}" if window else name, dtype, q_len=length, heads=heads, qk_dim=width,
                       mask=mask, **rest)  # fmt: skip


def _documents(*lengths: tuple[int, int], dtypes: tuple[torch.dtype, ...] = (FLOAT, BFLOAT)) -> Iterator[Benchmark]:
    """Packs of 8192 tokens: causal documents of random lengths between two."""
    for (shortest, longest), dtype in product(lengths, dtypes):
        mask = functools.partial(packed_documents, shortest, longest)
        yield _problem(f"documents-{shortest}-{longest}", dtype, layout="thd", q_len=8192, heads=8, mask=mask)


def _sequences(
    new: tuple[int, int], earlier: tuple[int, int], heads: int = 8, kv_heads: int = 8, window: int | None = None
) -> Iterator[Benchmark]:
    """Packs of 64 sequences with random numbers of new and of earlier tokens. Causal, or a window."""
    draw = random.Random(0)
    counts = [(draw.randint(*new), draw.randint(*earlier)) for _ in range(64)]
    rows, keys = [0, *accumulate(n for n, _ in counts)], [0, *accumulate(n + past for n, past in counts)]
    mask = masks.documents(rows, keys) & masks.window(window, 0, "bottom_right")
    name = f"sequences-{new[0]}-{new[1]}-after-{earlier[0]}-{earlier[1]}-h{heads}-{kv_heads}"
    name += "" if window is None else f"-window-{window}"
    for dtype in BOTH:
        yield _problem(name, dtype, layout="thd", q_len=rows[-1], kv_len=keys[-1], heads=heads, kv_heads=kv_heads,
                       mask=lambda: mask)  # fmt: skip


def _decoding(
    batches: tuple[int, ...], keys: int, dtypes: tuple[torch.dtype, ...], heads: int = 32, **rest: Any
) -> Iterator[Benchmark]:
    """One query per sequence, 32 heads on 8 unless given."""
    for batch, dtype in product(batches, dtypes):
        name = f"decode-{keys}-b{batch}-h{heads}" + "".join(f"-{key}{value}" for key, value in rest.items())
        yield _problem(name, dtype, reads=True, batch=batch, q_len=1, kv_len=keys, heads=heads, kv_heads=8, **rest)


BOTH = (FLOAT, BFLOAT)
_LONG = (*_squares((2048,), BOTH, (64, 128)), *_squares((2048,), BOTH, causal=True))


def _token_heads(problem: Benchmark) -> Benchmark:
    """The same problem with the heads of a token side by side, so that a row's stride is heads times as large."""
    return replace(problem, case=replace(problem.case, name=f"{problem.case.name}-bshd", layout="bshd"))


def _invariant(problem: Benchmark) -> Benchmark:
    """The same problem with results that do not depend on the batch, heads of a token side by side."""
    return replace(_token_heads(problem), batch_invariant=True)


AMX, DOT, AVX512 = ("amx_bf16", "amx"), ("avx512_bf16",), ("avx512", "avx512_bf16")

PREFILL = (
    Threshold("rows_32", "query rows of a block, fp32", (192, 288, 384, 576, 1024), tuple(_squares(
        (512, 2048), (FLOAT,), (64, 128)))),
    Threshold("rows_16", "query rows of a block, 16-bit types", (192, 384, 512, 768, 1024), tuple(_squares(
        (512, 2048), (BFLOAT,), (64, 128)))),
    Threshold("block_bytes", "Q and O of a block, wide heads", (320 * KIB, 640 * KIB, 1100 * KIB), tuple(_squares(
        (1024,), BOTH, (192, 256)))),
    Threshold("packing_rows", "cost of packing keys, in rows", (2, 5, 16, 48), tuple(_squares(
        (256, 512, 1024), BOTH, heads=1)), threads=0),
    Threshold("block_keys", "keys of a key block", (128, 192, 256, 384), _LONG),
    Threshold("kMaxNarrowBytes", "packed keys and values of a narrow block", (512 * KIB, 1024 * KIB, 2048 * KIB), (
        *_squares((1024, 2048), BOTH), *_squares((2048,), BOTH, causal=True))),
    Threshold("max_row_bytes", "keys of a narrow block's longest row", (256 * KIB, 512 * KIB, 1024 * KIB), (
        *_squares((256, 512, 1024), BOTH), *_squares((512, 1024), BOTH, causal=True))),
    Threshold("kMinFarStride", "stride of the keys from which on they are copied", (1024, 2048, 4096, 8192), tuple(
        map(_token_heads, (*_squares((2048,), BOTH, (64, 128)), *_squares((512,), BOTH, heads=8))))),
    Threshold("kPrefetchTerms", "terms of a sum between two prefetches", (16, 32, 64, 128), (
        *_squares((512, 2048), BOTH, heads=2),
        *map(_token_heads, _squares((32,), BOTH, heads=8, batch=8, kv_len=4096)))),
    Threshold("min_copy_panels", "panels from which on such keys are copied", (1, 2, 3, 4, 6, 8), tuple(
        map(_token_heads, (*_squares((48, 96, 256, 512), BOTH, heads=32),
                           *_squares((512,), BOTH, heads=32, causal=True))))),
    Threshold("min_copy_panels_of_v", "panels from which on such values are copied", (1, 2, 3, 4, 6), tuple(
        map(_token_heads, (*_squares((48, 96, 256, 512), (FLOAT,), heads=32),
                           *_squares((512,), (FLOAT,), heads=32, causal=True))))),
    Threshold("two_panel_bytes", "keys and values from which on two panels are enough",
              (2048 * KIB, 8192 * KIB, 32768 * KIB, 1 << 50), tuple(
        map(_token_heads, (*_squares((24, 48), (FLOAT,), heads=8, kv_len=512),
                           *_squares((24, 48), (FLOAT,), heads=8, kv_len=4096))))),
    Threshold("kMaxPrefetchRows", "rows of the next head that are prefetched", (0, 16, 32, 64), tuple(
        _squares((16, 64, 128), BOTH, heads=96))),
    Threshold("max_row_major_keys", "keys of rows that the second product takes row by row", (0, 64, 128, 192), tuple(
        _squares((48, 96, 128, 160, 192), (FLOAT,), (64, 128), heads=32, causal=True)), levels=AVX512),
    Threshold("kMaxRowMajorBytes", "values of such a row", (16 * KIB, 32 * KIB, 64 * KIB), tuple(
        _squares((64, 96, 128), (FLOAT,), (64, 128, 256), heads=32)), levels=AVX512),
    Threshold("kShareHeadsBelow", "rows below which the heads of a group share a block", (16, 64, 128), tuple(
        _squares((24, 48, 96), BOTH, heads=32, kv_heads=8, kv_len=1024))),
    Threshold("kMinKeysPerSplit", "keys of a split, if rows are few", (512, 1024, 2048), tuple(
        _squares((32, 64), BOTH, heads=1, kv_len=8192)), threads=0),
    Threshold("kMaxSplitKeys", "keys of a split, if they are far apart", (1024, 2048, 4096, 8192, 1 << 40), tuple(
        map(_token_heads, (*_squares((32,), BOTH, (64, 128), heads=8, batch=4, kv_len=32768),
                           *_squares((32, 128), BOTH, heads=8, batch=4, kv_len=8192))))),
    Threshold("kMaxSplitRows", "rows up to which such splits are limited", (32, 64, 128, 256, 512), tuple(
        map(_token_heads, (*_squares((64, 96, 128, 192, 256, 512), BOTH, heads=8, batch=4, kv_len=32768),
                           *_squares((128,), BOTH, heads=8, batch=4, kv_len=8192))))),
    Threshold("kMinDecodeKeys", "keys of an average row of a document that is decoded", (4, 8, 16, 32, 64), (
        *_sequences((1, 1), (3, 63)), *_sequences((1, 1), (3, 63), heads=32), *_sequences((1, 4), (0, 15)),
        *_documents((1, 4), (2, 8), (4, 16)))),
    Threshold("kMinDocumentBlockRows", "rows of a document with blocks of its own", (32, 64, 128), tuple(
        _documents((16, 64), (32, 128), (64, 256)))),
    Threshold("kMinDocumentBlockKeys", "keys of an average row of such a document", (32, 64, 128, 256), (
        *_sequences((24, 63), (16, 63)), *_sequences((24, 63), (64, 255)), *_sequences((24, 63), (64, 255), 1, 1),
        *_documents((128, 512)))),
    Threshold("kMinGroupBlockPairs", "pairs of such a document, if heads share keys", (16, 64, 256, 1 << 40), (
        *_sequences((1, 4), (0, 0), 2, 1), *_sequences((2, 8), (0, 0), 2, 1), *_sequences((1, 4), (0, 0), 32),
        *_sequences((2, 8), (0, 0), 32), *_sequences((8, 32), (0, 0), 32), *_sequences((8, 63), (16, 63), 32))),
    Threshold("kMinSmallBlockPairs", "pairs of such a document, if it is a small head", (32, 128, 512, 1 << 40), (
        *_sequences((2, 8), (0, 0)), *_sequences((2, 8), (4, 12)), *_sequences((4, 15), (0, 12)),
        *_sequences((4, 15), (0, 12), 1, 1))),
    Threshold("kMinDocumentGap", "unseen keys between documents that run alone", (1, 16, 64, 1 << 40), tuple(
        chain.from_iterable(_sequences(new, earlier, window=3) for new in ((1, 1), (4, 8), (16, 32))
                            for earlier in ((4, 8), (12, 24), (100, 200))))),
)  # fmt: skip
SMALL = (
    Threshold("max_small_forward_32", "rows and keys of the small forward, fp32", (8, 16, 32, 48), tuple(
        _squares((4, 12, 16, 24, 32, 48), (FLOAT,), (64,), heads=128))),
    Threshold("max_small_forward_bf16", "rows and keys of the small forward, bf16", (8, 16, 24, 32), tuple(
        _squares((4, 12, 16, 24, 32), (BFLOAT,), (64,), heads=128))),
    Threshold("max_small_forward_fp16", "rows and keys of the small forward, fp16", (8, 16, 24, 32), tuple(
        _squares((4, 12, 16, 24, 32), (HALF,), (64,), heads=128))),
    Threshold("kMaxSmallBackward", "rows and keys of the small backward", (32, 64, 96, 128), tuple(
        _squares((24, 48, 64, 96, 128), (FLOAT,), (64,), heads=32, backward=True))),
    Threshold("max_small_backward_bf16", "rows and keys of the small backward, dot products", (16, 32, 64, 128), tuple(
        _squares((12, 24, 32, 64, 96), (BFLOAT,), (64,), heads=32, backward=True)), levels=(*DOT, *AMX)),
)  # fmt: skip
DECODING = (
    Threshold("kDecodeStepKeys", "keys of a step of decoding", (16, 32, 64, 128), tuple(
        _decoding((1, 8), 4096, BOTH))),
    *(Threshold(name, "keys and values of all heads of a step", (64 * KIB, 128 * KIB, 256 * KIB), tuple(
        map(_token_heads, _decoding((1, 8), 4096, BOTH)))) for name in ("decode_step_bytes", "decode_step_bytes_zen5")),
    *(Threshold(name, "the cache that keys are prefetched to, 3 is L1", (2, 3), tuple(
        map(_token_heads, _decoding((1, 8), 16384, BOTH)))) for name in ("decode_prefetch", "decode_prefetch_zen5")),
    Threshold("max_decode_rows", "rows per key head that are decoded", (8, 12, 16, 20, 24), tuple(
        _token_heads(problem) for heads in (72, 96, 128, 160, 192) for problem in _decoding((4,), 4096, BOTH, heads)),
        levels=("avx2", *AVX512, *AMX)),
    *(Threshold(name, "rows of a panel that is not decoded", (9, 13, 32), tuple(
        _token_heads(problem) for heads in (80, 104, 128) for problem in _decoding((4,), 4096, BOTH, heads)),
        levels=AVX512) for name in ("full_panel_rows", "full_panel_rows_zen4", "full_panel_rows_zen5")),
    *(Threshold(name, "keys from which on more than 8 rows are decoded", (1, 33, 64, 128, 256), tuple(
        _token_heads(problem) for keys in (48, 96, 192) for problem in _decoding((16,), keys, BOTH, 96)),
        levels=("avx2", *AVX512, *AMX)) for name in
        ("min_keys_of_many_rows", "min_keys_of_many_rows_16", "min_keys_of_many_rows_zen5")),
    Threshold("kMinKeysOfTwoPasses", "keys from which on more rows than a tile has are decoded",
        (512, 1024, 2048, 4096, 8192), tuple(_token_heads(problem) for keys in (768, 1536, 3072, 6144)
        for problem in _decoding((4,), keys, (BFLOAT,), 256)), levels=AMX),
    *(Threshold(name, "rows from which on bf16 is decoded by dot products", (2, 3, 5, 9), tuple(
        problem for heads in (16, 32, 64) for problem in _decoding((1,), 16384, (BFLOAT,), heads)),
        levels=(*DOT, *AMX)) for name in ("min_dot_rows", "min_dot_rows_zen4")),
    Threshold("kOneHead.min_bytes", "keys and values of a chunk of decoding", _CHUNK_BYTES, tuple(
        _decoding((1, 4), 4096, BOTH)), threads=0),
    Threshold("kOneHead.max_keys", "keys of a chunk of decoding", _CHUNK_KEYS, tuple(
        _decoding((1, 4), 16384, BOTH)), threads=0),
    Threshold("kAllHeads.min_bytes", "keys and values of a chunk of all heads", _CHUNK_BYTES, tuple(
        map(_token_heads, _decoding((1, 4), 4096, BOTH))), threads=0),
    Threshold("kAllHeads.max_keys", "keys of a chunk of all heads", _CHUNK_KEYS, tuple(
        map(_token_heads, _decoding((1, 4), 16384, BOTH))), threads=0),
    Threshold("kInvariantKeyBytes", "keys of a step, batch invariant", (16 * KIB, 32 * KIB, 64 * KIB), tuple(
        map(_invariant, _decoding((1, 16), 3072, BOTH)))),
    Threshold("kInvariantValueBytes", "values of a step, batch invariant", (8 * KIB, 16 * KIB, 32 * KIB), tuple(
        map(_invariant, _decoding((1, 16), 3072, BOTH)))),
    Threshold("kMinUnitBytes", "keys that are decoded as with batch invariance", (8 << 20, 24 << 20, 1 << 40), tuple(
        map(_token_heads, _decoding((1, 8, 32), 2048, BOTH, 8))), levels=AVX512),
    *(Threshold(name, "rows per key head of such keys, bf16", (0, 1, 2, 4), tuple(
        _token_heads(problem) for heads in (8, 16, 32) for problem in _decoding((16,), 3072, (BFLOAT,), heads)),
        levels=DOT) for name in ("max_unit_rows", "max_unit_rows_zen5")),
)  # fmt: skip
GRADIENTS = (
    Threshold("backward_rows", "query rows of a block of gradients", (64, 128, 192, 256), tuple(
        _squares((2048,), BOTH, (64, 128), backward=True))),
    Threshold("backward_rows_three_parts", "query rows of a block of gradients, three parts", (64, 128, 256), tuple(
        _squares((2048,), (FLOAT,), (64, 128), backward=True)), levels=("amx_bf16",)),
    Threshold("kMaxUnitKeys", "keys of a unit of gradients", (256, 512, 768, 1024), tuple(
        _squares((2048,), BOTH, (64, 128), backward=True))),
    Threshold("kKeyUnitBytes", "bytes of such a unit", (256 * KIB, 512 * KIB, 1024 * KIB), tuple(
        _squares((2048,), BOTH, (128, 256), backward=True))),
    Threshold("kMinBackwardRows", "query rows of a block of gradients, if heads are few", (32, 64, 128), tuple(
        _squares((256, 512), BOTH, heads=1, backward=True)), threads=0),
)  # fmt: skip
THREADS = (
    Threshold("kMinParallelWork", "multiply-adds from which on several threads work", _PARALLEL, tuple(
        _squares((8, 12, 16, 24, 32), (FLOAT,), (64,), heads=8)), threads=0),
    Threshold("kHeadWork", "multiply-adds that a head counts for beside its own", (1 << 10, 1 << 12, 1 << 14), tuple(
        _squares((1, 2, 4), (FLOAT,), (64,), heads=64)), threads=0),
)  # fmt: skip
ON_TILES = (
    Threshold("kMaxShortKeys", "keys of rows that take the path of few keys", (512, 768, 1024), tuple(
        _squares((512, 768, 1024), BOTH, causal=True)), levels=AMX),
    Threshold("kMaxShortKeysUnmasked", "the same without a mask, 16-bit types", (128, 256, 384), tuple(
        _squares((192, 256, 320, 384), (BFLOAT,))), levels=AMX),
    Threshold("kMaxShortKeysUnmasked32", "the same without a mask, fp32", (256, 512, 768), tuple(
        _squares((384, 512, 640), (FLOAT,))), levels=AMX),
    Threshold("kShortBlockRows", "rows of a block of that path", (1024, 2048, 8192), (
        *_documents((16, 128), (64, 512)), *_squares((8192,), BOTH, window=256)), levels=AMX),
    Threshold("kMinStreamedBytes", "results that are written past the caches", (8 << 20, 16 << 20, 1 << 40), tuple(
        _documents((16, 128), (64, 512))), levels=AMX),
    Threshold("kMinRowsTwoFloat16.rows", "rows for which fp32 is split in two", (16, 32, 64), tuple(
        _squares((16, 32, 48, 64), (FLOAT,), (64, 128), heads=32)), levels=("amx",)),
    Threshold("kMinRowsThreeBFloat16.rows", "rows for which fp32 is split in three", (64, 112, 128), tuple(
        _squares((96, 112, 128), (FLOAT,), (64, 128), heads=32)), levels=("amx_bf16",)),
    Threshold("kMinRowsTwoBFloat16.rows", "rows for which fp16 is split in two", (16, 32, 64), tuple(
        _squares((16, 32, 64), (HALF,), (64, 128), heads=32)), levels=("amx_bf16",)),
    Threshold("kMinSplitGradients", "rows and keys for which gradients are split", (48, 64, 96, 128), tuple(
        _squares((48, 64, 96, 128), (FLOAT,), (64, 128), heads=32, backward=True)), levels=AMX),
    Threshold("kMaxUnsplitKeys", "keys of fp32 rows that take vectors", (31, 63, 127), tuple(
        _squares((2048,), (FLOAT,), window=64)), levels=AMX),
    Threshold("kMaxUnsplitDocumentKeys", "the same in documents", (63, 95, 127), tuple(
        _documents((32, 64), (64, 128), dtypes=(FLOAT,))), levels=AMX),
    Threshold("kMaxSmallBackwardAmx16", "tokens of the small backward, 16-bit types", (16, 24, 32), tuple(
        _squares((12, 16, 24, 32), (BFLOAT,), (64, 128), heads=32, backward=True)), levels=AMX),
    Threshold("kMinAmxBackward32", "tokens from which on tiles compute gradients of fp32", (64, 96, 112, 128), tuple(
        _squares((64, 96, 112, 128), (FLOAT,), (64, 128), heads=32, backward=True)), levels=("amx",)),
)  # fmt: skip
THRESHOLDS = (*PREFILL, *SMALL, *DECODING, *GRADIENTS, *THREADS, *ON_TILES)
BY_NAME = {one.name: one for one in THRESHOLDS}

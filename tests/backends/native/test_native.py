"""The native kernel: every instruction set, every thread count, and a missing library.

`test_backends.py` tests attention for every backend. This file tests what only this backend has: tiles and panels, odd
sizes at their edges, instruction-set levels, and threads.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable

import levels
import pytest
import torch
from torch import Tensor

import undivided
from undivided import NoBackendError, masks
from undivided.backends.native import call
from undivided.kernels import cpu
from undivided.masks import Mask

LIBRARY = cpu.load()
LEVELS = levels.here()
needs_library = pytest.mark.skipif(isinstance(LIBRARY, str), reason="the native kernel is not built")

# Largest relative errors of the norm: fp32 a few roundings; bf16 and fp16 one rounding of the result (2^-9, 2^-12 at
# most, about 0.6 of that on average), for bf16 dot products one of the weights besides.
ALLOWED = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}


def oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor,
    score: Callable[[Tensor], Tensor] | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of [B, H, S, D] in fp64, by the definition; keys that no row attends to may be NaN."""
    q, k, v = (t.double() for t in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    used = allowed.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2]).any(-2).unsqueeze(-1)
    k, v = torch.where(used, k, 0.0), torch.where(used, v, 0.0)
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = (scores if score is None else score(scores)).masked_fill(~allowed, -math.inf)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1))
    return weights @ v, lse


def apart(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm().clamp_min(1e-30))


def check(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, **arguments: object) -> None:
    """bhsd against the oracle, output and log-sum-exp."""
    out, lse = undivided.attention(  # type: ignore[call-overload]
        q, k, v, layout="bhsd", mask=mask, backend="native", return_lse=True, **arguments
    )
    sizes = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    allowed = torch.ones(sizes, dtype=torch.bool) if mask is None else mask.to_dense(*sizes)
    want, want_lse = oracle(q, k, v, allowed, scale=arguments.get("scale"))  # type: ignore[arg-type]
    assert apart(out, want) < ALLOWED[q.dtype]
    assert torch.equal(lse == -math.inf, want_lse == -math.inf)
    seen = want_lse > -math.inf
    assert not seen.any() or float(((lse.double() - want_lse).abs() / (1 + want_lse.abs()))[seen].max()) < 2e-6


# (B, H, N, Sq, Sk, Dk, Dv): a single number, odd everything, whole tiles, several blocks, grouped heads, few rows
SIZES = {
    "one": (1, 1, 1, 1, 1, 1, 1),
    "odd": (2, 4, 2, 37, 53, 17, 9),
    "tiles": (1, 2, 2, 256, 256, 64, 64),
    "blocks": (1, 1, 1, 1100, 700, 32, 32),
    "one-short-of-a-tile": (1, 2, 1, 127, 129, 80, 80),
    "values-narrower": (1, 4, 2, 65, 257, 192, 128),
    "decode": (2, 8, 2, 1, 1000, 64, 64),
    "decode-four-rows": (1, 2, 1, 4, 300, 128, 64),
    "decode-odd-group": (1, 6, 2, 1, 77, 64, 32),
    "few-rows-odd-head": (1, 8, 2, 3, 140, 24, 40),
    "few": (2, 4, 2, 7, 13, 64, 80),
    "few-and-wide": (1, 2, 2, 16, 16, 256, 128),
    "few-keys": (2, 6, 3, 5, 4, 32, 48),
    "few-rows": (1, 4, 1, 2, 32, 128, 16),
    "one-key": (2, 2, 1, 3, 1, 32, 32),
}
MASKS: dict[str, Callable[[int, int], Mask | None]] = {
    "full": lambda q, k: None,
    "causal": lambda q, k: masks.causal("bottom_right"),
    "top-left": lambda q, k: masks.causal("top_left"),
    "window": lambda q, k: masks.window(20, 3, "bottom_right"),
    "globals": lambda q, k: masks.window(9, 0, "bottom_right") | masks.prefix(3),
    "dense": lambda q, k: masks.dense(torch.rand(q, k) > 0.7),
    "predicate": lambda q, k: masks.predicate(lambda b, h, i, j: (i + j + h) % 3 != 0),
}


@needs_library
@pytest.mark.parametrize("dtype", ALLOWED, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("size", SIZES)
def test_odd_sizes_and_tile_edges(size: str, mask: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    b, h, n, q_len, kv_len, dk, dv = SIZES[size]
    q = torch.randn(b, h, q_len, dk).to(dtype)
    k, v = torch.randn(b, n, kv_len, dk).to(dtype), torch.randn(b, n, kv_len, dv).to(dtype)
    check(q, k, v, MASKS[mask](q_len, kv_len))


@needs_library
@pytest.mark.parametrize("level", LEVELS)
def test_every_level_of_this_machine(level: str) -> None:
    """A level that it lacks is refused: test_native_library.py."""
    program = (
        f"import sys; sys.path[:0] = {sys.path!r}\n"
        "import test_native as t\n"
        "from undivided.kernels import cpu\n"
        f"assert cpu.load().level == {level!r}\n"
        "for size in t.SIZES:\n"
        "  for mask in ('full', 'causal', 'globals', 'dense'):\n"
        "    for dtype in t.ALLOWED:\n"
        "      t.test_odd_sizes_and_tile_edges(size, mask, dtype)\n"
        "for dtype in t.ALLOWED:\n"
        "  t.test_packed_documents('before', dtype)\n"
        "  t.test_packed_documents('ten-around', dtype)\n"
        "  for q_len in (40, 3, 1):\n"
        "    for value in (t.math.nan, t.math.inf):\n"
        "      t.test_non_finite_values_stay_in_their_column_or_row(q_len, dtype, value)\n"
        "t.test_early_and_late_keys_have_equal_weight_among_many()\n"
        "for case in t.DROPPED:\n"
        "  for dtype in t.ALLOWED:\n"
        "    with t.pytest.MonkeyPatch.context() as patch:\n"
        "      t.test_dropout_drops_what_the_reference_drops(case, dtype, patch)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {"UNDIVIDED_ISA": level}, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr


# Batch, heads, key/value heads, query and key length: more units than threads, fewer, and one head that is cut for
# them.
SHARED: dict[str, tuple[int, int, int, int, int]] = {
    "prefill": (2, 4, 2, 700, 3000),
    "window": (2, 4, 2, 700, 3000),
    "one-head": (1, 1, 1, 300, 900),
    "short-heads": (5, 18, 9, 12, 20),
    "decode": (2, 4, 2, 1, 3000),
    "decode-bshd": (2, 4, 2, 1, 3000),
}


@needs_library
@pytest.mark.parametrize("dtype", ALLOWED, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("case", SHARED)
def test_the_result_does_not_depend_on_the_number_of_threads(case: str, dtype: torch.dtype) -> None:
    batch, heads, kv_heads, q_len, kv_len = SHARED[case]
    mask = masks.window(100, 7, "bottom_right") if case == "window" else masks.causal("bottom_right")
    q = torch.randn(batch, heads, q_len, 64).to(dtype)
    k, v = (torch.randn(batch, kv_heads, kv_len, 64).to(dtype) for _ in range(2))
    layout = "bshd" if case == "decode-bshd" else "bhsd"
    if layout == "bshd":
        q, k, v = (t.transpose(1, 2).contiguous() for t in (q, k, v))
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 16):
            torch.set_num_threads(threads)
            results.append(undivided.attention(q, k, v, layout=layout, mask=mask, backend="native", return_lse=True))
    finally:
        torch.set_num_threads(before)
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


def packed_lengths() -> list[int]:
    """Offsets of documents that end anywhere within a panel of rows and a tile of keys; some are shorter than a vector,
    and one has more keys than AMX processes at once."""
    draw = torch.Generator().manual_seed(0)
    lengths = [int(torch.randint(1, most, (), generator=draw)) for _ in range(5) for most in (4, 12, 40, 90, 260)]
    lengths.insert(9, 530)
    return [0, *torch.tensor(lengths).cumsum(0).tolist()]


@needs_library
@pytest.mark.parametrize("dtype", ALLOWED, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("seen", ["before", "all", "before-and-the-first-five", "ten-around"])
def test_packed_documents(seen: str, dtype: torch.dtype) -> None:
    """Rows of a document are computed in the same steps wherever their block begins, so the number of threads does not
    matter."""
    torch.manual_seed(0)
    offsets = packed_lengths()
    mask = masks.documents(offsets) if seen == "all" else masks.documents(offsets) & masks.causal()
    if seen == "ten-around":  # where rows of a document begin to see other first keys than the rows beside them
        mask = masks.documents(offsets) & masks.window(5, 4)
    if seen == "before-and-the-first-five":
        mask = (masks.causal() | masks.prefix(5)) & masks.documents(offsets)
    q, k, v = (torch.randn(1, heads, offsets[-1], 64).to(dtype) for heads in (4, 2, 2))
    q = q * 4  # largest scores then keep changing
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(undivided.attention(q, k, v, layout="bhsd", mask=mask, backend="native", return_lse=True))
    finally:
        torch.set_num_threads(before)
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])
    check(q, k, v, mask)


FEW_AND_MORE = (200, 800)  # keys that AMX takes all at once, and tile by tile


@needs_library
@pytest.mark.parametrize(
    ("which", "number"),
    [(which, number) for which in range(3) for number in (255.5, 1e-35, math.inf, -math.inf, math.nan)]
    + [(2, 3e38), (2, 1e31), (2, 1e5)],
    ids=lambda x: "qkv"[x] if isinstance(x, int) else str(x),
)
@pytest.mark.parametrize("length", FEW_AND_MORE, ids="{}-keys".format)
def test_numbers_of_any_size(length: int, which: int, number: float) -> None:
    """fp32 may be computed as sums of two halves; numbers beyond their range are just as exact, for any number of
    threads."""
    torch.manual_seed(0)
    tensors = [torch.randn(1, 2, length, 64) for _ in range(3)]
    tensors[which][0, 1, 7, 5] = number
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(undivided.attention(*tensors, layout="bhsd", backend="native"))
    finally:
        torch.set_num_threads(before)
    for out in results[1:]:
        torch.testing.assert_close(out, results[0], rtol=0, atol=0, equal_nan=True)
    want = undivided.attention(*tensors, layout="bhsd", backend="reference")
    scores = (tensors[0] @ tensors[1].mT).nan_to_num(0, 0, 0) * 64**-0.5
    allowed = max(2e-6, 2**-24 * float(scores.abs().max()))  # a weight is as exact as its score
    torch.testing.assert_close(results[0], want, rtol=1e-5, atol=allowed, equal_nan=True)


@needs_library
@pytest.mark.parametrize("dtype", ALLOWED, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("rows", [1, 4, 40, 300], ids="{}-rows".format)
@pytest.mark.parametrize("mask", [None, masks.causal("bottom_right"), masks.lengths([280])], ids=str)
def test_a_nan_query_is_not_treated_as_a_row_without_keys(mask: Mask | None, rows: int, dtype: torch.dtype) -> None:
    """A NaN query has no largest score, like a row without keys; but its result must be NaN, and only its result."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, length, 64).to(dtype) for heads, length in ((4, rows), (1, 300), (1, 300)))
    q[0, 2, rows // 2, 9] = math.nan
    out, lse = undivided.attention(q, k, v, layout="bhsd", mask=mask, backend="native", return_lse=True)
    spoiled = torch.zeros(1, 4, rows, dtype=torch.bool)
    spoiled[0, 2, rows // 2] = True
    assert torch.equal(out.isnan(), spoiled.unsqueeze(-1).expand_as(out))
    assert torch.equal(lse.isnan(), spoiled)


# From what two fp16 have the range for to what only fp32 has.
SCALES = [
    (1, 1),
    (2.0**5, 2.0**5),
    (2.0**-5, 2.0**-8),
    (2.0**-7, 2.0**-11),
    (2.0**30, 2.0**-60),
    (2.0**-30, 2.0**60),
    (1e-20, 1e-33),
]


@needs_library
@pytest.mark.parametrize(("of_q", "of_v"), SCALES)
@pytest.mark.parametrize("length", FEW_AND_MORE, ids="{}-keys".format)
def test_numbers_keep_their_precision_at_any_scale(length: int, of_q: float, of_v: float) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, length, 64) for _ in range(3))
    check(q * of_q, k / of_q, v * of_v, None)


@needs_library
@pytest.mark.parametrize("bits", [-3, -7, -10, -14, -40])
@pytest.mark.parametrize("which", range(3), ids=["q", "k", "v"])
@pytest.mark.parametrize("length", FEW_AND_MORE, ids="{}-keys".format)
def test_rows_of_small_numbers_keep_their_precision(length: int, which: int, bits: int) -> None:
    """A document of small numbers is as exact as the others."""
    torch.manual_seed(0)
    tensors = [torch.randn(1, 2, 3 * length, 64) for _ in range(3)]
    tensors[which][:, :, length : 2 * length] *= 2.0**bits
    q, k, v = tensors
    mask = masks.causal() & masks.document_ids(torch.arange(3 * length) // length)
    out = undivided.attention(q, k, v, layout="bhsd", mask=mask, backend="native")
    want, _ = oracle(q, k, v, mask.to_dense(1, 2, 3 * length, 3 * length))
    for document in (slice(start, start + length) for start in range(0, 3 * length, length)):
        assert apart(out[:, :, document], want[:, :, document]) < ALLOWED[q.dtype]


@needs_library
@pytest.mark.parametrize("dtype", ALLOWED, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_a_large_result_is_the_same_as_its_pieces(dtype: torch.dtype) -> None:
    """Results of 16 MiB and more may be written with non-temporal stores."""
    torch.manual_seed(0)
    tokens, some = 16384, 2048
    q, k, v = (torch.randn(tokens, heads, 64).to(dtype) for heads in (8, 1, 1))
    every = masks.causal() & masks.documents([*range(0, tokens + 1, 128)])
    out, lse = undivided.attention(q, k, v, layout="thd", mask=every, backend="native", return_lse=True)
    assert out.nbytes >= 16 << 20
    mask = masks.causal() & masks.documents([*range(0, some + 1, 128)])
    for start in range(0, tokens, some):
        piece = slice(start, start + some)
        want, want_lse = undivided.attention(
            q[piece], k[piece], v[piece], layout="thd", mask=mask, backend="native", return_lse=True
        )
        assert torch.equal(out[piece], want)
        assert torch.equal(lse[..., piece], want_lse)


@needs_library
@pytest.mark.parametrize("dtype", ALLOWED, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_a_document_gives_the_same_bits_next_to_a_longer_one(dtype: torch.dtype) -> None:
    """The code path is chosen per document: a long one in the sequence does not affect the others."""
    torch.manual_seed(0)
    short = 384  # whole tiles of keys on every level
    q, k, v = (torch.randn(4 * short, heads, 64).to(dtype) for heads in (4, 2, 2))
    packed = undivided.attention(
        q, k, v, layout="thd", backend="native", mask=masks.documents([0, short, 3 * short, 4 * short]) & masks.causal()
    )
    rows = torch.cat([torch.arange(short), torch.arange(3 * short, 4 * short)])
    alone = undivided.attention(
        q[rows],
        k[rows],
        v[rows],
        layout="thd",
        backend="native",
        mask=masks.documents([0, short, 2 * short]) & masks.causal(),
    )
    assert torch.equal(packed[rows], alone)


@needs_library
@pytest.mark.parametrize("dtype", ALLOWED, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("q_len", [200, 1])
def test_nan_in_keys_that_no_row_attends_to_is_not_read(q_len: int, dtype: torch.dtype) -> None:
    """Gaps at odd positions, so that a bf16 pair has one used and one unused key; and a fully masked batch element."""
    q = torch.randn(3, 4, q_len, 64).to(dtype)
    k, v = (torch.randn(3, 2, 333, 64).to(dtype) for _ in range(2))
    kept = torch.ones(3, 1, 1, 333, dtype=torch.bool)
    kept[0, ..., 5:8] = kept[0, ..., 101:130] = kept[1, ..., 301:] = kept[1, ..., :7] = kept[2] = False
    poison = ~kept[:, :, 0].unsqueeze(-1).expand_as(k)
    k, v = k.masked_fill(poison, torch.nan), v.masked_fill(poison, torch.nan)
    check(q, k, v, masks.dense(kept))
    lengths = masks.lengths(torch.tensor([333, 294, 0]), kv_start=torch.tensor([0, 7, 0]))
    k[0], v[0] = (t[1].nan_to_num() for t in (k, v))
    check(q, k, v, lengths)


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_between_documents_may_hold_anything(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(64, 2, 32).to(dtype) for _ in range(3))
    mask = masks.documents([0, 5, 12, 40], padded_q=[0, 9, 21, 64]) & masks.causal()
    clean = undivided.attention(q, k, v, layout="thd", mask=mask, backend="native")
    for start, stop in ((5, 9), (16, 21), (49, 64)):
        q[start:stop] = k[start:stop] = v[start:stop] = torch.nan
    out = undivided.attention(q, k, v, layout="thd", mask=mask, backend="native")
    assert torch.equal(out, clean)
    assert not out[5:9].any()


@needs_library
@pytest.mark.parametrize("dtype", ALLOWED, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("second", [9, 100])
def test_nan_of_a_document_stays_in_that_document(second: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(12 + second, 2, 32).to(dtype) for _ in range(3))
    alone = undivided.attention(
        q[12:], k[12:], v[12:], layout="thd", mask=masks.documents([0, second]), backend="native"
    )
    q[:12] = k[:12] = v[:12] = torch.nan
    mask = masks.documents([0, 12, 12 + second])
    packed = undivided.attention(q, k, v, layout="thd", mask=mask, backend="native")
    assert packed[:12].isnan().all()
    assert apart(packed[12:], alone.double()) < ALLOWED[dtype]


@needs_library
def test_early_and_late_keys_have_equal_weight_among_many() -> None:
    # rescaling earlier sums by a 2^0 that is not exactly 1, once per tile, would let the first keys fade
    torch.manual_seed(3)
    q, k, v = (torch.randn(1, 8, n, 16) for n in (256, 8192, 8192))  # so many rows that the keys are not divided
    want, _ = oracle(q, k, v, torch.ones(1, 1, 256, 8192, dtype=torch.bool))
    out = undivided.attention(q, k, v, layout="bhsd", backend="native")
    assert apart(out, want) < 6e-7


@needs_library
def test_a_nan_that_a_row_attends_to_is_returned() -> None:
    q, k, v = (torch.randn(1, 1, 40, 16) for _ in range(3))
    k[0, 0, 39] = torch.nan
    out = undivided.attention(q, k, v, layout="bhsd", mask=masks.causal(), backend="native")
    assert out[0, 0, :39].isfinite().all()
    assert out[0, 0, 39].isnan().all()


@needs_library
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", ALLOWED, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("q_len", [40, 3, 1])
def test_non_finite_values_stay_in_their_column_or_row(q_len: int, dtype: torch.dtype, value: float) -> None:
    """One value of V affects its column and one key of K the rows that attend to it, as in the reference, and nothing
    else."""
    torch.manual_seed(0)
    q = torch.randn(2, 2, q_len, 64).to(dtype).abs()
    k, v = (torch.randn(2, 1, 300, 64).to(dtype) for _ in range(2))
    for column in (6, 33):
        spoiled = v.clone()
        spoiled[0, 0, 130, column] = value
        out = undivided.attention(q, k, spoiled, layout="bhsd", backend="native")
        want, _ = oracle(q, k, spoiled, torch.ones(1, 1, q_len, 300, dtype=torch.bool))
        assert torch.equal(out.isnan(), want.isnan())
        assert torch.equal(out.isinf(), want.isinf())
        assert apart(out.nan_to_num(posinf=0), want.nan_to_num(posinf=0)) < ALLOWED[dtype]
    last = torch.zeros(300)
    last[299] = value
    k[1, 0] = torch.where(last != 0, last, k[1, 0].T).T.to(dtype)
    out = undivided.attention(q, k, v, layout="bhsd", mask=masks.causal("bottom_right"), backend="native")
    assert out[0].isfinite().all()
    assert out[1, :, :-1].isfinite().all()
    assert out[1, :, -1].isnan().all()


@needs_library
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("order", ["rising", "falling", "steep", "one-far-above"])
def test_scores_that_exceed_the_running_maximum(order: str, dtype: torch.dtype) -> None:
    """On AMX the softmax does not update its maximum at every tile: sums are rescaled within a tile, and its weights
    are computed again.

    (In fp32 the rounding of such large scores exceeds the bound in any implementation.)
    """
    torch.manual_seed(0)
    grown = torch.linspace(0, 1, 700)
    level = {
        "rising": 12 * grown,
        "falling": 12 * grown.flip(0),
        "steep": 200 * grown,
        "one-far-above": torch.where(torch.arange(700) == 450, 60.0, 0.0),
    }[order]
    q, k, v = torch.randn(1, 2, 70, 64), torch.randn(1, 2, 700, 64), torch.randn(1, 2, 700, 64)
    q[..., 0], k[..., 0] = 8.0, level
    check(q.to(dtype), k.to(dtype), v.to(dtype), None)
    check(q.to(dtype), k.to(dtype), v.to(dtype), masks.window(300, 20, "bottom_right"))


@needs_library
@pytest.mark.parametrize("dtype", ALLOWED, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("scale", [-0.3, 0.0, 2e-309, 1e-42, 1e-30, 1.0])
@pytest.mark.parametrize("q_len", [70, 1])
def test_any_scale(scale: float, q_len: int, dtype: torch.dtype) -> None:
    q = torch.randn(1, 2, q_len, 64).to(dtype)
    k, v = (torch.randn(1, 1, 131, 64).to(dtype) for _ in range(2))
    check(q, k, v, masks.causal("bottom_right"), scale=scale)


@needs_library
@pytest.mark.parametrize("dtype", ALLOWED, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("q_len", [70, 2])
def test_softcap_sinks_alibi_and_bias_together(q_len: int, dtype: torch.dtype) -> None:
    q = torch.randn(2, 4, q_len, 64).to(dtype)
    k, v = (torch.randn(2, 2, 150, 64).to(dtype) for _ in range(2))
    bias = torch.randn(1, 4, 1, 150).to(dtype)
    bias[..., 3:6] = -math.inf
    sinks, slopes = torch.randn(4), torch.rand(4)
    out = undivided.attention(
        q,
        k,
        v,
        layout="bhsd",
        mask=masks.causal("bottom_right"),
        bias=bias,
        softcap=2.0,
        sinks=sinks,
        alibi_slopes=slopes,
        backend="native",
    )
    i, j = torch.arange(q_len).unsqueeze(1), torch.arange(150)
    distance = (i + 150 - q_len - j).abs()
    allowed = (j <= i + 150 - q_len) & (bias != -math.inf)
    extra = bias.double().masked_fill(bias == -math.inf, 0.0) - slopes.double()[:, None, None] * distance
    want, lse = oracle(q, k, v, allowed, lambda s: 2 * torch.tanh(s / 2) + extra)
    want = want * torch.sigmoid(lse - sinks.double()[:, None]).unsqueeze(-1)
    assert apart(out, want) < ALLOWED[dtype]


@needs_library
def test_softcap_and_sinks_when_decoding() -> None:
    q, k, v = torch.randn(1, 4, 1, 64), torch.randn(1, 2, 500, 64), torch.randn(1, 2, 500, 64)
    sinks = torch.randn(4)
    out = undivided.attention(q, k, v, layout="bhsd", softcap=3.0, sinks=sinks, backend="native")
    want, lse = oracle(q, k, v, torch.ones(1, 4, 1, 500, dtype=torch.bool), lambda s: 3 * torch.tanh(s / 3))
    assert apart(out, want * torch.sigmoid(lse - sinks.double()[:, None]).unsqueeze(-1)) < 1e-6


DROPPED: dict[str, tuple[str, tuple[int, ...], int, Callable[[], Mask | None]]] = {
    # layout, q's shape, keys, mask: odd starts, so that the keys of a counter straddle tiles and bf16 pairs
    "full": ("bhsd", (2, 4, 45, 32), 150, lambda: None),
    "few-rows": ("bhsd", (2, 4, 1, 32), 150, lambda: None),
    "left-padded": (
        "bhsd",
        (2, 4, 45, 32),
        150,
        lambda: masks.lengths([140, 133], kv_start=[5, 17]) & masks.causal("bottom_right"),
    ),
    "documents": ("thd", (150, 4, 32), 150, lambda: masks.documents([0, 5, 12, 113, 150]) & masks.causal()),
    "blocks-of-rows": ("bhsd", (1, 4, 70, 32), 150, lambda: masks.predicate(lambda b, h, i, j: (i + j + h) % 3 != 0)),
}


@needs_library
@pytest.mark.parametrize("dtype", ALLOWED, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("case", DROPPED)
def test_dropout_drops_what_the_reference_drops(case: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the identity as values the output is the weights: zeros are at the same places, the rest is close."""
    monkeypatch.setattr(call, "MASK_PAIRS", 1)
    torch.manual_seed(0)
    layout, shape, keys, mask = DROPPED[case]
    q = torch.randn(shape).to(dtype)
    k = torch.randn(*((keys, 2) if layout == "thd" else (shape[0], 2, keys)), 32).to(dtype)
    v = torch.eye(keys, dtype=dtype)
    v = v[:, None].expand(keys, 2, keys) if layout == "thd" else v.expand(shape[0], 2, keys, keys)
    weights, want = (
        undivided.attention(
            q, k, v, layout=layout, mask=mask(), dropout_p=0.3, dropout_seed=1 << 40 | 77, backend=backend
        )
        for backend in ("native", "reference")
    )  # type: ignore[call-overload]
    assert torch.equal(weights == 0, want == 0)
    assert float((want == 0).float().mean()) > 0.2
    assert apart(weights, want.double()) < ALLOWED[dtype]


@needs_library
def test_dropout_of_everything_gives_zeros() -> None:
    q = torch.randn(1, 2, 40, 16)
    assert not undivided.attention(q, q, q, layout="bhsd", dropout_p=1.0, backend="native").any()


@needs_library
def test_a_mask_evaluated_in_blocks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call, "MASK_PAIRS", 1)
    q, k, v = (torch.randn(2, 2, 100, 16) for _ in range(3))
    ids = torch.randint(0, 3, (2, 100))
    check(q, k, v, masks.document_ids(ids) & masks.causal())


@needs_library
def test_views_are_read_in_place() -> None:
    """q, k, v as slices of one tensor, and heads broadcast by a stride of 0."""
    packed = torch.randn(2, 90, 3, 4, 32)
    q, k, v = (t.transpose(1, 2) for t in packed.unbind(2))
    check(q, k, v, None)
    check(q, k[:, :1].expand(2, 4, 90, 32), v[:, :, ::2][:, :, :45].repeat_interleave(2, 2), None)


# Refusals


@needs_library
@pytest.mark.parametrize("layout", ["bshd", "sbhd", "bhsd"])
def test_calls_of_the_same_sizes_have_strides_of_their_own(layout: str) -> None:
    """A call's strides are remembered with its sizes: a dense call, then views of the same sizes, then a dense one."""
    shape, seed = (1, 3, 1, 16), torch.Generator().manual_seed(0)
    for strides in (None, (7, 96, 5, 1), (3, 16, 999, 1), (1000, 32, 40, 1), None):
        q, k, v = torch.randn(3, *shape, generator=seed)
        if strides is not None:
            q, k, v = (torch.empty(2048).as_strided(shape, strides).copy_(t) for t in (q, k, v))
        got = undivided.attention(q, k, v, layout=layout, backend="native")  # type: ignore[arg-type]
        want = undivided.attention(q, k, v, layout=layout, backend="reference")  # type: ignore[arg-type]
        assert apart(got, want.double()) < ALLOWED[torch.float32]


@needs_library
def test_what_it_refuses() -> None:
    q = torch.randn(1, 8, 2, 16, dtype=torch.float64)
    with pytest.raises(NoBackendError) as caught:
        undivided.attention(q, q, q, layout="bshd", backend="native")
    assert "dtype=float64 (supports bfloat16, float16, float32)" in caught.value.decision.reasons["native"]
    strided = torch.randn(1, 8, 2, 32)[..., ::2]
    with pytest.raises(NoBackendError) as caught:
        undivided.attention(strided, strided, strided, layout="bshd", backend="native")
    wanted = "no support for a last axis whose stride is not 1 (its rows are contiguous)"
    assert wanted in caught.value.decision.reasons["native"]


@needs_library
def test_a_record_of_another_version_is_refused() -> None:
    assert isinstance(LIBRARY, cpu.Library)
    with pytest.raises(RuntimeError, match="another version"):
        LIBRARY.forward(cpu.RECORD.pack(*[0] * len(cpu.FIELDS)))

"""Numbers of any size, NaN and infinities in the native kernel."""

from __future__ import annotations

import math

import levels
import pytest
import torch
from native_oracle import ALLOWED, SCALES, apart, check, needs_library, oracle

import undivided
from undivided import masks
from undivided.masks import Mask

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
@pytest.mark.parametrize(("rows", "batch_invariant"), [(40, False), (40, True), (5, True), (1, True)])
def test_a_score_adds_the_products_of_128_entries_at_a_time(rows: int, batch_invariant: bool) -> None:
    """2^24 + 1 is 2^24 in fp32: a single chain of additions would lose the entries of 1."""
    q, k = torch.ones(1, rows, 1, 256), torch.zeros(1, 200, 1, 256)
    k[0, 0, 0, 0], k[0, 0, 0, 128:] = 2.0**24, 1.0
    for level in levels.here():
        if level.startswith("amx") and not batch_invariant:
            continue  # splits the numbers instead
        with levels.running(level, 1):
            _, lse = undivided.attention(
                q, k, k, layout="bshd", scale=1.0, return_lse=True, backend="native", batch_invariant=batch_invariant
            )
        assert (lse == 2.0**24 + 128).all(), level


@needs_library
@pytest.mark.parametrize("rows", [1, 40], ids="{}-rows".format)
def test_a_weight_counts_down_to_2_to_the_minus_100_of_the_largest(rows: int) -> None:
    """Smaller ones are 0: their products are subnormal numbers, which cost Intel processors 150 cycles each."""
    q, k, v = torch.ones(1, rows, 1, 16), torch.zeros(1, 200, 1, 16), torch.zeros(1, 200, 1, 16)
    for exponent, counts in ((-99, True), (-101, False)):
        k[0, 0, 0, 0], k[0, 1:, 0, 0] = exponent * math.log(2), -math.inf
        k[0, 2, 0, 0] = 0
        v[0, 0] = 2.0**100
        for level in levels.here():
            if level.startswith("amx"):
                continue  # flushes subnormal numbers instead
            with levels.running(level, 1):
                out = undivided.attention(q, k, v, layout="bshd", scale=1.0, backend="native")
            want = torch.full_like(out, 2.0 ** (100 + exponent) if counts else 0.0)
            torch.testing.assert_close(out, want, rtol=1e-4, atol=0, msg=level)


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
    before = torch.ones(length, length, dtype=torch.bool).tril()
    for document in (slice(start, start + length) for start in range(0, 3 * length, length)):
        want, _ = oracle(*(t[:, :, document] for t in (q, k, v)), before)
        assert apart(out[:, :, document], want) < ALLOWED[q.dtype]


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
@pytest.mark.parametrize("level", levels.here())
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 200), (8, 8), (40, 200)], ids=["decode", "small", "prefill"])
def test_a_nan_of_any_bits_stays_nan(q_len: int, kv_len: int, level: str) -> None:
    """exp2 once added the low bits of a NaN to its exponent, and returned a finite number."""
    for bits in (0x7FFFFFFF, -1, 0x7FC00155):
        q, k, v = (torch.randn(1, 1, length, 16) for length in (q_len, kv_len, kv_len))
        q[0, 0, -1, 3] = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
        for softcap in (None, 5.0):
            with levels.running(level, threads=1):
                out, lse = undivided.attention(
                    q, k, v, layout="bhsd", softcap=softcap, backend="native", return_lse=True
                )
            assert out[0, 0, -1].isnan().all()
            assert lse[0, 0, -1].isnan()


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

"""What masks mean to every backend: alignment, windows, ALiBi, sinks, grouped heads and dropout."""

from __future__ import annotations

import pytest
import torch
from brute_force import causal, chunks, either, error, packed, padded, prefix, whole, window
from semantics_inputs import BACKENDS, EXACT, assert_defined, qkv, random
from torch import Tensor

import undivided
from undivided import InputError, masks


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
@pytest.mark.parametrize("sizes", [(3, 5), (5, 3), (1, 4), (4, 4)], ids=["3q-5k", "5q-3k", "decode", "square"])
def test_causal_alignment_of_unequal_lengths(backend: str, align: str, sizes: tuple[int, int]) -> None:
    x = qkv(q_len=sizes[0], kv_len=sizes[1])
    assert_defined(x, masks.causal(align), None, [causal(align)], backend=backend)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
def test_causal_alignment_is_by_real_lengths(backend: str, align: str) -> None:
    mask = masks.causal(align) & masks.lengths([6, 3], [2, 4])  # type: ignore[arg-type]
    places = padded(2, 4, 6, [6, 3], [2, 4])
    assert_defined(qkv(q_len=4, kv_len=6), mask, places, [causal(align)], backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_lengths_of_keys_alone_leave_every_query_row_real(backend: str) -> None:
    mask = masks.causal("bottom_right") & masks.lengths([6, 3])
    places = padded(2, 4, 6, [6, 3])
    assert_defined(qkv(q_len=4, kv_len=6), mask, places, [causal("bottom_right")], backend=backend)


AMBIGUOUS = {
    "unequal-lengths": (4, 6, masks.causal(), "query length 4, key length 6", "write align='top_left'"),
    "window": (4, 6, masks.window(2, 0), "query length 4, key length 6", "in causal, window, chunks or predicate"),
    "chunks": (4, 6, masks.chunks(2), "query length 4, key length 6", "write align='top_left'"),
    "padded-keys-only": (5, 5, masks.causal() & masks.lengths([5, 3]), "lengths with q=None", r"lengths\(n, n\)"),
    "unequal-real-lengths": (
        5,
        5,
        masks.causal() & masks.lengths([5, 3], [5, 2]),
        "lengths with q=other values than kv",
        "write align=",
    ),
    "unequal-documents": (
        5,
        5,
        masks.causal() & masks.documents([0, 2, 5], [0, 3, 5]),
        "cu_seqlens_q and cu_seqlens_kv are different",
        "write align=",
    ),
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_a_missing_alignment_is_an_error_with_a_hint_if_it_matters(name: str) -> None:
    q_len, kv_len, mask, got, hint = AMBIGUOUS[name]
    batch = 1 if "documents" in name else 2
    with pytest.raises(InputError, match=f"align must be given if .*{got}[^H]*\n  HINT: .*{hint}"):
        undivided.attention(*qkv(batch, q_len=q_len, kv_len=kv_len), layout="bhsd", mask=mask)


def test_alibi_needs_an_alignment_too() -> None:
    with pytest.raises(InputError, match="align must be given"):
        undivided.attention(*qkv(q_len=3), layout="bhsd", alibi_slopes=torch.ones(2, dtype=torch.float64))


def test_no_alignment_is_required_if_both_agree() -> None:
    n = torch.tensor([5, 3])
    for mask in (masks.causal(), masks.causal() & masks.lengths(n, n), masks.causal() & masks.lengths([5, 3], [5, 3])):
        places = whole(2, 5, 5) if mask.kinds == {"causal"} else padded(2, 5, 5, [5, 3], [5, 3])
        assert_defined(qkv(), mask, places, [causal()])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
@pytest.mark.parametrize(
    "sides",
    [(2, 1), (0, 0), (1, 0), (0, 2), (3, None), (None, 1), (None, None), (-1, 0), (2, -1)],
    ids=lambda sides: f"left{sides[0]}-right{sides[1]}",
)
def test_windows_include_both_ends(backend: str, align: str, sides: tuple[int | None, int | None]) -> None:
    left, right = (None if side == -1 else side for side in sides)
    mask = masks.window(*sides, align)  # type: ignore[arg-type]
    assert_defined(qkv(q_len=4, kv_len=7), mask, None, [window(left, right, align)], backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
def test_windows_and_chunks_are_aligned_by_real_lengths(backend: str, align: str) -> None:
    places = padded(2, 4, 7, [7, 3], [4, 2], [0, 2], [0, 1])
    real = masks.lengths([7, 3], [4, 2], [0, 2], [0, 1])
    band = masks.window(1, 1, align)  # type: ignore[arg-type]
    assert_defined(qkv(q_len=4, kv_len=7), band & real, places, [window(1, 1, align)], backend=backend)
    blocks = masks.chunks(3, align)  # type: ignore[arg-type]
    assert_defined(qkv(q_len=4, kv_len=7), blocks & real, places, [chunks(3, align)], backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_prefixes_join_causal_and_windows(backend: str) -> None:
    x = qkv(q_len=6, kv_len=6)
    assert_defined(x, masks.causal() | masks.prefix(2), None, [either(causal(), prefix(2))], backend=backend)
    assert_defined(x, masks.window(1, 0) | masks.prefix(2), None, [either(window(1, 0), prefix(2))], backend=backend)
    assert_defined(x, masks.causal() & masks.prefix(2), None, [causal(), prefix(2)], backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
@pytest.mark.parametrize("per_sequence", [False, True], ids=["slopes-H", "slopes-BH"])
def test_alibi_counts_the_distance_from_the_aligned_diagonal(backend: str, align: str, per_sequence: bool) -> None:
    slopes = random(*((2, 2) if per_sequence else (2,)), seed=5).abs()
    x = qkv(q_len=4, kv_len=7)
    everything = masks.window(None, None, align)  # type: ignore[arg-type]
    assert_defined(x, everything, align=align, alibi_slopes=slopes, backend=backend)
    mask = masks.causal(align) & masks.lengths([7, 3], [4, 2], [0, 2], [0, 1])  # type: ignore[arg-type]
    places = padded(2, 4, 7, [7, 3], [4, 2], [0, 2], [0, 1])
    assert_defined(x, mask, places, [causal(align)], align=align, alibi_slopes=slopes, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("per_sequence", [False, True], ids=["slopes-H", "slopes-NH"])
def test_alibi_of_documents_counts_within_each_and_has_a_slope_for_each(backend: str, per_sequence: bool) -> None:
    cu_q, cu_kv = [0, 2, 3, 6], [0, 4, 5, 9]
    slopes = random(*((3, 2) if per_sequence else (2,)), seed=5).abs()
    mask = masks.documents(cu_q, cu_kv) & masks.causal("bottom_right")
    assert_defined(
        qkv(1, q_len=6, kv_len=9),
        mask,
        packed(cu_q, cu_kv),
        [causal("bottom_right")],
        align="bottom_right",
        alibi_slopes=slopes,
        layout="thd",
        backend=backend,
    )


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("backend", ["reference", None])
def test_alibi_of_no_document_has_no_slopes(backend: str | None, compiled: bool) -> None:
    """The padding rows read the slopes of document 0: an IndexError."""

    def attend(q: Tensor, slopes: Tensor) -> Tensor:
        mask = masks.documents(torch.tensor([0]), total_q=3) & masks.causal()
        return undivided.attention(q, q, q, layout="thd", mask=mask, alibi_slopes=slopes, backend=backend)

    q, slopes = torch.randn(3, 2, 8, requires_grad=True), torch.zeros(0, 2, requires_grad=True)
    out = torch.compile(attend, backend="aot_eager")(q, slopes) if compiled else attend(q, slopes)
    for grad in torch.autograd.grad(out.sum(), (q, slopes)):
        assert not grad.any()
    assert not out.any()


def test_sinks_are_only_in_the_denominator_and_off_by_one_is_a_sink_of_zero() -> None:
    x = qkv()
    assert_defined(x, masks.causal(), None, [causal()], sinks=random(2, seed=6))
    scores = torch.exp(x[0] @ x[1].transpose(-1, -2) / 2)
    off_by_one = scores / (1 + scores.sum(-1, keepdim=True))
    assert error(undivided.attention(*x, layout="bhsd", sinks=torch.zeros(2).double()), off_by_one @ x[2]) < EXACT


@pytest.mark.parametrize("sink", [-10.0, 200.0])
def test_small_and_large_sinks_keep_their_gradient(sink: float) -> None:
    assert_defined(qkv(), sinks=torch.full((2,), sink, dtype=torch.float64))


def test_sinks_beyond_all_scores_switch_the_head_off_and_below_all_do_nothing() -> None:
    sinks = torch.tensor([1e4, -1e4], dtype=torch.float64, requires_grad=True)
    out = undivided.attention(*qkv(), layout="bhsd", sinks=sinks)
    assert bool((out[:, 0] == 0).all())
    assert error(out[:, 1], undivided.attention(*qkv(), layout="bhsd")[:, 1]) < EXACT
    assert torch.equal(torch.autograd.grad(out.sum(), sinks)[0], torch.zeros(2, dtype=torch.float64))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("heads", [(4, 2), (4, 1), (6, 3)], ids=["4-over-2", "4-over-1", "6-over-3"])
def test_key_head_h_over_group_serves_query_head_h(backend: str, heads: tuple[int, int]) -> None:
    x = qkv(heads=heads[0], kv_heads=heads[1])
    assert_defined(x, masks.causal(), None, [causal()], backend=backend)
    of_heads = torch.rand(2, heads[0], 5, 5, generator=torch.Generator().manual_seed(0)) < 0.6
    assert_defined(x, masks.dense(of_heads), condition=lambda b, h, i, j: bool(of_heads[b, h, i, j]), backend=backend)


@pytest.mark.parametrize("dims", [(4, 4), (3, 5), (7, 2), (1, 1), (33, 33)], ids=lambda d: f"qk{d[0]}-v{d[1]}")
def test_any_head_sizes_run(dims: tuple[int, int]) -> None:
    assert_defined(qkv(dim=dims[0], v_dim=dims[1], kv_heads=1), masks.causal(), None, [causal()])


@pytest.mark.parametrize("seed", [0, 7, 2**40 + 3], ids=["seed0", "seed7", "seed-over-32-bits"])
def test_dropout_follows_philox(seed: int) -> None:
    assert_defined(qkv(q_len=3, kv_len=19), dropout_p=0.4, dropout_seed=seed)

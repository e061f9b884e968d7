"""The thirteen rules of attention, each compared with the definition in `brute_force`: outputs and gradients.

Everything is compared in float64 unless precision is what the test is about, with errors relative to the result's norm.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import brute_force
import pytest
import torch
import torch.nn.functional as F
from brute_force import Places, Rule, causal, chunks, either, error, packed, padded, prefix, whole, window
from torch import Tensor

import undivided
from undivided import InputError, masks

NAN = math.nan
EXACT = 1e-12
"""Of float64 results: hundreds of roundings of 1e-16, and nothing of float32's 1e-7."""

BACKENDS = ("reference", "torch_flash")
LAYOUTS = ("bhsd", "bshd", "sbhd")
TO_LAYOUT = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3), "sbhd": (2, 0, 1, 3)}
FROM_LAYOUT = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3), "sbhd": (1, 2, 0, 3)}


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64).to(dtype)


def qkv(
    batch: int = 2,
    heads: int = 2,
    q_len: int = 5,
    kv_len: int = 5,
    dim: int = 4,
    kv_heads: int | None = None,
    v_dim: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as [B, H, S, D]."""
    kv_heads = kv_heads or heads
    return (
        random(batch, heads, q_len, dim, seed=1),
        random(batch, kv_heads, kv_len, dim, seed=2),
        random(batch, kv_heads, kv_len, v_dim or dim, seed=3),
    )


def in_layout(tensor: Tensor, layout: str) -> Tensor:
    """[B, H, S, D] as a new contiguous tensor of this layout."""
    if layout == "thd":
        return tensor[0].transpose(0, 1).contiguous()
    return tensor.permute(TO_LAYOUT[layout]).contiguous()


def heads_first(tensor: Tensor, layout: str) -> Tensor:
    return tensor.transpose(0, 1).unsqueeze(0) if layout == "thd" else tensor.permute(FROM_LAYOUT[layout])


def assert_defined(
    tensors: tuple[Tensor, Tensor, Tensor],
    mask: masks.Mask | None = None,
    places: Places | None = None,
    rules: Sequence[Rule] = (),
    *,
    layout: str = "bhsd",
    backend: str = "reference",
    align: str = "top_left",
    condition: brute_force.Condition | None = None,
    tolerance: float = EXACT,
    **features: Tensor | float,
) -> None:
    """Assert that output, log-sum-exp and the gradient of every input equal the definition."""
    leaves = {name: t.clone().requires_grad_() for name, t in zip("qkv", tensors, strict=True)}
    named = {"bias": "bias", "alibi_slopes": "slopes", "sinks": "sinks"}
    fixed = {name: value for name, value in features.items() if name not in named}
    for name in named.keys() & features.keys():
        leaf = features[name]
        assert isinstance(leaf, Tensor)
        leaves[name] = leaf.clone().requires_grad_(backend == "reference")
    extras = {named[name]: leaves[name] for name in named.keys() & features.keys()}
    renamed = {"dropout_seed": "seed"}
    want, want_lse = brute_force.attend(
        leaves["q"],
        leaves["k"],
        leaves["v"],
        places,
        rules,
        condition=condition,
        align=align,
        **extras,
        **{renamed.get(name, name): value for name, value in fixed.items()},  # type: ignore[arg-type]
    )
    with_lse = backend == "reference"  # the flash kernel has no gradient through it
    arguments = {**fixed, **{name: leaves[name] for name in named.keys() & features.keys()}}
    x = [in_layout(leaves[name], layout) for name in "qkv"]
    found = undivided.attention(*x, layout=layout, mask=mask, backend=backend, return_lse=with_lse, **arguments)  # type: ignore[call-overload]
    out, lse = found if with_lse else (found, None)
    out = heads_first(out, layout)
    assert error(out, want) < tolerance, "out"
    cotangent = random(*want.shape, seed=9)
    goal, reached = (want * cotangent).sum(), (out * cotangent).sum()
    if lse is None:
        with torch.no_grad():
            _, alone = undivided.attention(
                *x,
                layout=layout,
                mask=mask,
                backend=backend,
                return_lse=True,
                **arguments,  # type: ignore[call-overload]
            )
        assert error(alone.unsqueeze(0) if layout == "thd" else alone, want_lse) < tolerance, "lse"
    else:
        lse = lse.unsqueeze(0) if layout == "thd" else lse
        assert error(lse, want_lse) < tolerance, "lse"
        some, pull = want_lse > -math.inf, random(*want_lse.shape, seed=8)
        goal = goal + (want_lse[some] * pull[some]).sum()
        reached = reached + (lse[some] * pull[some]).sum()
    wanted = [name for name, leaf in leaves.items() if leaf.requires_grad]
    inputs = [leaves[name] for name in wanted]
    expected = torch.autograd.grad(goal, inputs, allow_unused=True, materialize_grads=True)
    for name, got, grad in zip(wanted, torch.autograd.grad(reached, inputs), expected, strict=True):
        assert error(got, grad) < tolerance * 10, f"gradient of {name}"


# 1. score = scale * (q . k), softcap, ALiBi and bias, mask, softmax with sinks, dropout, @ v


EXTRAS = {
    "scale": 0.7,
    "softcap": 1.5,
    "bias": random(2, 2, 5, 5, seed=4),
    "alibi_slopes": random(2, seed=5).abs(),
    "sinks": random(2, seed=6),
    "dropout": 0.3,
}


@pytest.mark.parametrize("left_out", [None, *EXTRAS], ids=lambda name: f"without-{name}" if name else "all-at-once")
def test_scores_are_scaled_capped_biased_masked_normalised_and_dropped_in_this_order(left_out: str | None) -> None:
    features = {name: value for name, value in EXTRAS.items() if name != left_out}
    if "dropout" in features:
        del features["dropout"]
        features |= {"dropout_p": 0.3, "dropout_seed": 7}
    assert_defined(qkv(), masks.causal(), None, [causal()], **features)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", BACKENDS)
def test_scale_is_one_over_the_root_of_the_query_head_size_unless_given(backend: str) -> None:
    assert_defined(qkv(dim=9), backend=backend)
    assert_defined(qkv(dim=9), backend=backend, scale=0.05)
    assert_defined(qkv(dim=9), backend=backend, scale=-0.5)


def test_the_default_scale_follows_the_head_size_of_keys_not_of_values() -> None:
    assert_defined(qkv(dim=4, v_dim=7))


@pytest.mark.parametrize("backend", BACKENDS)
def test_bias_is_added_unscaled_wherever_it_is_broadcast(backend: str) -> None:
    for shape in ((2, 2, 5, 5), (1, 2, 5, 5), (2, 1, 1, 5), (1, 1, 5, 1), (5, 5), (5,), ()):
        assert_defined(qkv(), backend=backend, bias=random(*shape, seed=4), scale=0.25)


# 2. fp32 accumulation; nothing but the result, and for half types the probabilities, is rounded


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_half_types_round_only_the_probabilities_and_the_result(backend: str, dtype: torch.dtype) -> None:
    x = [random(1, 2, 70, 16, seed=s).mul(3 if s < 3 else 1).to(dtype) for s in (1, 2, 3)]  # sharp rows: scores near 40
    q, k, v = (t.double() for t in x)
    weights = torch.softmax(q @ k.transpose(-1, -2) / 4, -1)
    exact = weights @ v
    permitted = error((weights.to(dtype).double() @ v).to(dtype), exact)
    out = undivided.attention(*x, layout="bhsd", backend=backend)
    assert out.dtype == dtype
    assert error(out, exact) < 1.5 * permitted
    if backend == "reference":
        assert error(out, exact) < 1.05 * error(exact.to(dtype), exact), "the reference rounds the result alone"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
def test_reference_gradients_are_the_exact_ones_rounded_once(dtype: torch.dtype) -> None:
    x = [random(1, 4, 40, 16, seed=s).to(dtype).requires_grad_() for s in (1, 2, 3)]
    exact = [t.detach().double().requires_grad_() for t in x]
    cotangent = random(1, 4, 40, 16, seed=9).to(dtype)
    out = undivided.attention(*x, layout="bhsd", backend="reference")
    want = torch.softmax(exact[0] @ exact[1].transpose(-1, -2) / 4, -1) @ exact[2]
    got = torch.autograd.grad(out, x, cotangent)
    for name, a, b in zip("qkv", got, torch.autograd.grad(want, exact, cotangent.double()), strict=True):
        assert a.dtype == dtype
        assert error(a, b) < 1.1 * error(b.to(dtype), b) + 1e-6, name


@pytest.mark.parametrize("backend", BACKENDS)
def test_fp64_is_computed_in_fp64_lse_included(backend: str) -> None:
    assert_defined(qkv(), backend=backend)
    _, lse = undivided.attention(*qkv(), layout="bhsd", backend=backend, return_lse=True)
    assert lse.dtype == torch.float64
    assert error(lse, brute_force.attend(*qkv())[1]) < EXACT


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_lse_of_lower_precisions_is_fp32_and_unrounded(backend: str, dtype: torch.dtype) -> None:
    x = [t.to(dtype) for t in qkv(dim=16)]
    _, lse = undivided.attention(*x, layout="bhsd", backend=backend, return_lse=True)
    assert lse.dtype == torch.float32
    assert error(lse, brute_force.attend(*(t.double() for t in x))[1]) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=["fp32", "fp64", "fp16"])
def test_autocast_casts_as_sdpa_does(dtype: torch.dtype) -> None:
    q, k, v = (t.to(dtype) for t in qkv())
    with torch.autocast("cpu", torch.bfloat16):
        want = F.scaled_dot_product_attention(q, k, v)
        out = undivided.attention(q, k, v, layout="bhsd", backend="reference")
    assert out.dtype == want.dtype
    low = [t.to(want.dtype) for t in (q, k, v)]
    assert torch.equal(out, undivided.attention(*low, layout="bhsd", backend="reference"))


def test_autocast_accepts_different_dtypes_and_each_gradient_has_its_inputs_dtype() -> None:
    q, k, v = qkv()
    q, k, v = q.float().requires_grad_(), k.bfloat16().requires_grad_(), v.float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = undivided.attention(q, k, v, layout="bhsd")
    out.float().sum().backward()
    assert [t.grad.dtype for t in (q, k, v) if t.grad is not None] == [torch.float32, torch.bfloat16, torch.float32]


def test_different_dtypes_are_an_error_without_autocast() -> None:
    q, k, v = qkv()
    with pytest.raises(InputError, match="k must have the dtype of q"):
        undivided.attention(q, k.float(), v, layout="bhsd")


# 3. a row with no allowed key gives 0, lse -inf and zero gradients, decided on the mask


EMPTY_ROWS = masks.dense(torch.tensor([[True, False, True, True], [False] * 4, [True, True, False, True]]))


def not_the_second(b: int, h: int, i: int, j: int) -> bool:
    return bool(EMPTY_ROWS.tensors[0][0, 0, i, j])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_without_keys_gives_zero_and_zero_gradients(backend: str) -> None:
    x = qkv(q_len=3, kv_len=4)
    assert_defined(x, EMPTY_ROWS, condition=not_the_second, backend=backend)
    q = x[0].clone().requires_grad_()
    out, lse = undivided.attention(q, *x[1:], layout="bhsd", mask=EMPTY_ROWS, return_lse=True)
    assert bool((out[:, :, 1] == 0).all())
    assert bool((lse[:, :, 1] == -math.inf).all())
    (grad,) = torch.autograd.grad(out.sum(), q)
    assert bool((grad[:, :, 1] == 0).all())


def test_empty_rows_stay_zero_with_sinks_bias_and_dropout() -> None:
    assert_defined(
        qkv(q_len=3, kv_len=4),
        EMPTY_ROWS,
        condition=not_the_second,
        sinks=random(2, seed=6),
        bias=random(3, 4, seed=4),
        dropout_p=0.5,
        dropout_seed=3,
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_keys_at_all_are_decided_on_the_mask_never_on_the_logits(backend: str) -> None:
    q, k, v = qkv(q_len=3, kv_len=4)
    huge = torch.full((3, 4), -1e30, dtype=torch.float64)  # the smallest scores that are still scores
    out, lse = undivided.attention(q, k, v, layout="bhsd", bias=huge, backend=backend, return_lse=True)
    assert error(out, v.mean(2, keepdim=True).expand_as(out)) < EXACT
    assert bool((lse < -1e29).all())
    assert bool(lse.isfinite().all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bias_of_minus_infinity_is_a_masked_key(backend: str) -> None:
    bias = random(2, 2, 3, 4, seed=4)
    bias[:, :, 1] = -math.inf
    bias[0, :, 2, 1:3] = -math.inf
    assert_defined(qkv(q_len=3, kv_len=4), bias=bias, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bias_of_minus_infinity_hides_poison(backend: str) -> None:
    q, k, v = qkv(q_len=3, kv_len=4)
    bias = random(3, 4, seed=4)
    bias[:, 2] = -math.inf
    clean = undivided.attention(q, k, v, layout="bhsd", bias=bias, backend=backend)
    k[:, :, 2], v[:, :, 2] = NAN, NAN
    assert torch.equal(clean, undivided.attention(q, k, v, layout="bhsd", bias=bias, backend=backend))


def test_lse_does_not_include_sinks() -> None:
    x = qkv()
    _, without = undivided.attention(*x, layout="bhsd", return_lse=True)
    out, lse = undivided.attention(*x, layout="bhsd", sinks=random(2, seed=6), return_lse=True)
    assert error(lse, without) < EXACT
    whole_out = undivided.attention(*x, layout="bhsd")
    factor = torch.sigmoid(without - random(2, seed=6)[:, None])
    assert error(out, whole_out * factor.unsqueeze(-1)) < EXACT


@pytest.mark.parametrize("sizes", [(0, 3), (3, 0), (0, 0)], ids=["no-queries", "no-keys", "neither"])
def test_empty_sequences_are_rows_without_keys(sizes: tuple[int, int]) -> None:
    q, k, v = (t.requires_grad_() for t in qkv(q_len=sizes[0], kv_len=sizes[1]))
    out, lse = undivided.attention(q, k, v, layout="bhsd", return_lse=True)
    assert out.shape == q.shape
    assert bool((out == 0).all())
    assert bool((lse == -math.inf).all())
    for grad, t in zip(torch.autograd.grad(out.sum(), (q, k, v)), (q, k, v), strict=True):
        assert grad.shape == t.shape
        assert bool((grad == 0).all())


# 4. causal alignment by each sequence's real lengths; ambiguity is an error


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
    "window": (4, 6, masks.window(2, 0), "query length 4, key length 6", "in causal, window or chunks"),
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


# 5. windows: both ends included, None and -1 unbounded, each side on its own


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


# 6. ALiBi: -slope * |i + d - j|


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


# 7. sinks


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


# 8. grouped heads; 9. head sizes


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


# 10. dropout: the pattern is the one of the definition; the rest is in test_dropout.py


@pytest.mark.parametrize("seed", [0, 7, 2**40 + 3], ids=["seed0", "seed7", "seed-over-32-bits"])
def test_dropout_follows_philox(seed: int) -> None:
    assert_defined(qkv(q_len=3, kv_len=19), dropout_p=0.4, dropout_seed=seed)


# 11. what lies outside the real lengths never reaches an output or a gradient


def poisoned(
    tensors: tuple[Tensor, Tensor, Tensor], mask: masks.Mask, layout: str, backend: str, hidden: tuple[Tensor, Tensor]
) -> None:
    """NaN in the hidden rows and keys (bool [B, S]) changes no output, and no gradient; hidden gradients are 0."""

    def run(x: tuple[Tensor, ...]) -> list[Tensor]:
        leaves = [in_layout(t, layout).requires_grad_() for t in x]
        out = undivided.attention(*leaves, layout=layout, mask=mask, backend=backend)  # type: ignore[call-overload]
        pull = in_layout(random(*tensors[0].shape[:3], tensors[2].shape[-1], seed=9), layout)
        return [heads_first(t, layout) for t in (out, *torch.autograd.grad(out, leaves, pull))]

    rows, keys = hidden
    bad = [t.clone() for t in tensors]
    for t, where in zip(bad, (rows, keys, keys), strict=True):
        t.transpose(1, 2)[where] = NAN
    assert sum(int(t.isnan().sum()) for t in bad) > 0
    for name, got, want in zip(("out", "dq", "dk", "dv"), run(tuple(bad)), run(tensors), strict=True):
        assert error(got, want) < EXACT, name
        unseen = keys if name in ("dk", "dv") else rows
        assert bool((got.transpose(1, 2)[unseen] == 0).all()), f"{name} of what is hidden"


def outside(places: Places) -> tuple[Tensor, Tensor]:
    return tuple(torch.tensor([[p is None for p in line] for line in side]) for side in (places.rows, places.keys))  # type: ignore[return-value]


POISON = {
    "lengths": (masks.lengths([6, 3], [4, 2]), padded(2, 4, 6, [6, 3], [4, 2])),
    "lengths-of-keys": (masks.lengths([6, 3]), padded(2, 4, 6, [6, 3])),
    "left-padding": (
        masks.lengths([4, 3], [2, 3], kv_start=[2, 3], q_start=[2, 1]),
        padded(2, 4, 6, [4, 3], [2, 3], [2, 3], [2, 1]),
    ),
    "no-keys": (masks.lengths([0, 3], [4, 0]), padded(2, 4, 6, [0, 3], [4, 0])),
    "causal-lengths": (masks.causal("bottom_right") & masks.lengths([6, 3], [4, 2]), padded(2, 4, 6, [6, 3], [4, 2])),
    "window-left-padding": (
        masks.window(1, 1, "bottom_right") & masks.lengths([4, 3], [2, 3], kv_start=[2, 3], q_start=[2, 1]),
        padded(2, 4, 6, [4, 3], [2, 3], [2, 3], [2, 1]),
    ),
    "global-window": (
        (masks.window(1, 0, "bottom_right") | masks.prefix(1)) & masks.lengths([6, 3], [4, 2]),
        padded(2, 4, 6, [6, 3], [4, 2]),
    ),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", POISON)
def test_padding_may_be_nan(name: str, layout: str, backend: str) -> None:
    mask, places = POISON[name]
    rows, keys = outside(places)
    if name == "no-keys":
        rows[0], keys[1] = True, True  # no key to attend to, and no query that attends to it
    poisoned(qkv(q_len=4, kv_len=6, heads=4, kv_heads=2), mask, layout, backend, (rows, keys))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("causally", [False, True], ids=["all", "causal"])
def test_padding_between_and_after_documents_may_be_nan(backend: str, causally: bool) -> None:
    mask = masks.documents([0, 3, 5, 9], padded_q=[0, 4, 8, 13], total_q=15)
    places = packed([0, 3, 5, 9], slots_q=[0, 4, 8, 13], tokens_q=15, tokens_kv=15)
    poisoned(qkv(1, q_len=15, kv_len=15), mask & masks.causal() if causally else mask, "thd", backend, outside(places))


@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_with_a_negative_id_may_be_nan(backend: str) -> None:
    ids = torch.tensor([[0, 0, 1, -1, -1], [-1, 4, 4, 2, -1]])
    poisoned(qkv(), masks.document_ids(ids) & masks.causal(), "bshd", backend, (ids < 0, ids < 0))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["dense", "predicate"])
def test_keys_and_rows_that_a_dense_mask_hides_may_be_nan(backend: str, kind: str) -> None:
    keys = torch.tensor([[True, False, True, True, False], [False, True, True, True, True]])
    rows = torch.tensor([[True, True, False, True, True], [True, True, True, True, False]])
    tensor = (rows[:, :, None] & keys[:, None, :])[:, None]
    mask = masks.dense(tensor) if kind == "dense" else masks.predicate(lambda b, h, i, j: rows[b, i] & keys[b, j])
    poisoned(qkv(), mask, "bhsd", backend, (~rows, ~keys))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_key_hidden_from_one_head_alone_is_clean_for_the_others(backend: str) -> None:
    q, k, v = qkv(heads=4, kv_heads=2)
    seen = torch.ones(1, 4, 1, 5, dtype=torch.bool)
    seen[:, 2:, :, 3] = False  # both query heads of key head 1
    clean = undivided.attention(q, k, v, layout="bhsd", mask=masks.dense(seen), backend=backend)
    k[:, 1, 3], v[:, 1, 3] = NAN, NAN
    assert torch.equal(undivided.attention(q, k, v, layout="bhsd", mask=masks.dense(seen), backend=backend), clean)


def test_padding_stays_out_with_every_feature_on() -> None:
    mask, places = POISON["window-left-padding"]
    rows, keys = outside(places)
    q, k, v = qkv(q_len=4, kv_len=6)
    features = {
        "alibi_slopes": random(2, 2, seed=5),
        "sinks": random(2, seed=6),
        "bias": random(2, 2, 4, 6, seed=4),
        "softcap": 2.0,
        "dropout_p": 0.3,
        "dropout_seed": 5,
    }

    def run() -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        extra = {n: f.clone().requires_grad_() if isinstance(f, Tensor) else f for n, f in features.items()}
        out, lse = undivided.attention(*leaves, layout="bhsd", mask=mask, return_lse=True, **extra)  # type: ignore[call-overload]
        wanted = [*leaves, *(t for t in extra.values() if isinstance(t, Tensor))]
        return [out, *torch.autograd.grad(out.sum() + lse[lse > -math.inf].sum(), wanted)]

    clean = run()
    q.transpose(1, 2)[rows] = NAN
    k.transpose(1, 2)[keys] = NAN
    v.transpose(1, 2)[keys] = NAN
    features["bias"].transpose(1, 2)[rows] = NAN  # type: ignore[union-attr]
    features["bias"].permute(0, 3, 1, 2)[keys] = NAN  # type: ignore[union-attr]
    for got, want in zip(run(), clean, strict=True):
        assert error(got, want) < EXACT


# 12. gradients by finite differences, independent of the definition above


GRADCHECKS = {
    "plain": {},
    "causal-gqa": {"mask": masks.causal("bottom_right"), "kv_heads": 1},
    "window-sinks-softcap": {"mask": masks.window(1, 1, "top_left"), "sinks": True, "softcap": 1.3},
    "bias-alibi": {"mask": masks.causal("bottom_right"), "bias": (2, 1, 3, 4), "alibi_slopes": (2, 2)},
    "broadcast-bias": {"bias": (2, 1, 4), "v_dim": 2},
    "lengths-everything": {
        "mask": masks.causal("bottom_right") & masks.lengths([4, 2], [3, 1]),
        "bias": (1, 2, 1, 4),
        "sinks": True,
        "alibi_slopes": (2,),
        "softcap": 2.0,
        "dropout_p": 0.3,
        "dropout_seed": 11,
    },
}


@pytest.mark.parametrize("name", GRADCHECKS)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    case = dict(GRADCHECKS[name])
    x = qkv(q_len=3, kv_len=4, dim=2, kv_heads=case.pop("kv_heads", None), v_dim=case.pop("v_dim", None))  # type: ignore[arg-type]
    if case.pop("sinks", False):
        case["sinks"] = random(2, seed=6)
    for extra in ("bias", "alibi_slopes"):
        if extra in case:
            case[extra] = random(*case[extra], seed=4).abs()  # type: ignore[misc]
    names = [n for n, value in case.items() if isinstance(value, Tensor)]
    inputs = [t.requires_grad_() for t in (*x, *(case[n] for n in names))]  # type: ignore[union-attr]

    def run(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        arguments = {**case, **dict(zip(names, tensors[3:], strict=True))}
        out, lse = undivided.attention(*tensors[:3], layout="bhsd", return_lse=True, **arguments)  # type: ignore[call-overload]
        return out, lse.masked_fill(lse == -math.inf, 0.0)

    assert torch.autograd.gradcheck(run, inputs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_backward_repeats_bit_for_bit_on_the_cpu(backend: str) -> None:
    x = [t.float().requires_grad_() for t in qkv(heads=4, kv_heads=2, q_len=90, kv_len=90, dim=16)]

    def run() -> tuple[Tensor, ...]:
        out = undivided.attention(*x, layout="bhsd", mask=masks.causal(), backend=backend, deterministic=True)  # type: ignore[call-overload]
        return torch.autograd.grad(out, x, torch.ones_like(out))

    for first, second in zip(run(), run(), strict=True):
        assert torch.equal(first, second)


# 13. documents


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_documents_attend_only_to_themselves(backend: str, dtype: torch.dtype) -> None:
    cu = torch.tensor([0, 3, 3, 4, 9], dtype=dtype)
    mask = masks.documents(cu) & masks.causal()
    assert_defined(qkv(1, q_len=9, kv_len=9), mask, packed(cu.tolist()), [causal()], layout="thd", backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_documents_may_have_padded_slots(backend: str) -> None:
    real, slots = [0, 3, 5, 9], [0, 4, 8, 13]
    mask = masks.documents(real, padded_q=slots) & masks.causal()
    x = qkv(1, q_len=13, kv_len=13)
    assert_defined(x, mask, packed(real, slots_q=slots), [causal()], layout="thd", backend=backend)
    out, lse = undivided.attention(
        *(in_layout(t, "thd") for t in x), layout="thd", mask=mask, backend=backend, return_lse=True
    )
    for token in (3, 6, 7, 12):
        assert bool((out[token] == 0).all())
        assert bool((lse[:, token] == -math.inf).all())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
def test_documents_of_unequal_queries_and_keys_with_slots_of_their_own(backend: str, align: str) -> None:
    cu_q, cu_kv, slots_q, slots_kv = [0, 2, 3, 6], [0, 4, 4, 9], [0, 3, 4, 8], [0, 5, 6, 11]
    mask = masks.documents(cu_q, cu_kv, slots_q, slots_kv) & masks.causal(align)  # type: ignore[arg-type]
    places = packed(cu_q, cu_kv, slots_q, slots_kv)
    assert_defined(
        qkv(1, q_len=8, kv_len=11, heads=4, kv_heads=2), mask, places, [causal(align)], layout="thd", backend=backend
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_documents_in_a_dense_batch_of_one_equal_packed_documents(backend: str) -> None:
    mask = masks.documents([0, 2, 5]) & masks.causal()
    for layout in LAYOUTS:
        assert_defined(qkv(1), mask, packed([0, 2, 5]), [causal()], layout=layout, backend=backend)


def test_every_feature_in_documents_equals_the_definition() -> None:
    cu_q, cu_kv = [0, 2, 3, 6], [0, 4, 5, 9]
    assert_defined(
        qkv(1, heads=4, kv_heads=2, q_len=6, kv_len=9, v_dim=3),
        masks.documents(cu_q, cu_kv) & masks.window(2, 1, "bottom_right"),
        packed(cu_q, cu_kv),
        [window(2, 1, "bottom_right")],
        align="bottom_right",
        layout="thd",
        alibi_slopes=random(3, 4, seed=5),
        sinks=random(4, seed=6),
        bias=random(4, 6, 9, seed=4),
        softcap=2.0,
        dropout_p=0.25,
        dropout_seed=13,
    )


# Layouts and pages: the same answer from every way of storing the tensors


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_are_only_strides(layout: str, backend: str) -> None:
    x = qkv(heads=4, kv_heads=2, q_len=3, kv_len=5)
    assert_defined(x, masks.causal("bottom_right"), None, [causal("bottom_right")], layout=layout, backend=backend)
    out = undivided.attention(*(in_layout(t, layout) for t in x), layout=layout, backend=backend)  # type: ignore[call-overload]
    assert out.is_contiguous()


def paged(kv: Tensor, lengths: Sequence[int], size: int, table: Tensor) -> Tensor:
    """[B, N, S, D] scattered into a pool [pages, size, N, D] that is NaN wherever nothing was written."""
    pool = torch.full((int(table.max()) + 3, size, kv.shape[1], kv.shape[3]), NAN, dtype=kv.dtype)
    for b, length in enumerate(lengths):
        for j in range(length):
            pool[table[b, j // size], j % size] = kv[b, :, j]
    return pool


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_paged_keys_and_values_equal_unpaged_ones(layout: str, page_size: int) -> None:
    lengths = [7, 2]
    q, k, v = qkv(heads=4, kv_heads=2, q_len=2, kv_len=8)
    count = 8 // page_size
    table = torch.randperm(2 * count, generator=torch.Generator().manual_seed(0)).view(2, count).to(torch.int32)
    table[1, (2 + page_size - 1) // page_size :] = -1  # entries beyond the length are never followed
    mask = masks.causal("bottom_right") & masks.lengths(lengths)
    want, want_lse = brute_force.attend(q, k, v, padded(2, 2, 8, lengths), [causal("bottom_right")])
    pools = [paged(t, lengths, page_size, table) for t in (k, v)]
    out, lse = undivided.attention(
        in_layout(q, layout),
        *pools,
        layout=layout,
        mask=mask,
        pages=table,
        return_lse=True,  # type: ignore[call-overload]
    )
    assert error(heads_first(out, layout), want) < EXACT
    assert error(lse, want_lse) < EXACT


def test_paged_keys_and_values_of_packed_queries_equal_unpaged_ones() -> None:
    cu_q, lengths = [0, 3, 4, 6], [5, 1, 6]
    cu_kv = [0, 5, 6, 12]
    q, k, v = qkv(1, heads=4, kv_heads=2, q_len=6, kv_len=12)
    want, want_lse = brute_force.attend(q, k, v, packed(cu_q, cu_kv), [causal("bottom_right")])
    table = torch.tensor([[4, 0, 7], [2, 2, 2], [6, 1, 5]], dtype=torch.int32)
    pools = []
    for t in (k, v):
        rows = torch.stack([F.pad(t[0, :, a:b], (0, 0, 0, 6 - (b - a))) for a, b in itertools.pairwise(cu_kv)])
        pools.append(paged(rows, lengths, 2, table))
    mask = masks.documents(cu_q, cu_kv) & masks.causal("bottom_right")
    out, lse = undivided.attention(in_layout(q, "thd"), *pools, layout="thd", mask=mask, pages=table, return_lse=True)
    assert error(heads_first(out, "thd"), want) < EXACT
    assert error(lse.unsqueeze(0), want_lse) < EXACT


def test_the_default_device_and_dtype_change_nothing() -> None:
    """The check of the page numbers created a tensor on the default device, and comparing it with one on the CPU
    failed."""
    q, pool = random(2, 3, 2, 8), random(4, 4, 2, 8)
    pages = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)

    def run() -> Tensor:
        mask = masks.lengths([5, 7]) & masks.causal(align="bottom_right")
        return undivided.attention(q, pool, pool, layout="bshd", mask=mask, pages=pages)

    want, dtype = run(), torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        with torch.device("meta"):
            got = run()
    finally:
        torch.set_default_dtype(dtype)
    assert torch.equal(got, want)

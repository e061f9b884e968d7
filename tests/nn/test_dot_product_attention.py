"""DotProductAttention matches the definitions of its mask types, windows, biases and softmax types, in every format.

Masks are compared as sets of pairs: with values that are unit vectors the output is the row of probabilities, and a
pair is allowed where its probability is not 0. `definition` has the allowed pairs, written from the documentation of
the interface.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable
from typing import Any

import brute_force
import pytest
import torch
from torch import Tensor

import undivided
from undivided import DotProductAttention, masks
from undivided.request.slopes import usual_slopes

H, G, D = 4, 2, 8
Pairs = set[tuple[int, int, int]]
Row = list[int]  # the raw indices of one sequence's tokens


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def definition(
    kind: str, window: tuple[int, int], bottom_right: bool, sequences: Iterable[tuple[int, Row, Row]]
) -> Pairs:
    """Allowed (batch, query, key) of sequences given as (batch element, raw queries, raw keys)."""
    allowed = set()
    for b, queries, keys in sequences:
        d = len(keys) - len(queries) if bottom_right else 0
        for (i, raw_i), (j, raw_j) in itertools.product(enumerate(queries), enumerate(keys)):
            left, right = window
            inside = (left == -1 or j >= i + d - left) and (right == -1 or j <= i + d + right)
            if inside and ("causal" not in kind or j <= i + d):
                allowed.add((b, raw_i, raw_j))
    return allowed


def dense_sequences(kind: str, q: list[int], kv: list[int], sq: int, skv: int) -> list[tuple[int, Row, Row]]:
    if "padding" not in kind:
        q, kv = [sq] * len(q), [skv] * len(kv)
    return [(b, list(range(n)), list(range(m))) for b, (n, m) in enumerate(zip(q, kv, strict=True))]


def recovered(module: DotProductAttention, sq: int, skv: int, batch: int = 2, **call: Any) -> Pairs:
    """The pairs that a module of head sizes (D, skv) attends to, the same for every head."""
    format = call.get("qkv_format", module.qkv_format)
    shape = {"bshd": (batch, -1), "sbhd": (-1, batch), "thd": (-1,)}[format]
    q, k = (torch.randn(*(length if n < 0 else n for n in shape), H, D) for length in (sq, skv))
    v = torch.eye(skv)
    v = v[:, None].expand(skv, H, skv) if format == "thd" else v[None, :, None].expand(batch, skv, H, skv)
    v = v.transpose(0, 1) if format == "sbhd" else v
    out = module(q, k, v, **call).unflatten(-1, (H, skv))
    out = out[None] if format == "thd" else out.transpose(0, 1) if format == "sbhd" else out
    sums = out.sum(-1)
    torch.testing.assert_close(sums, (sums > 0).float(), msg="a row is neither empty nor a distribution")
    found = (out > 0).all(2)
    assert torch.equal(found, (out > 0).any(2)), "heads differ"
    return {(int(b), int(i), int(j)) for b, i, j in found.nonzero()}


def cu(*lengths: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype)


TYPES = ("no_mask", "padding", "causal", "padding_causal", "causal_bottom_right", "padding_causal_bottom_right")
WINDOWS: dict[str, list[tuple[int, int] | None]] = {
    "causal": [None, (-1, 0), (0, 0), (2, 0)],
    "open": [None, (-1, -1), (0, 0), (1, 2), (2, 0), (0, 3), (-1, 1), (1, -1)],
}
CASES = [
    (kind, window, asked)
    for kind in TYPES
    for window in WINDOWS["causal" if "causal" in kind else "open"]
    for asked in ((None,) if "causal" in kind else (None, True, False))
]


def expected(kind: str, window: tuple[int, int] | None, asked: bool | None, sequences: Any) -> Pairs:
    bottom_right = (kind not in ("causal", "padding_causal")) and asked is not False
    return definition(kind, window or (-1, -1), bottom_right, sequences)


@pytest.mark.parametrize("format", ["bshd", "sbhd"])
@pytest.mark.parametrize(("sq", "skv"), [(5, 5), (4, 6), (6, 4), (1, 5)])
@pytest.mark.parametrize(("kind", "window", "asked"), CASES, ids=lambda value: str(value).replace(" ", ""))
def test_every_mask_type_and_window_is_its_exact_set_of_pairs(
    kind: str, window: tuple[int, int] | None, asked: bool | None, sq: int, skv: int, format: str
) -> None:
    module = DotProductAttention(
        H, (D, skv), None, 0.0, format, kind, window, asked, attention_type="self" if sq == skv else "cross"
    )
    q, kv = [max(sq - 1, 1), sq], [skv - 1, skv - 2]
    if sq == skv:
        kv = q
    call: dict[str, Any] = {}
    if "padding" in kind:
        call = {"cu_seqlens_q": cu(*q), "cu_seqlens_kv": cu(*kv)}
    want = expected(kind, window, asked, dense_sequences(kind, q, kv, sq, skv))
    assert recovered(module, sq, skv, **call) == want


@pytest.mark.parametrize(
    ("kind", "window", "asked"), [c for c in CASES if "padding" in c[0]], ids=lambda value: str(value).replace(" ", "")
)
@pytest.mark.parametrize("padded", [False, True], ids=["dense", "padded"])
@pytest.mark.parametrize("q", [(3, 1, 4), (2, 4, 3)], ids=["self", "cross"])
def test_packed_sequences_attend_exactly_to_themselves(
    kind: str, window: tuple[int, int] | None, asked: bool | None, padded: bool, q: tuple[int, ...]
) -> None:
    kv = (3, 1, 4)
    slots = (4, 2, 6) if padded else kv
    slots_q = (5, 4, 4) if padded else q
    if q == kv:
        slots_q = slots
    module = DotProductAttention(
        H,
        (D, sum(slots)),
        qkv_format="thd",
        attn_mask_type=kind,
        window_size=window,
        bottom_right_diagonal=asked,
        attention_type="self" if q == kv else "cross",
    )

    def rows(lengths: tuple[int, ...], room: tuple[int, ...]) -> list[Row]:
        starts = [0, *itertools.accumulate(room)]
        return [list(range(s, s + n)) for s, n in zip(starts, lengths, strict=False)]

    call: dict[str, Any] = {"cu_seqlens_q": cu(*q), "cu_seqlens_kv": cu(*kv)}
    if padded:
        call |= {"cu_seqlens_q_padded": cu(*slots_q), "cu_seqlens_kv_padded": cu(*slots)}
    sequences = [(0, a, b) for a, b in zip(rows(q, slots_q), rows(kv, slots), strict=True)]
    want = expected(kind, window, asked, sequences)
    assert recovered(module, sum(slots_q), sum(slots), **call) == want


def test_in_self_attention_the_offsets_of_the_queries_are_those_of_the_keys() -> None:
    """The padded offsets [0, 4, 8, 13] of sequences [0, 3, 5, 9], passed once."""
    module = DotProductAttention(H, (D, 13), qkv_format="thd", attn_mask_type="padding")
    alone = {"cu_seqlens_q": torch.tensor([0, 3, 5, 9]), "cu_seqlens_q_padded": torch.tensor([0, 4, 8, 13])}
    rows = [[0, 1, 2], [4, 5], [8, 9, 10, 11]]
    want = definition("padding", (-1, -1), False, [(0, row, row) for row in rows])
    assert recovered(module, 13, 13, **alone) == want
    assert recovered(module, 13, 13, **alone, pad_between_seqs=True, max_seqlen_q=64, max_seqlen_kv=64) == want


@pytest.mark.parametrize("alias", ["padding,causal", "causal,padding", "padding_causal"])
def test_aliases_of_padding_causal(alias: str) -> None:
    module = DotProductAttention(H, (D, 4), qkv_format="bshd")
    want = definition("causal", (-1, -1), False, [(0, [0, 1], [0, 1]), (1, [0, 1, 2, 3], [0, 1, 2, 3])])
    assert recovered(module, 4, 4, attn_mask_type=alias, cu_seqlens_q=cu(2, 4)) == want


def padding_mask(length: int, *real: Iterable[int]) -> Tensor:
    mask = torch.ones(len(real), 1, 1, length, dtype=torch.bool)
    for row, tokens in zip(mask, real, strict=True):
        row[..., list(tokens)] = False
    return mask


REAL: dict[str, tuple[Row, Row]] = {
    "right padding": ([0, 1, 2], [0, 1, 2, 3, 4]),
    "left padding": ([3, 4], [1, 2, 3, 4]),
    "nothing real": ([], [0]),
}


@pytest.mark.parametrize("kind", [kind for kind in TYPES if "padding" in kind])
@pytest.mark.parametrize("real", REAL.values(), ids=REAL)
def test_a_boolean_padding_mask_masks_queries_and_keys(kind: str, real: tuple[Row, Row]) -> None:
    module = DotProductAttention(H, (D, 5), qkv_format="bshd", attn_mask_type=kind)
    mask = padding_mask(5, *real)
    want = expected(kind, None, None, [(b, row, row) for b, row in enumerate(real)])
    assert recovered(module, 5, 5, attention_mask=mask) == want
    assert recovered(module, 5, 5, attention_mask=(mask, mask.clone())) == want


@pytest.mark.parametrize("kind", [kind for kind in TYPES if "padding" in kind])
def test_a_pair_of_padding_masks_is_for_queries_and_keys(kind: str) -> None:
    q, kv = [[0, 1], [1, 2]], [[0, 1, 2, 3], [2, 3, 4]]
    module = DotProductAttention(H, (D, 5), qkv_format="sbhd", attn_mask_type=kind, attention_type="cross")
    want = expected(kind, None, None, [(b, *rows) for b, rows in enumerate(zip(q, kv, strict=True))])
    assert recovered(module, 3, 5, attention_mask=(padding_mask(3, *q), padding_mask(5, *kv))) == want


def test_a_padding_mask_with_holes_hides_the_holes_and_keeps_the_positions() -> None:
    real = ([0, 2, 3], [1, 4])
    mask = padding_mask(5, *real)
    module = DotProductAttention(H, (D, 5), qkv_format="bshd", attn_mask_type="padding")
    every = {(b, i, j) for b, row in enumerate(real) for i in row for j in row}
    assert recovered(module, 5, 5, attention_mask=mask) == every
    for kind in ("padding_causal", "padding_causal_bottom_right"):
        assert recovered(module, 5, 5, attention_mask=mask, attn_mask_type=kind) == {p for p in every if p[2] <= p[1]}
    looked_back = recovered(module, 5, 5, attention_mask=mask, window_size=(1, 0))
    assert looked_back == {p for p in every if p[1] - 1 <= p[2] <= p[1]}


def test_padding_may_hold_anything() -> None:
    module = DotProductAttention(H, D, G, qkv_format="bshd", attn_mask_type="padding_causal")
    q, k, v = (torch.randn(2, 5, heads, D, requires_grad=True) for heads in (H, G, G))
    dirty = [t.detach().clone() for t in (q, k, v)]
    for tensor in dirty:
        tensor[0, 3:] = torch.nan
        tensor.requires_grad_()
    mask = padding_mask(5, range(3), range(5))
    out, same = module(*dirty, mask), module(q, k, v, cu_seqlens_q=cu(3, 5))
    torch.testing.assert_close(out, same)
    assert not out[0, 3:].any()
    for got, want in zip(
        torch.autograd.grad(out.sum(), dirty), torch.autograd.grad(same.sum(), (q, k, v)), strict=True
    ):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("window", [None, (1, 1)])
@pytest.mark.parametrize("shape", [(2, 1, 4, 6), (1, 1, 4, 6), (4, 6), (2, 1, 1, 6)], ids=str)
def test_arbitrary_masks_where_true(shape: tuple[int, ...], window: tuple[int, int] | None) -> None:
    mask = torch.rand(shape) < 0.4
    module = DotProductAttention(H, (D, 6), qkv_format="bshd", attn_mask_type="arbitrary", window_size=window)
    full = mask.expand(2, 1, 4, 6)[:, 0]
    want = {(b, i, j) for b, i, j in itertools.product(range(2), range(4), range(6)) if not full[b, i, j]}
    if window:
        want &= expected("arbitrary", window, None, [(b, list(range(4)), list(range(6))) for b in range(2)])
    assert recovered(module, 4, 6, attention_mask=mask) == want


@pytest.mark.parametrize(
    ("kind", "window", "becomes"),
    [
        ("causal", (-1, -1), (-1, 0)),
        ("causal", (2, 3), (2, 0)),
        ("padding_causal", (2, -1), (2, 0)),
        ("causal_bottom_right", (-1, 4), (-1, 0)),
        ("no_mask", (-1, 0), (-1, -1)),
        ("padding", (-1, 0), (-1, -1)),
    ],
)
def test_a_changed_window_gives_a_warning(kind: str, window: tuple[int, int], becomes: tuple[int, int]) -> None:
    with pytest.warns(UserWarning, match="becomes") as caught:
        module = DotProductAttention(H, D, qkv_format="bshd", attn_mask_type=kind, window_size=window)
    assert module.window_size == becomes
    assert str(becomes) in str(caught[0].message)
    assert len(caught) == 1


def test_a_window_at_the_call_replaces_that_of_construction() -> None:
    module = DotProductAttention(H, (D, 4), qkv_format="bshd", window_size=(1, 0))
    rows = [(b, list(range(4)), list(range(4))) for b in range(2)]
    assert recovered(module, 4, 4) == definition("causal", (1, -1), False, rows)
    assert recovered(module, 4, 4, window_size=(0, 0)) == definition("causal", (0, -1), False, rows)
    with pytest.warns(UserWarning, match="allows no later key"):
        assert recovered(module, 4, 4, window_size=(1, 1)) == definition("causal", (1, -1), False, rows)


@pytest.mark.parametrize("kind", ["causal", "causal_bottom_right"])
def test_the_mask_type_defines_its_diagonal_with_a_warning(kind: str) -> None:
    contradicting = kind == "causal"
    module = DotProductAttention(H, (D, 6), qkv_format="bshd", attn_mask_type=kind)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        want = recovered(module, 4, 6)
        assert recovered(module, 4, 6, bottom_right_diagonal=not contradicting) == want
    with pytest.warns(UserWarning, match="bottom_right_diagonal"):
        assert recovered(module, 4, 6, bottom_right_diagonal=contradicting) == want


# Scores, softmax and formats, against the definition in plain loops.


def doubles(sq: int, skv: int, d_v: int = D, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of brute force, [B, H, S, D]."""
    sizes = ((H, sq, D), (G, skv, D), (G, skv, d_v))
    q, k, v = (torch.randn(batch, *size, dtype=torch.float64) for size in sizes)
    return q, k, v


def bshd(*tensors: Tensor) -> list[Tensor]:
    return [t.transpose(1, 2) for t in tensors]


def flat(out_BHSD: Tensor) -> Tensor:
    return out_BHSD.transpose(1, 2).flatten(-2)


@pytest.mark.parametrize("format", ["bshd", "sbhd"])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_formats_scale_and_value_size(format: str, scale: float | None) -> None:
    q, k, v = doubles(4, 6, d_v=5)
    module = DotProductAttention(
        H, (D, 5), G, qkv_format=format, attn_mask_type="causal_bottom_right", softmax_scale=scale
    )
    inputs = bshd(q, k, v)
    inputs = inputs if format == "bshd" else [t.transpose(0, 1) for t in inputs]
    out = module(*inputs)
    want, _ = brute_force.attend(q, k, v, rules=[brute_force.causal("bottom_right")], scale=scale)
    assert out.shape == ((2, 4, H * 5) if format == "bshd" else (4, 2, H * 5))
    assert out.is_contiguous()
    torch.testing.assert_close(out if format == "bshd" else out.transpose(0, 1), flat(want))


SHAPES = [(2, H, 4, 6), (1, H, 4, 6), (2, 1, 4, 6), (1, 1, 4, 6), (1, 1, 1, 6)]


@pytest.mark.parametrize("shape", SHAPES, ids=["bhss", "1hss", "b1ss", "11ss", "111s"])
@pytest.mark.parametrize("kind", ["pre_scale_bias", "post_scale_bias"])
def test_biases_of_every_shape_before_and_after_the_scale(kind: str, shape: tuple[int, ...]) -> None:
    q, k, v = doubles(4, 6)
    bias = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    module = DotProductAttention(H, D, G, qkv_format="bshd", attn_mask_type="no_mask", softmax_scale=0.2)
    out = module(*bshd(q, k, v), core_attention_bias_type=kind, core_attention_bias=bias)
    factor = 0.2 if kind == "pre_scale_bias" else 1.0
    want, _ = brute_force.attend(q, k, v, bias=bias * factor, scale=0.2)
    torch.testing.assert_close(out, flat(want))
    upstream = torch.randn_like(out)
    (got,), (should,) = (torch.autograd.grad(o, bias, upstream) for o in (out, flat(want)))
    torch.testing.assert_close(got, should)


def press_slopes(heads: int) -> list[float]:
    """ALiBi slopes as in the code of the paper: recursive, for powers of two and between them."""
    if heads & (heads - 1) == 0:
        start = 2 ** (-8 / heads)
        return [start * start**i for i in range(heads)]
    power = 1 << (heads.bit_length() - 1)
    return press_slopes(power) + press_slopes(2 * power)[0::2][: heads - power]


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 8, 12, 16, 20])
def test_default_alibi_slopes(heads: int) -> None:
    torch.testing.assert_close(usual_slopes(heads), torch.tensor(press_slopes(heads)))
    torch.testing.assert_close(undivided.alibi_slopes(heads), torch.tensor(press_slopes(heads)))


@pytest.mark.parametrize("slopes", [None, "h", "bh"])
@pytest.mark.parametrize("kind", ["causal", "causal_bottom_right", "no_mask"])
def test_alibi_follows_the_diagonal_of_the_mask_type(kind: str, slopes: str | None) -> None:
    q, k, v = doubles(4, 6)
    given = None if slopes is None else torch.rand((H,) if slopes == "h" else (2, H))
    module = DotProductAttention(H, D, G, qkv_format="bshd", attn_mask_type=kind)
    out = module(*bshd(q, k, v), core_attention_bias_type="alibi", alibi_slopes=given)
    align = "top_left" if kind == "causal" else "bottom_right"
    used = torch.tensor(press_slopes(H)) if given is None else given
    rules = [brute_force.causal(align)] if "causal" in kind else []
    want, _ = brute_force.attend(q, k, v, rules=rules, slopes=used.double(), align=align)
    torch.testing.assert_close(out, flat(want))


@pytest.mark.parametrize("kind", ["vanilla", "off-by-one", "learnable"])
def test_softmax_types(kind: str) -> None:
    q, k, v = doubles(5, 5)
    module = DotProductAttention(H, D, G, qkv_format="bshd", softmax_type=kind)
    sinks = {"vanilla": None, "off-by-one": torch.zeros(H, dtype=torch.float64)}.get(kind)
    if kind == "learnable":
        assert module.softmax_offset is not None
        torch.nn.init.normal_(module.softmax_offset)
        sinks = module.softmax_offset.detach().double().requires_grad_()
    else:
        assert not list(module.parameters())
    out = module(*bshd(q, k, v))
    want, _ = brute_force.attend(q, k, v, rules=[brute_force.causal()], sinks=sinks)
    torch.testing.assert_close(out, flat(want))
    if kind == "learnable":
        upstream = torch.randn_like(out)
        out.backward(upstream)
        (should,) = torch.autograd.grad(flat(want), sinks, upstream)
        torch.testing.assert_close(module.softmax_offset.grad.double(), should, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", ["plain", "bias", "alibi", "softcap", "packed", "half"])
def test_the_largest_score_of_each_head(case: str) -> None:
    q, k, v = doubles(5, 5)
    dtype = torch.bfloat16 if case == "half" else torch.float64
    inputs = [t.to(dtype) for t in bshd(q, k, v)]
    q, k = (t.to(dtype).double() for t in (q, k))
    module = DotProductAttention(
        H, D, G, qkv_format="bshd", return_max_logit=True, softcap=1.5 if case == "softcap" else None
    )
    scores = torch.einsum("bhid,bhjd->bhij", q, k.repeat_interleave(H // G, 1)) / D**0.5
    allowed = torch.ones(2, 1, 5, 5).tril().bool()
    call: dict[str, Any] = {}
    if case == "bias":
        call = {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": torch.randn(1, H, 5, 5).double()}
        scores = scores + call["core_attention_bias"]
    elif case == "alibi":
        call = {"core_attention_bias_type": "alibi"}
        distance = (torch.arange(5)[:, None] - torch.arange(5)).abs()
        scores = scores - torch.tensor(press_slopes(H))[:, None, None] * distance
    elif case == "softcap":
        scores = 1.5 * torch.tanh(scores / 1.5)
    elif case == "packed":  # ten tokens in sequences of 2, 3 and 5, of which the first two are batch element 0
        inputs = [t.flatten(0, 1) for t in inputs]
        call = {"qkv_format": "thd", "attn_mask_type": "padding_causal", "cu_seqlens_q": cu(2, 3, 5)}
        allowed[0, :, 2:, :2] = False
    out, largest = module(*inputs, **call)
    want = scores.masked_fill(~allowed, -torch.inf).amax((0, 2, 3))
    torch.testing.assert_close(largest.double(), want, rtol=1e-5, atol=1e-6)
    assert largest.dtype == (torch.float32 if case == "half" else torch.float64)
    assert not largest.requires_grad
    assert out.shape[-1] == H * D


def test_the_largest_score_over_many_blocks_is_that_over_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from undivided.backends import reference

    module = DotProductAttention(H, D, qkv_format="bshd", window_size=(40, 0), return_max_logit=True)
    q, k, v = (torch.randn(2, 300, H, D) for _ in range(3))
    _, whole = module(q, k, v)
    monkeypatch.setattr(reference, "SCORES_PER_BLOCK", 1 << 9)
    monkeypatch.setattr(reference, "MAX_ROWS", 32)
    torch.testing.assert_close(module(q, k, v)[1], whole)


@pytest.mark.parametrize("interleave", [-3, -2])
@pytest.mark.parametrize("format", ["bshd", "sbhd", "thd"])
def test_packed_qkv_and_kv_layers_are_their_parts(format: str, interleave: int) -> None:
    tokens = (6,) if format == "thd" else (2, 6)
    module = DotProductAttention(H, D, qkv_format=format, attn_mask_type="padding_causal")
    call = {"cu_seqlens_q": cu(*((4, 2) if format == "thd" else (1, 2, 2, 1, 2, 1) if format == "sbhd" else (5, 6)))}
    q, k, v = (torch.randn(*tokens, H, D) for _ in range(3))
    want = module(q, k, v, **call)
    torch.testing.assert_close(
        module(qkv_layer=torch.stack((q, k, v), interleave), qkv_interleave_dim=interleave, **call), want
    )
    torch.testing.assert_close(
        module(q, kv_layer=torch.stack((k, v), interleave), qkv_interleave_dim=interleave, **call), want
    )


def test_dropout_is_applied_only_in_training() -> None:
    module = DotProductAttention(H, D, attention_dropout=0.5, qkv_format="bshd")
    q = torch.randn(2, 8, H, D)
    plain = DotProductAttention(H, D, qkv_format="bshd")(q, q, q)
    torch.manual_seed(1)
    dropped = module(q, q, q)
    assert not torch.equal(dropped, module(q, q, q))
    torch.manual_seed(1)
    assert torch.equal(dropped, module(q, q, q))
    torch.testing.assert_close(module.eval()(q, q, q), plain)


def test_checkpointing_gives_the_same_gradients_with_dropout_bias_and_offset() -> None:
    module = DotProductAttention(H, D, G, attention_dropout=0.3, qkv_format="bshd", softmax_type="learnable")
    q, k, v = (torch.randn(2, 6, heads, D, requires_grad=True) for heads in (H, G, G))
    bias = torch.randn(1, H, 6, 6, requires_grad=True)
    found = []
    for recompute in (False, True):
        torch.manual_seed(3)
        out = module(
            q,
            k,
            v,
            checkpoint_core_attention=recompute,
            core_attention_bias_type="post_scale_bias",
            core_attention_bias=bias,
        )
        found.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v, bias, module.softmax_offset))])
    for plain, recomputed in zip(*found, strict=True):
        torch.testing.assert_close(plain, recomputed)


def test_the_module_equals_undivided_attention() -> None:
    """The module adds no arithmetic: it equals the function bitwise, on the same backend."""
    q, k, v = (torch.randn(2, 33, heads, 64) for heads in (8, 2, 2))
    out = DotProductAttention(8, 64, 2, qkv_format="bshd", softcap=20.0)(q, k, v)
    want = undivided.attention(q, k, v, layout="bshd", mask=masks.causal(), softcap=20.0)
    assert torch.equal(out, want.flatten(-2))

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

import pytest
import torch
from torch import Tensor

from undivided import DotProductAttention, InputError
from undivided.nn.arguments import mask_types

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
    assert recovered(module, 13, 13, **alone, cu_seqlens_kv=alone["cu_seqlens_q"].int()) == want, "equal, in a copy"
    with pytest.raises(InputError, match="cu_seqlens_kv must be int32 or int64"):
        recovered(module, 13, 13, **alone, cu_seqlens_kv=alone["cu_seqlens_q"].double())
    assert recovered(module, 13, 13, **alone, pad_between_seqs=True, max_seqlen_q=64, max_seqlen_kv=64) == want


@pytest.mark.parametrize("alias", ["padding,causal", "causal,padding", "padding_causal"])
def test_aliases_of_padding_causal(alias: str) -> None:
    module = DotProductAttention(H, (D, 4), qkv_format="bshd")
    want = definition("causal", (-1, -1), False, [(0, [0, 1], [0, 1]), (1, [0, 1, 2, 3], [0, 1, 2, 3])])
    assert recovered(module, 4, 4, attn_mask_type=alias, cu_seqlens_q=cu(2, 4)) == want


@pytest.mark.parametrize("alias", ["padding,causal_bottom_right", "padding,causal,bottom,right"])
def test_a_comma_may_replace_an_underscore_of_a_mask_type(alias: str) -> None:
    module = DotProductAttention(H, (D, 4), qkv_format="bshd", attn_mask_type=alias)
    assert module.attn_mask_type == "padding_causal_bottom_right"
    lengths = {"cu_seqlens_q": cu(2, 1), "cu_seqlens_kv": cu(4, 3)}
    want = recovered(module, 4, 4, attn_mask_type="padding_causal_bottom_right", **lengths)
    assert recovered(module, 4, 4, attn_mask_type=alias, **lengths) == want


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


def bshd(*tensors: Tensor) -> list[Tensor]:
    return [t.transpose(1, 2) for t in tensors]


@pytest.mark.filterwarnings("error")
def test_what_a_mask_type_decides_is_read_without_a_warning() -> None:
    """Each warning came twice in cross-attention with a cache, whose check reads the window too."""
    causal, all_pairs = mask_types.MASK_TYPES["causal"], mask_types.MASK_TYPES["no_mask"]
    assert mask_types.is_bottom_right(causal, True) is False
    assert mask_types.normalise_window(causal, (3, 2)) == (3, 0)
    assert mask_types.normalise_window(all_pairs, (-1, 0)) == (-1, -1)

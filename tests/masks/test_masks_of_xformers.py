"""Every attn_bias class of xFormers equals its mask in docs/how-to/coming-from-xformers.md, pair by pair.

The rules are those of its documentation, for a block of nq queries and nk keys: where query i may see key j.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import pytest
import torch

import undivided
from undivided import masks
from undivided.masks import Mask

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "coming-from-xformers.md"
Rule = Callable[[int, int, int, int], bool]
Q, KV, PAD, STARTS, W, LEFT, RIGHT = (2, 4, 1), (5, 4, 3), 6, (1, 7, 13, 18), 3, 2, 1
OFFSETS_Q, OFFSETS_KV = [0, *accumulate(Q)], [0, *accumulate(KV)]


def everything(i: int, j: int, nq: int, nk: int) -> bool:
    return True


def from_the_first(i: int, j: int, nq: int, nk: int) -> bool:
    """Not farther from the first key than the query is from the first query."""
    return j <= i


def from_the_last(i: int, j: int, nq: int, nk: int) -> bool:
    """Not nearer to the last key than the query is to the last query."""
    return nk - 1 - j >= nq - 1 - i


def within(window: int, causal: Rule) -> Rule:
    """And fewer than `window` keys before the last key of `causal`."""
    return lambda i, j, nq, nk: causal(i, j, nq, nk) and not causal(i - window, j, nq, nk)


def local(left: int, right: int) -> Rule:
    return lambda i, j, nq, nk: i - left <= j + nq - nk <= i + right


PADDED = {"padded_kv": [n * PAD for n in range(len(KV) + 1)]}
GAPPY = {"padded_kv": [*STARTS]}
DENSE: dict[str, tuple[Mask, Rule]] = {
    "LowerTriangularMask": (masks.causal(align="top_left"), from_the_first),
    "LowerTriangularFromBottomRightMask": (masks.causal(align="bottom_right"), from_the_last),
    "LowerTriangularFromBottomRightLocalAttentionMask": (
        masks.window(W - 1, 0, align="bottom_right"),
        within(W, from_the_last),
    ),
    "LocalAttentionFromBottomRightMask": (masks.window(LEFT, RIGHT, align="bottom_right"), local(LEFT, RIGHT)),
}
PACKED: dict[str, tuple[Mask | None, Rule, dict[str, list[int]]]] = {
    "BlockDiagonalMask": (None, everything, {}),
    "BlockDiagonalCausalMask": (masks.causal(align="top_left"), from_the_first, {}),
    "BlockDiagonalCausalFromBottomRightMask": (masks.causal(align="bottom_right"), from_the_last, {}),
    "BlockDiagonalCausalLocalAttentionMask": (masks.window(W - 1, 0, align="top_left"), within(W, from_the_first), {}),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": (
        masks.window(W - 1, 0, align="bottom_right"),
        within(W, from_the_last),
        {},
    ),
    "BlockDiagonalPaddedKeysMask": (None, everything, PADDED),
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": (masks.causal(align="bottom_right"), from_the_last, PADDED),
    "BlockDiagonalLocalAttentionPaddedKeysMask": (
        masks.window(LEFT, RIGHT, align="bottom_right"),
        local(LEFT, RIGHT),
        PADDED,
    ),
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": (
        masks.window(W - 1, 0, align="bottom_right"),
        within(W, from_the_last),
        PADDED,
    ),
    "BlockDiagonalGappyKeysMask": (None, everything, GAPPY),
    "BlockDiagonalCausalWithOffsetGappyKeysMask": (masks.causal(align="bottom_right"), from_the_last, GAPPY),
    "BlockDiagonalLocalAttentionFromBottomRightGappyKeysMask": (
        masks.window(LEFT, RIGHT, align="bottom_right"),
        local(LEFT, RIGHT),
        GAPPY,
    ),
}
PAGED = {
    "PagedBlockDiagonalPaddedKeysMask": everything,
    "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask": from_the_last,
    "PagedBlockDiagonalCausalLocalPaddedKeysMask": within(W, from_the_last),
    "PagedBlockDiagonalGappyKeysMask": everything,
    "PagedBlockDiagonalCausalWithOffsetGappyKeysMask": from_the_last,
}


def block(rule: Rule, nq: int, nk: int) -> torch.Tensor:
    return torch.tensor([[rule(i, j, nq, nk) for j in range(nk)] for i in range(nq)]).reshape(nq, nk)


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize(("nq", "nk"), [(4, 7), (7, 4), (5, 5)])
def test_dense(name: str, nq: int, nk: int) -> None:
    mask, rule = DENSE[name]
    assert torch.equal(mask.to_dense(1, 1, nq, nk)[0, 0], block(rule, nq, nk))


@pytest.mark.parametrize("name", PACKED)
def test_packed(name: str) -> None:
    inside, rule, places = PACKED[name]
    mask = masks.documents(OFFSETS_Q, OFFSETS_KV, **places)
    mask = mask if inside is None else mask & inside
    starts = places.get("padded_kv", OFFSETS_KV)
    expected = torch.zeros(OFFSETS_Q[-1], starts[-1], dtype=torch.bool)
    for n, (nq, nk) in enumerate(zip(Q, KV, strict=True)):
        rows, keys = slice(OFFSETS_Q[n], OFFSETS_Q[n + 1]), slice(starts[n], starts[n] + nk)
        expected[rows, keys] = block(rule, nq, nk)
    assert torch.equal(mask.to_dense(1, 1, *expected.shape)[0, 0], expected)


@pytest.mark.parametrize("name", PAGED)
def test_paged(name: str) -> None:
    """Each sequence starts at its own first page; sequences with gaps start some keys later."""
    page_size, table = 4, torch.tensor([[5, 0], [1, 3], [2, 4]], dtype=torch.int32)
    skipped = (1, 3, 0) if "Gappy" in name else (0, 0, 0)
    left, right = W - 1 if "Local" in name else None, 0 if "Causal" in name else None
    band = masks.window(left, right, align="bottom_right")
    queries = [torch.randn(1, n, 2, 8) for n in Q]
    k, v = (torch.randn(6, page_size, 2, 8) for _ in range(2))
    if "Gappy" in name:
        longest = max(Q)
        q = torch.cat([torch.nn.functional.pad(t, (0, 0, 0, 0, 0, longest - t.shape[1])) for t in queries])
        mask = masks.lengths(list(KV), list(Q), kv_start=list(skipped), q_start=[0] * len(Q)) & band
        found = undivided.attention(q, k, v, layout="bshd", mask=mask, pages=table)
        outs = [row[:n] for row, n in zip(found, Q, strict=True)]
    else:
        mask = masks.documents(OFFSETS_Q, OFFSETS_KV) & band
        found = undivided.attention(torch.cat(queries, 1)[0], k, v, layout="thd", mask=mask, pages=table)
        outs = list(found.split(Q))
    for n, out in enumerate(outs):
        keys, values = (t[table[n].long()].flatten(0, 1)[skipped[n] : skipped[n] + KV[n]] for t in (k, v))
        pairs = masks.dense(block(PAGED[name], Q[n], KV[n]))
        want = undivided.attention(queries[n], keys[None], values[None], layout="bshd", mask=pairs, backend="reference")
        torch.testing.assert_close(out, want[0])


def test_the_page_names_every_class() -> None:
    """The table of the page has exactly the classes above."""
    table = PAGE.read_text(encoding="utf-8").split("## attn_bias, class by class")[1].split("## ")[0]
    named = set(re.findall(r"\b(?:Paged)?(?:BlockDiagonal|LowerTriangular|Local)\w*Mask\b", table))
    assert named == set(DENSE) | set(PACKED) | set(PAGED)

"""The first and the last key that each row of a mask allows, which is boolean or has a function."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from undivided import masks
from undivided.masks import Mask
from undivided.masks.normal_form import bounds, ranges
from undivided.masks.normal_form.bounds import row_hull


def row_by_row(allowed: Tensor) -> list[tuple[int, int]]:
    keys = allowed.shape[-1]
    rows = [[key for key, one in enumerate(row) if one] for row in allowed.reshape(-1, keys).tolist()]
    return [(seen[0], seen[-1] + 1) if seen else (keys, 0) for seen in rows]


def hulls(allowed: Tensor) -> list[tuple[int, int]]:
    start, stop = row_hull(allowed)
    assert start.shape == stop.shape == allowed.shape[:-1]
    return list(zip(start.flatten().tolist(), stop.flatten().tolist(), strict=True))


@pytest.mark.parametrize("keys", [1, 7, 8, 9, 64, 129, 300])
@pytest.mark.parametrize("density", [0.0, 0.01, 0.5, 1.0])
def test_hulls_of_rows(keys: int, density: float, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(keys)
    wide = torch.rand(2, 40, 2 * keys + 3, generator=generator) < density
    views = [wide[..., :keys].contiguous(), wide[..., 3 : keys + 3], wide[..., : 2 * keys : 2]]
    views += [wide[:1, :1, :keys].expand(2, 40, keys), wide[..., :1].expand(2, 40, keys), wide[0, 1:, :keys]]
    for large in (0, 1 << 60):
        monkeypatch.setattr(bounds, "_LARGE", large)
        for view in views:
            assert hulls(view) == row_by_row(view)


def test_any_byte_other_than_0_allows_a_pair() -> None:
    allowed = torch.zeros(200, 200, dtype=torch.uint8)
    allowed[3, 17], allowed[3, 90], allowed[5, 199] = 255, 2, 128
    start, stop = row_hull(allowed.view(torch.bool))
    assert (start[3], stop[3]) == (17, 91)
    assert (start[5], stop[5]) == (199, 200)


def odd(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q + k + b) % 2 == 1


NARROW: dict[str, Callable[[int], Mask]] = {
    "window": lambda n: masks.window(16, 0),
    "documents": lambda n: masks.documents(torch.arange(0, n + 1, 4)),
    "padded documents": lambda n: masks.documents(
        torch.arange(0, n // 2 + 1, 4), padded_q=torch.arange(0, n + 1, 8), padded_kv=torch.arange(0, n + 1, 8)
    ),
    "chunks": lambda n: masks.chunks(8, align="bottom_right"),
    "left padding": lambda n: masks.window(9, 0, "bottom_right") & masks.lengths([n - 5, 3], kv_start=[5, n - 3]),
}


@pytest.mark.parametrize("name", NARROW)
def test_a_function_in_a_narrow_mask_is_evaluated_for_few_pairs(name: str) -> None:
    """It was evaluated for every pair of a query and a key: 2.5 seconds for 16,000 tokens."""
    seen: list[int] = []

    def counted(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen.append(q.numel() * k.numel())
        return odd(b, h, q, k)

    batch = 2 if name == "left padding" else 1
    counts = []
    for length in (4096, 8192):
        seen.clear()
        (NARROW[name](length) & masks.predicate(counted)).intervals(length, length, batch=batch)
        counts.append(sum(seen))
    assert counts[0] < 4096 * 2048
    assert counts[1] < 2.5 * counts[0]


@pytest.mark.parametrize("name", NARROW)
def test_the_pairs_of_a_function_in_a_narrow_mask_are_those_of_all(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    length, batch = 1200, 2 if name == "left padding" else 1
    found = (NARROW[name](length) & masks.predicate(odd)).to_dense(batch, 1, length, length)
    monkeypatch.setattr(ranges, "_MANY_PAIRS", 1 << 60)
    expected = (NARROW[name](length) & masks.predicate(odd)).to_dense(batch, 1, length, length)
    assert torch.equal(found, expected)
    assert found.any()


ROW, KEY = torch.arange(12)[:, None], torch.arange(300)[None]
Rule = Callable[[int, int, int, int], bool]
# a mask for 3 sequences, 2 heads, 12 queries and 300 keys, and which pairs (b, h, i, j) it allows
WHOLE: dict[str, tuple[Mask, Rule]] = {
    "padding": (
        masks.dense((torch.tensor([300, 170, 0])[:, None] > KEY)[:, None, None]),
        lambda b, h, i, j: j < (300, 170, 0)[b],
    ),
    "one number per row": (masks.dense(ROW != 5), lambda b, h, i, j: i != 5),
    "causal": (masks.dense(ROW + 288 >= KEY), lambda b, h, i, j: i + 288 >= j),
    "two masks": (
        masks.dense(ROW + 100 >= KEY) & masks.dense(ROW + 50 < KEY),
        lambda b, h, i, j: i + 50 < j <= i + 100,
    ),
    "a gap that another mask hides": (
        masks.dense((KEY < 80) | (KEY > 200)) & masks.dense((KEY < 100).expand(12, 300)),
        lambda b, h, i, j: j < 80,
    ),
    "the same in all heads": (masks.dense((ROW + 288 >= KEY).expand(1, 2, 12, 300)), lambda b, h, i, j: i + 288 >= j),
    "bytes": (masks.dense((ROW + 288 >= KEY).to(torch.uint8).mul(2).view(torch.bool)), lambda b, h, i, j: i + 288 >= j),
    "a function": (
        masks.predicate(lambda b, h, i, j: (j >= i) & (j < i + 100 + b)),
        lambda b, h, i, j: i <= j < i + 100 + b,
    ),
    "a function in a window": (
        masks.predicate(lambda b, h, i, j: j >= 250) & masks.window(64, 0, "bottom_right"),
        lambda b, h, i, j: j >= 250 and i + 288 - 64 <= j <= i + 288,
    ),
}
BROKEN: dict[str, tuple[Mask, Rule]] = {
    "a gap": (masks.dense((KEY != 7).expand(12, 300)), lambda b, h, i, j: j != 7),
    "by head": (
        masks.dense((torch.tensor([300, 170])[:, None] > KEY)[None, :, None]),
        lambda b, h, i, j: j < (300, 170)[h],
    ),
    "a function": (masks.predicate(odd), lambda b, h, i, j: (i + j + b) % 2 == 1),
}


@pytest.mark.parametrize("name", [*WHOLE, *(f"not {name}" for name in BROKEN)])
def test_ranges_that_are_the_whole_mask_need_no_pairs_beside_them(name: str) -> None:
    mask, rule = WHOLE[name] if name in WHOLE else BROKEN[name.removeprefix("not ")]
    form = mask.normal_form(3, 2, 12, 300, "cpu")
    assert form.exact == (name in WHOLE)
    found = form.allowed(slice(0, 3), slice(0, 12), slice(0, 300), slice(0, 2)).expand(3, 2, 12, 300)
    places = itertools.product(range(3), range(2), range(12), range(300))
    assert found.flatten().tolist() == [rule(*place) for place in places]

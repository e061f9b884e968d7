"""The first and the last key that each row of a mask allows, which is boolean or has a function."""

from __future__ import annotations

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

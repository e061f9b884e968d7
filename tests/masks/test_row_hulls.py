"""The first and the last key that each row of a boolean mask allows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from undivided.masks.normal_form import bounds
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

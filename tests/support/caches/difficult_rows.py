"""Rows whose quantised numbers are easily wrong."""

from __future__ import annotations

import torch
from torch import Tensor


def difficult_rows(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Numbers of all magnitudes; rows of zeros, with NaN or infinity, of subnormal numbers, halfway between steps."""
    make = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=make) * torch.exp(4 * torch.randn((*shape[:-1], 1), generator=make))
    rows = x.view(-1, shape[-1])
    rows[0::13] = 0.0
    rows[1::13, -1] = torch.nan
    rows[2::13, 0] = torch.inf
    rows[3::13, 0] = -torch.inf
    rows[4::13] *= 1e-39
    rows[5::13] *= -0.0
    rows[6::13] = torch.randint(-254, 255, rows[6::13].shape, generator=make) / 2
    rows[6::13, 0] = 127.0
    rows[7::13] = 1e-45
    rows[8::13] = 448 * torch.exp2(-12 * torch.rand(rows[8::13].shape, generator=make))
    rows[8::13, 0] = 448.0
    rows[9::13] = torch.randint(-14, 15, rows[9::13].shape, generator=make) / 2
    rows[9::13, 0] = 7.0
    return x.to(dtype)

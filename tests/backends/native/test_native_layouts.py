"""Rows of keys that are far apart in memory are copied, which changes no bit, or read in splits if rows are few."""

from __future__ import annotations

import pytest
import torch
from native_oracle import ALLOWED, apart, needs_library

import undivided
from undivided import masks

HEADS = 32
"""So many heads put the rows of "bshd" 2 KiB and more apart: those of K are copied, if five panels read them."""


MASKS = {
    "full": None,
    "causal": masks.causal(),
    "window": masks.window(100, 0),
    "documents": masks.documents(torch.tensor([0, 33, 200, 300])),
}


@needs_library
@pytest.mark.parametrize("mask", list(MASKS))
@pytest.mark.parametrize("size", [64, 65])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_far_apart_give_the_same_bits(dtype: torch.dtype, size: int, mask: str) -> None:
    shape, seed = (1, HEADS, 300, size), torch.Generator().manual_seed(0)
    near = [torch.randn(shape, generator=seed).to(dtype) for _ in range(3)]
    memory = [torch.full((1, 310, HEADS, size), torch.nan, dtype=dtype) for _ in near]
    far = [room[:, 5:305].copy_(x.transpose(1, 2)) for room, x in zip(memory, near, strict=True)]
    want = undivided.attention(*near, layout="bhsd", mask=MASKS[mask], backend="native")
    got = undivided.attention(*far, layout="bshd", mask=MASKS[mask], backend="native")
    assert torch.equal(got.transpose(1, 2), want)


@needs_library
@pytest.mark.parametrize("mask", ["full", "causal", "window", "sinks"])
@pytest.mark.parametrize("dtype", ALLOWED, ids=str)
def test_few_rows_over_long_sequences_of_unequal_lengths(dtype: torch.dtype, mask: str) -> None:
    seed = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, n, 2, 16, generator=seed).to(dtype) for n in (33, 9000, 9000))
    for tensor in (k, v):
        tensor[1, 4500:] = torch.nan
    options = {
        "full": masks.window(None, None),
        "causal": masks.causal("bottom_right"),
        "window": masks.window(6000, 0, align="bottom_right"),
        "sinks": masks.window(40, 0, align="bottom_right") | masks.sinks(3, align="bottom_right"),
    }
    both = options[mask] & masks.lengths([9000, 4500, 100])
    got, wanted = (
        undivided.attention(q, k, v, layout="bshd", mask=both, backend=name) for name in ("native", "reference")
    )
    assert apart(got, wanted.double()) < 2 * ALLOWED[dtype]

"""Decoding over quantised keys and values: every stored number, and any shape, beside the reference."""

from __future__ import annotations

from typing import Any

import torch
from native_oracle import ALLOWED, apart
from torch import Tensor

import undivided
from undivided import masks
from undivided.quantization import Format, quantize

CODES = torch.arange(256, dtype=torch.uint8)
BYTES: dict[Format, torch.dtype] = {
    "int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2,
}  # fmt: skip


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def read_values(heads: int, format: Format, dtype: torch.dtype) -> None:
    """A single key has the weight 1, so the output is its value, which bf16 holds; -128, subnormal numbers, infinity
    and NaN included."""
    v = CODES.view(BYTES[format]).view(1, 1, 1, 256)
    one = torch.ones(1, 1, 1)
    out = undivided.attention(
        torch.ones(1, heads, 1, 256, dtype=dtype), torch.zeros_like(v.view(torch.int8)).view(v.dtype), v, layout="bhsd",
        k_scale=one, v_scale=one, backend="native",
    )  # fmt: skip
    assert torch.equal(
        out.bfloat16().float().nan_to_num(nan=7e9), v.float().nan_to_num(nan=7e9).expand(1, heads, 1, 256)
    )


def read_keys(heads: int, format: Format) -> None:
    """A query that is 1 in one place and 0 elsewhere has the number in that place as its score. The log-sum-exp adds
    the logarithm of the weight, which is 1 up to 6e-8."""
    numbers = CODES.view(BYTES[format]).float()
    numbers = numbers[numbers.isfinite()]
    numbers = torch.cat((numbers, numbers.new_zeros(-len(numbers) % 32)))
    size = len(numbers)
    k = numbers.to(BYTES[format]).view(1, 1, 1, size).expand(size, 1, 1, size)
    one = torch.ones(1, 1, 1).expand(size, 1, 1)
    q = torch.eye(size, dtype=torch.bfloat16).view(size, 1, 1, size).expand(size, heads, 1, size)
    _, lse = undivided.attention(
        q, k, k, layout="bhsd", k_scale=one, v_scale=one, scale=1.0, return_lse=True, backend="native"
    )
    want = numbers.view(size, 1, 1).expand(size, heads, 1)
    assert ((lse - want).abs() <= want.abs() * 2**-23 + 2**-23).all()


def decode(format: Format | None, heads: int, size: tuple[int, int], keys: int) -> None:
    """Two sequences of `keys` and half as many keys, `heads` query heads for each of two key heads of these sizes."""
    q = draw(2, 1, 2 * heads, size[0], seed=heads).bfloat16()
    k, v = (draw(2, keys, 2, n, seed=n) for n in size)
    asked: dict[str, Any] = {"layout": "bshd", "mask": masks.lengths(torch.tensor([keys, (keys + 1) // 2]))}
    if format is None:
        k, v = k.bfloat16(), v.bfloat16()
        wide = (k.double(), v.double())
    else:
        (k, k_scale), (v, v_scale) = quantize(k, format), quantize(v, format)
        asked |= {"k_scale": k_scale, "v_scale": v_scale}
        wide = (k, v)
    out, lse = undivided.attention(q, k, v, return_lse=True, backend="native", **asked)
    want, want_lse = undivided.attention(q.double(), *wide, return_lse=True, backend="reference", **asked)
    assert apart(out, want) < ALLOWED[torch.bfloat16], heads
    assert apart(lse, want_lse) < ALLOWED[torch.bfloat16], heads

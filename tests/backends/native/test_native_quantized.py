"""The native kernel's decoding over quantised keys and values, and over bf16 by dot products: every stored number, and
every shape of its micro-kernels (rows, head sizes, odd numbers of keys)."""

from __future__ import annotations

import pytest
import torch
from native_oracle import ALLOWED, apart, needs_library
from torch import Tensor

import undivided
from undivided import masks
from undivided.quantization import FORMATS, Format, quantize

pytestmark = needs_library

CODES = torch.arange(256, dtype=torch.uint8)
BYTES = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("format", BYTES)
@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_every_8_bit_value_is_read_exactly(heads: int, format: str, dtype: torch.dtype) -> None:
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


@pytest.mark.parametrize("format", BYTES)
@pytest.mark.parametrize("heads", [1, 4])
def test_every_8_bit_key_is_read_exactly(heads: int, format: str) -> None:
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


@pytest.mark.parametrize("keys", [1, 2, 17, 64, 131])
@pytest.mark.parametrize("size", [(32, 32), (96, 64), (128, 160), (256, 128)], ids=str)
@pytest.mark.parametrize("format", [None, *FORMATS])
def test_all_shapes_of_the_micro_kernels(format: Format | None, size: tuple[int, int], keys: int) -> None:
    for heads in (1, 2, 3, 4, 5, 8, 11, 20):
        q = draw(2, 1, 2 * heads, size[0], seed=heads).bfloat16()
        k, v = (draw(2, keys, 2, n, seed=n) for n in size)
        asked: dict[str, object] = {"layout": "bshd", "mask": masks.lengths(torch.tensor([keys, (keys + 1) // 2]))}
        if format is None:
            k, v = k.bfloat16(), v.bfloat16()
            wide = (k.double(), v.double())
        else:
            (k, k_scale), (v, v_scale) = quantize(k, format), quantize(v, format)
            asked |= {"k_scale": k_scale, "v_scale": v_scale}
            wide = (k, v)
        out, lse = undivided.attention(q, k, v, return_lse=True, backend="native", **asked)  # type: ignore[call-overload]
        want, want_lse = undivided.attention(  # type: ignore[call-overload]
            q.double(), *wide, return_lse=True, backend="reference", **asked
        )
        assert apart(out, want) < ALLOWED[torch.bfloat16], heads
        assert apart(lse, want_lse) < ALLOWED[torch.bfloat16], heads


@pytest.mark.parametrize("heads", [1, 4, 8, 20])
@pytest.mark.parametrize("keys", [33, 34, 201])
def test_an_infinite_value_stays_infinite(keys: int, heads: int) -> None:
    """Values are multiplied in pairs: the place beside the last of an odd number is 0, not a repetition."""
    q, k, v = (draw(1, n, 1, 64, seed=n).bfloat16() for n in (1, keys, keys))
    v[0, keys - 1, 0, 0] = torch.inf
    out = undivided.attention(q.expand(1, 1, heads, 64), k, v, layout="bshd", backend="native")
    assert (out[..., 0] == torch.inf).all()
    assert out[..., 1:].isfinite().all()

"""The native kernel's decoding over quantised keys and values, and over bf16 by dot products: every stored number, and
every shape of its micro-kernels (rows, head sizes, odd numbers of keys)."""

from __future__ import annotations

import pytest
import stored_numbers
import torch
from native_oracle import needs_library
from stored_numbers import draw

import undivided
from undivided.quantization import FORMATS, Format

pytestmark = needs_library


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("format", stored_numbers.BYTES)
@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_every_8_bit_value_is_read_exactly(heads: int, format: Format, dtype: torch.dtype) -> None:
    stored_numbers.read_values(heads, format, dtype)


@pytest.mark.parametrize("format", stored_numbers.BYTES)
@pytest.mark.parametrize("heads", [1, 4])
def test_every_8_bit_key_is_read_exactly(heads: int, format: Format) -> None:
    stored_numbers.read_keys(heads, format)


@pytest.mark.parametrize("keys", [1, 2, 3, 17, 64, 131])
@pytest.mark.parametrize("size", [(32, 32), (64, 64), (96, 64), (128, 160), (256, 128)], ids=str)
@pytest.mark.parametrize("format", [None, *FORMATS])
def test_all_shapes_of_the_micro_kernels(format: Format | None, size: tuple[int, int], keys: int) -> None:
    for heads in (1, 2, 3, 4, 5, 8, 11, 20):
        stored_numbers.decode(format, heads, size, keys)


@pytest.mark.parametrize("format", [None, *stored_numbers.BYTES])
def test_head_sizes_between_the_vectors_of_a_load(format: Format | None) -> None:
    for heads in (1, 2, 4):
        stored_numbers.decode(format, heads, (20, 44), 19)


@pytest.mark.parametrize("heads", [1, 4, 8, 20])
@pytest.mark.parametrize("keys", [33, 34, 201])
def test_an_infinite_value_stays_infinite(keys: int, heads: int) -> None:
    """Values are multiplied in pairs: the place beside the last of an odd number is 0, not a repetition."""
    q, k, v = (draw(1, n, 1, 64, seed=n).bfloat16() for n in (1, keys, keys))
    v[0, keys - 1, 0, 0] = torch.inf
    out = undivided.attention(q.expand(1, 1, heads, 64), k, v, layout="bshd", backend="native")
    assert (out[..., 0] == torch.inf).all()
    assert out[..., 1:].isfinite().all()

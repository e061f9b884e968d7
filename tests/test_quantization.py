"""`undivided.quantization`: what the formats store, how exact they are, and what they refuse."""

import math

import pytest
import torch

from undivided.errors import InputError
from undivided.quantization import DTYPES, FORMATS, GROUP, dequantize, empty, format_of, quantize

LARGEST = {"int8": 127, "fp8_e4m3": 448, "fp8_e5m2": 57344, "int4": 7}
RELATIVE = {"fp8_e4m3": 2**-4, "fp8_e5m2": 2**-3}  # half the distance of neighbours, relative to the number


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_shapes_and_dtypes(format: str, dtype: torch.dtype) -> None:
    values, scale = quantize(numbers(2, 5, 3, 64, dtype=dtype), format)
    assert values.dtype == DTYPES[format]
    assert format_of(values.dtype) == format
    assert scale.dtype == torch.float32
    assert values.shape == (2, 5, 3, 32 if format == "int4" else 64)
    assert scale.shape == ((2, 5, 3, 2) if format == "int4" else (2, 5, 3))
    assert dequantize(values, scale, dtype).dtype == dtype
    reserved = empty(format, (2, 5, 3, 64))
    assert [(t.shape, t.dtype) for t in reserved] == [(t.shape, t.dtype) for t in (values, scale)]


@pytest.mark.parametrize("format", FORMATS)
def test_the_error_is_at_most_half_the_distance_of_neighbours(format: str) -> None:
    x = numbers(64, 128)
    values, scale = quantize(x, format)
    error = (dequantize(values, scale, torch.float64) - x.double()).abs()
    steps = scale.double().repeat_interleave(x.shape[-1] // (scale.shape[-1] if format == "int4" else 1), -1)
    steps = steps.view_as(x)
    rounding = 1 + 2.0**-20
    if format in RELATIVE:
        smallest = {"fp8_e4m3": 2.0**-9, "fp8_e5m2": 2.0**-16}[format]
        bound = torch.maximum(x.double().abs() * RELATIVE[format], steps * smallest / 2)
    else:
        bound = steps / 2
    assert bool((error <= bound * rounding).all())


@pytest.mark.parametrize("format", FORMATS)
def test_the_largest_number_of_a_row_is_kept(format: str) -> None:
    x = numbers(16, 32)
    found = dequantize(*quantize(x, format), torch.float32)
    largest = x.abs().argmax(-1, keepdim=True)
    torch.testing.assert_close(found.gather(-1, largest), x.gather(-1, largest), rtol=1e-6, atol=0)


def test_int4_has_the_even_number_in_the_low_bits() -> None:
    x = torch.zeros(GROUP)
    x[0], x[1], x[2] = 7.0, -7.0, 3.0
    values, scale = quantize(x, "int4")
    assert scale.tolist() == [1.0]
    assert values[:3].tolist() == [15 | 1 << 4, 11 | 8 << 4, 8 | 8 << 4]
    assert dequantize(values, scale, torch.float32).tolist() == x.tolist()
    assert dequantize(torch.zeros_like(values), scale, torch.float32)[0] == -8


@pytest.mark.parametrize("format", FORMATS)
def test_zeros_and_tiny_numbers_stay_finite(format: str) -> None:
    for x in (torch.zeros(3, 32), torch.full((3, 32), 1e-44), numbers(3, 32) * 1e-40):
        found = dequantize(*quantize(x, format), torch.float32)
        assert bool(found.isfinite().all())
        assert bool((found.abs() <= 1.5 * x.abs().max()).all())
    assert quantize(torch.zeros(3, 32), format).scale.abs().max() == 0


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_becomes_nan_as_a_whole(format: str, bad: float) -> None:
    x = numbers(3, 64)
    x[1, 5] = bad
    found = dequantize(*quantize(x, format), torch.float32)
    rows = found.unflatten(-1, (-1, GROUP)) if format == "int4" else found.unsqueeze(1)
    assert bool(rows[1, 0].isnan().all())
    assert bool(rows[0].isfinite().all())
    assert bool(rows[2].isfinite().all())
    assert bool(rows[1, 1:].isfinite().all())


@pytest.mark.parametrize("format", FORMATS)
def test_no_rows(format: str) -> None:
    values, scale = quantize(numbers(0, 4, 32), format)
    assert dequantize(values, scale, torch.float32).shape == (0, 4, 32)


def test_no_gradient_passes_through() -> None:
    values, scale = quantize(numbers(2, 8).requires_grad_(), "int8")
    assert not scale.requires_grad
    assert not values.requires_grad


def test_refused() -> None:
    x = numbers(2, 48)
    with pytest.raises(InputError, match="format must be one of 'int8', 'fp8_e4m3', 'fp8_e5m2', 'int4', got 'int3'"):
        quantize(x, "int3")
    with pytest.raises(InputError, match=r"x must have a last axis that is a multiple of 32 for int4, got 48\n  HINT"):
        quantize(x, "int4")
    with pytest.raises(InputError, match=r"x must be float16, bfloat16, float32 or float64, got torch\.int64"):
        quantize(torch.arange(4), "int8")
    with pytest.raises(InputError, match="x must have a last axis of at least one number"):
        quantize(torch.zeros(3, 0), "int8")
    values, scale = quantize(x, "int8")
    with pytest.raises(InputError, match=r"scale must have one number per row of values, shape \[2\], got \[2, 1\]"):
        dequantize(values, scale.unsqueeze(-1), torch.float32)
    with pytest.raises(InputError, match=r"scale must be a float32 tensor, got torch\.float16"):
        dequantize(values, scale.half(), torch.float32)
    with pytest.raises(
        InputError, match=r"values must have the dtype of a format \(int8 for int8, .*\), got torch\.int32"
    ):
        dequantize(values.int(), scale, torch.float32)
    with pytest.raises(InputError, match=r"dtype must be float16, .* got torch\.int8"):
        dequantize(values, scale, torch.int8)

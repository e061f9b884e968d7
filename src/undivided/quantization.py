"""Keys and values in 8 or 4 bits: the formats, and the conversion from and to floating point.

A number is ``value * scale``. Each row (the numbers of one token and head) has one fp32 scale; int4 has one per group
of 32 numbers.

    int8       values int8 [..., D], scale [...] = amax / 127
    fp8_e4m3   values float8_e4m3fn [..., D], scale [...] = amax / 448
    fp8_e5m2   values float8_e5m2 [..., D], scale [...] = amax / 57344
    int4       values uint8 [..., D/2], scale [..., D/32] = amax / 7; number 2i is in the low 4 bits of byte i, number
               2i + 1 in the high 4 bits, both stored as value + 8 with value from -7 to 7
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from undivided.arguments.checks import as_device, as_integer, check_tensor, check_type
from undivided.arguments.signature import checked_call
from undivided.arguments.tensors import dtype_name
from undivided.errors import InputError

__all__ = ["FORMATS", "Format", "Quantized", "dequantize", "empty", "format_of", "quantize"]

Format = Literal["int8", "fp8_e4m3", "fp8_e5m2", "int4"]
FORMATS: tuple[Format, ...] = get_args(Format)
"""The names of the formats."""

FORMAT_CODES: dict[Format | None, int] = {None: 0, **{format: number for number, format in enumerate(FORMATS, 1)}}
"""The number of each format in the records of the native kernel, and in Triton's; 0 is not quantised."""

GROUP = 32
"""Numbers per scale of int4."""

DTYPES: dict[Format, torch.dtype] = {
    "int8": torch.int8,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int4": torch.uint8,
}
"""The dtype of the values of each format."""

_LARGEST: dict[Format, float] = {"int8": 127.0, "fp8_e4m3": 448.0, "fp8_e5m2": 57344.0, "int4": 7.0}
_FORMAT_OF = {dtype: format for format, dtype in DTYPES.items()}


class Quantized(NamedTuple):
    """Values of one format and their fp32 scales; the number is ``value * scale``."""

    values: Tensor
    scale: Tensor


@checked_call
def quantize(x: Tensor, format: Format) -> Quantized:
    """The numbers of `x` in `format`: the nearest values, with the smallest scale that holds the largest of a row.

    A row of zeros has scale 0. A row (int4: a group) with NaN, infinity or numbers too large for its fp32 scale becomes
    NaN as a whole: its values are 0, its scale is NaN or infinite. No gradient passes through.

    Args:
        x: [..., D] floating point; for int4, D is a multiple of 32.
        format: one of `FORMATS`.

    Returns:
        values [..., D] (int4: [..., D/2]) in the format's dtype, and scale [...] (int4: [..., D/32]) in fp32.

    Raises:
        InputError: `x` is not floating point, its last axis does not fit the format, or the format is unknown.

    >>> import torch
    >>> from undivided.quantization import dequantize, quantize
    >>> values, scale = quantize(torch.tensor([[1.0, -0.5, 0.25, 0.0]]), "int8")
    >>> values.tolist()
    [[127, -64, 32, 0]]
    >>> dequantize(values, scale, torch.float32)
    tensor([[ 1.0000, -0.5039,  0.2520,  0.0000]])
    """
    check_format("format", format)
    check_tensor("x", x)
    if not x.is_floating_point() or x.element_size() == 1:
        raise InputError("x", "be float16, bfloat16, float32 or float64", str(x.dtype), hint="x.float()")
    if x.dim() == 0 or x.shape[-1] == 0:
        raise InputError("x", "have a last axis of at least one number", f"shape {list(x.shape)}")
    check_head_size("x", x.shape[-1], format)
    numbers = x.detach() if x.dtype == torch.float64 else x.detach().float()
    if format == "int4":
        numbers = numbers.unflatten(-1, (-1, GROUP))
    largest = _LARGEST[format]
    scale = (numbers.abs().amax(-1) / largest).float()
    # 0 / 0, and NaN or infinity in the row; clamp: a subnormal scale is inexact
    scaled = (numbers / scale.unsqueeze(-1)).nan_to_num_(0.0).clamp_(-largest, largest)
    if format not in ("int8", "int4"):
        return Quantized(scaled.to(DTYPES[format]), scale)
    values = scaled.round_().to(torch.int8)
    return Quantized(values if format == "int8" else _pack(values.flatten(-2)), scale)


@checked_call
def dequantize(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``values * scale`` as [..., D] in `dtype`; the product is computed in fp32 (fp64 for float64).

    Args:
        values: [..., D] in a format's dtype (int4: uint8 [..., D/2]).
        scale: fp32 [...] (int4: [..., D/32]).
        dtype: float16, bfloat16, float32 or float64.

    Returns:
        The numbers, [..., D].

    Raises:
        InputError: the dtype of the values belongs to no format, or the scale does not fit them.

    >>> import torch
    >>> from undivided.quantization import dequantize, quantize
    >>> x = torch.tensor([[448.0, 18.0, -0.5]])
    >>> dequantize(*quantize(x, "fp8_e4m3"), torch.float32)
    tensor([[448.0000,  18.0000,  -0.5000]])
    """
    check_tensor("values", values)
    check_tensor("scale", scale)
    format = format_of(values.dtype)
    if format is None:
        raise InputError("values", f"have the dtype of a format ({names_of_dtypes()})", str(values.dtype))
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize == 1:
        raise InputError("dtype", "be float16, bfloat16, float32 or float64", str(dtype))
    check_scale("scale", scale, "values", values)
    return unchecked_dequantize(values, scale, dtype)


def unchecked_dequantize(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`dequantize` without its checks."""
    computed_in = torch.float64 if dtype == torch.float64 else torch.float32
    factor = scale.to(computed_in).unsqueeze(-1)
    if values.dtype != torch.uint8:
        return (values.to(computed_in) * factor).to(dtype)
    groups: Tensor = _unpack(values).to(computed_in).unflatten(-1, (-1, GROUP)) * factor
    return groups.flatten(-2).to(dtype)


@checked_call
def empty(format: Format, shape: tuple[int, ...], device: torch.device | str | None = None) -> Quantized:
    """Uninitialised values and scales for numbers of shape ``[..., D]``, as `quantize` would return them.

    Args:
        format: one of `FORMATS`.
        shape: the shape of the numbers; for int4, the last size is a multiple of 32.
        device: the device of both tensors; torch's default if None.

    Returns:
        values and scale, whose memory holds anything.

    Raises:
        InputError: the format is unknown, the last size does not fit it, or shape or device is not one.

    >>> from undivided.quantization import empty
    >>> values, scale = empty("int4", (2, 100, 8, 128))
    >>> values.shape, scale.shape
    (torch.Size([2, 100, 8, 64]), torch.Size([2, 100, 8, 4]))
    """
    check_format("format", format)
    if not isinstance(shape, list | tuple) or not shape:
        raise InputError("shape", "be a tuple of at least one int", repr(shape))
    *rows, size = [as_integer(f"shape[{n}]", value, 0) for n, value in enumerate(shape)]
    device = None if device is None else as_device("device", device)
    check_head_size("shape", size, format)
    if format == "int4":
        return Quantized(
            torch.empty((*rows, size // 2), dtype=torch.uint8, device=device),
            torch.empty((*rows, size // GROUP), dtype=torch.float32, device=device),
        )
    values = torch.empty((*rows, size), dtype=DTYPES[format], device=device)
    return Quantized(values, torch.empty(rows, dtype=torch.float32, device=device))


@checked_call
def format_of(dtype: torch.dtype) -> Format | None:
    """The format whose values have this dtype; None if there is none.

    Args:
        dtype: a dtype of torch.

    Returns:
        One of `FORMATS`, or None.

    Raises:
        InputError: it is not a dtype.

    >>> import torch
    >>> from undivided.quantization import format_of
    >>> format_of(torch.uint8), format_of(torch.bfloat16)
    ('int4', None)
    """
    check_type("dtype", dtype, torch.dtype, "a torch.dtype")
    return _FORMAT_OF.get(dtype)


def head_size(values: Tensor) -> int:
    """The number of numbers in the last axis, which is twice its length for int4."""
    return values.shape[-1] * (2 if values.dtype == torch.uint8 else 1)


def check_format(argument: str, format: object) -> None:
    """InputError unless it is the name of a format."""
    if not isinstance(format, str) or format not in FORMATS:
        near = [name for name in FORMATS if isinstance(format, str) and format and name.startswith(format.lower()[:3])]
        hint = " or ".join(map(repr, near)) or None
        raise InputError(argument, f"be one of {', '.join(map(repr, FORMATS))}", repr(format), hint)


def check_head_size(argument: str, size: int, format: Format, is_size: bool = False) -> None:
    """InputError unless a last axis of this size can be stored in the format. `is_size`: the argument is the size."""
    if format == "int4" and (size == 0 or size % GROUP):
        must = f"{'be' if is_size else 'have a last axis that is'} a multiple of {GROUP} for int4"
        raise InputError(argument, must, size, hint="int8 and fp8 take any head size")


def check_scale(argument: str, scale: Tensor, values_name: str, values: Tensor) -> None:
    """InputError unless it is the fp32 scale of these quantised values."""
    is_int4 = values.dtype == DTYPES["int4"]
    if is_int4:
        check_head_size(values_name, head_size(values), "int4")
        shape = (*values.shape[:-1], head_size(values) // GROUP)
    else:
        shape = tuple(values.shape[:-1])
    if scale.dtype != torch.float32:
        raise InputError(argument, "be a float32 tensor", str(scale.dtype), hint=f"{argument}.float()")
    if tuple(scale.shape) != shape:
        part = f"{GROUP} numbers" if is_int4 else "row"
        must = f"have one number per {part} of {values_name}, shape {list(shape)}"
        raise InputError(argument, must, list(scale.shape))
    if scale.device != values.device:
        raise InputError(argument, f"be on the device of {values_name} ({values.device})", str(scale.device))


def names_of_dtypes() -> str:
    """The dtype of each format, for a message."""
    return ", ".join(f"{dtype_name(dtype)} for {format}" for format, dtype in DTYPES.items())


def _pack(values: Tensor) -> Tensor:
    """int8 [..., D] from -8 to 7 as uint8 [..., D/2]."""
    pairs: Tensor = (values + 8).view(torch.uint8).unflatten(-1, (-1, 2))
    return pairs[..., 0] | (pairs[..., 1] << 4)


def _unpack(packed: Tensor) -> Tensor:
    """The inverse of `_pack`."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2).view(torch.int8) - 8

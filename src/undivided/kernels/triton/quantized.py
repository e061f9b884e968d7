"""Rows of quantised keys and values, dequantised in registers. `undivided.quantization` defines the formats.

Values are read as bytes and converted with integer operations: only some GPUs convert fp8 in hardware, not all to the
same type, and Triton's interpreter must give the same numbers.
"""

import triton
import triton.language as tl

from undivided.kernels.triton.config import FORMATS
from undivided.kernels.triton.tile import key_offsets, load_rows

INT8 = tl.constexpr(FORMATS["int8"])
FP8_E5M2 = tl.constexpr(FORMATS["fp8_e5m2"])
INT4 = tl.constexpr(FORMATS["int4"])
GROUP = tl.constexpr(32)
"""Numbers per scale of int4."""


@triton.jit
def load_numbers(
    base,
    offsets,
    scales,
    o_n,
    b,
    scale_n,
    pages,
    pages_b,
    num_pages,
    scale_page,
    ok_n,
    DIM: tl.constexpr,
    first,
    WIDTH: tl.constexpr,
    WHOLE: tl.constexpr,
    CHECKED: tl.constexpr,
    PAGE: tl.constexpr,
    FORMAT: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """As `load_rows`, for rows in any format, as numbers of DTYPE: ``value * scale`` in fp32, rounded once.

    Args:
        scales: of this head; scale_n and scale_page are the strides of key and page. Those of int4 are contiguous.
        o_n: the keys [N].
    """
    if FORMAT == 0:
        return load_rows(base, offsets, ok_n, DIM, first, WIDTH, WHOLE, CHECKED)
    at = scales + key_offsets(o_n, b, scale_n, pages, pages_b, num_pages, scale_page, PAGE)
    if FORMAT == INT4:
        packed = load_rows(base, offsets, ok_n, DIM // 2, first // 2, WIDTH // 2, WHOLE, CHECKED)
        o_g = first // GROUP + tl.arange(0, WIDTH // GROUP)
        inside = ok_n[:, None] & (o_g < DIM // GROUP)[None, :]
        scale = tl.load(at[:, None] + o_g[None, :], mask=inside, other=0.0)[:, :, None]
        pairs = packed.reshape(packed.shape[0], WIDTH // GROUP, GROUP // 2)
        low = ((pairs & 15).to(tl.float32) - 8.0) * scale
        high = ((pairs >> 4).to(tl.float32) - 8.0) * scale
        return tl.join(low, high).reshape(packed.shape[0], WIDTH).to(DTYPE)
    stored = load_rows(base, offsets, ok_n, DIM, first, WIDTH, WHOLE, CHECKED)
    scale = tl.load(at, mask=ok_n, other=0.0)[:, None]
    if FORMAT == INT8:
        values = stored.to(tl.float32)
    elif FORMAT == FP8_E5M2:
        values = _from_e5m2(stored)
    else:
        values = _from_e4m3(stored)
    return (values * scale).to(DTYPE)


@triton.jit
def _from_e5m2(stored):
    """The numbers in fp32 of bytes in e5m2, the upper half of fp16."""
    return (stored.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _from_e4m3(stored):
    """The numbers in fp32 of bytes in e4m3: exponent and fraction are those of an fp16 that is 2^8 times smaller."""
    bits = stored.to(tl.uint16)
    magnitude = bits & 0x7F
    half = ((bits & 0x80) << 8) | (magnitude << 7)
    values = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where(magnitude == 0x7F, float("nan"), values)

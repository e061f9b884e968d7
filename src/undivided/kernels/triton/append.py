"""New tokens of a cache, quantised and written to its pools: one program per token and head.

`undivided.quantization` defines the formats: the largest magnitude of a row (int4: of a group of 32 numbers) becomes the
largest number of the format, and a row with NaN or infinity becomes 0 with such a scale. Numbers are rounded by integer
operations, because not all GPUs convert to fp8 in hardware.
"""

# The arguments of kernels are grouped: pointers, strides, sizes, constants.
# fmt: off

import triton
import triton.language as tl

from undivided.kernels.triton.quantized import FP8_E4M3, GROUP, INT4, INT8

WHOLE = tl.constexpr(1.5 * 2.0**23)
"""Added to a small number, it leaves the nearest integer, to even, in the low bits."""
WHOLE_BITS = tl.constexpr(0x4B400000)


@triton.jit
def magnitude(x):
    """The bits of |x|, fp32; as integers they are in the order of the numbers, with NaN above all."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def divided(x, scale, LARGEST: tl.constexpr):
    """x / scale; 0 for 0 / 0, and for NaN or infinity in the row. A subnormal scale is inexact."""
    y = tl.div_rn(x, scale)
    y = tl.where(y == y, y, 0.0)
    return tl.minimum(tl.maximum(y, -LARGEST), LARGEST)


@triton.jit
def nearest_integer(x):
    """The nearest integer, int32, to even; |x| is small."""
    return (x + WHOLE).to(tl.int32, bitcast=True) - WHOLE_BITS


@triton.jit
def nearest_float8(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """The bits of the nearest numbers with so many bits of mantissa, to even."""
    DROPPED: tl.constexpr = 23 - MANTISSA
    FIRST: tl.constexpr = 128 - BIAS  # exponent of the smallest normal number
    bits = magnitude(x)
    normal = ((bits + ((1 << (DROPPED - 1)) - 1) + ((bits >> DROPPED) & 1)) >> DROPPED) - ((127 - BIAS) << MANTISSA)
    UNIT: tl.constexpr = 2.0 ** (FIRST + DROPPED - 127)
    UNIT_BITS: tl.constexpr = (FIRST + DROPPED) << 23
    subnormal = (bits.to(tl.float32, bitcast=True) + UNIT).to(tl.int32, bitcast=True) - UNIT_BITS
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return sign | tl.where(bits < (FIRST << 23), subnormal, normal)


@triton.jit
def append_row(source, pool, scales, row, DIM: tl.constexpr, WIDTH: tl.constexpr, FORMAT: tl.constexpr):
    """Write the row of DIM numbers at `source` to row `row` of a contiguous pool and of its scales."""
    if FORMAT == INT4:
        group, pair = tl.arange(0, WIDTH // GROUP)[:, None], tl.arange(0, GROUP // 2)[None, :]
        some = group < DIM // GROUP
        even = tl.load(source + group * GROUP + 2 * pair, mask=some, other=0.0).to(tl.float32)
        odd = tl.load(source + group * GROUP + 2 * pair + 1, mask=some, other=0.0).to(tl.float32)
        largest = tl.max(tl.maximum(magnitude(even), magnitude(odd)), 1)[:, None]
        scale = tl.div_rn(largest.to(tl.float32, bitcast=True), 7.0)
        low = nearest_integer(divided(even, scale, 7.0)) + 8
        high = nearest_integer(divided(odd, scale, 7.0)) + 8
        tl.store(pool + row * (DIM // 2) + group * (GROUP // 2) + pair, (low | (high << 4)).to(tl.uint8), mask=some)
        tl.store(scales + row * (DIM // GROUP) + group, scale, mask=some)
    else:
        LARGEST: tl.constexpr = 127.0 if FORMAT == INT8 else 448.0 if FORMAT == FP8_E4M3 else 57344.0
        d = tl.arange(0, WIDTH)
        x = tl.load(source + d, mask=d < DIM, other=0.0).to(tl.float32)
        scale = tl.div_rn(tl.max(magnitude(x), 0).to(tl.float32, bitcast=True), LARGEST)
        y = divided(x, scale, LARGEST)
        if FORMAT == INT8:
            tl.store(pool + row * DIM + d, nearest_integer(y).to(tl.int8), mask=d < DIM)
        elif FORMAT == FP8_E4M3:
            tl.store(pool + row * DIM + d, nearest_float8(y, 3, 7).to(tl.uint8), mask=d < DIM)
        else:
            tl.store(pool + row * DIM + d, nearest_float8(y, 2, 15).to(tl.uint8), mask=d < DIM)
        tl.store(scales + row, scale)


@triton.jit
def append_kernel(
    k, v, rows, k_pool, v_pool, k_scale, v_scale, k_b, k_s, k_h, v_b, v_s, v_h, length,
    HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Token s of sequence b is written to row rows[b * length + s] of the pools, [rows, HEADS, D], fp8 as bytes.

    The grid is (B * length, HEADS).
    """
    token, head = tl.program_id(0), tl.program_id(1)
    b, s = (token // length).to(tl.int64), (token % length).to(tl.int64)
    row = tl.load(rows + token) * HEADS + head
    append_row(k + b * k_b + s * k_s + head * k_h, k_pool, k_scale, row, K_DIM, K_WIDTH, FORMAT)
    append_row(v + b * v_b + s * v_s + head * v_h, v_pool, v_scale, row, V_DIM, V_WIDTH, FORMAT)

"""Rows of quantised keys and values, converted in registers. `undivided.quantization` defines the formats.

int8 and fp8 have one scale per row. Their values are exact in every dtype of q, so they are multiplied as they are
stored: the scale of a key multiplies its scores, the scale of a value its weights. This costs one multiplication per
pair of a query and a key, and none per stored number. int4 has a scale per group of 32 numbers, which is applied to
every number.

NVIDIA GPUs convert four bytes at a time in PTX. The other path has integer operations only: not all GPUs convert fp8 in
hardware, and Triton's interpreter must give the same numbers. Most decoding reads 16-bit words instead (`words`).
"""

from typing import NamedTuple

import triton
import triton.language as tl

from undivided.kernels.triton.tile import load_rows, tile_rows
from undivided.quantization import FORMAT_CODES

INT8 = tl.constexpr(FORMAT_CODES["int8"])
FP8_E4M3 = tl.constexpr(FORMAT_CODES["fp8_e4m3"])
FP8_E5M2 = tl.constexpr(FORMAT_CODES["fp8_e5m2"])
INT4 = tl.constexpr(FORMAT_CODES["int4"])
GROUP = tl.constexpr(32)
"""Numbers per scale of int4."""

# Each converts the bytes of $2 to two pairs of 16-bit numbers, $0 and $1. A byte in the low bits of the fraction of a
# power of two adds its value to it.
INT8_TO_FP16 = tl.constexpr("""{
    .reg .b32 x, a, b, offset;
    mov.b32 offset, 0x64806480;              // 1024 + 128
    xor.b32 x, $2, 0x80808080;               // value + 128
    prmt.b32 a, x, 0x64646464, 0x4140;       // 1024 + (value + 128)
    prmt.b32 b, x, 0x64646464, 0x4342;
    sub.f16x2 $0, a, offset;
    sub.f16x2 $1, b, offset;
}""")
# bfloat16 has 7 bits of fraction: 128 + (lower 7 bits), minus 128, or 256 if the byte is negative
INT8_TO_BF16 = tl.constexpr("""{
    .reg .b32 a, b, c, d, one;
    mov.b32 one, 0x3F803F80;
    prmt.b32 a, $2, 0, 0x4140;
    prmt.b32 b, $2, 0, 0x4342;
    lop3.b32 c, a, 0x00800080, 0xC300C300, 0xEA;
    lop3.b32 a, a, 0x007F007F, 0x43004300, 0xEA;
    lop3.b32 d, b, 0x00800080, 0xC300C300, 0xEA;
    lop3.b32 b, b, 0x007F007F, 0x43004300, 0xEA;
    fma.rn.bf16x2 $0, a, one, c;
    fma.rn.bf16x2 $1, b, one, d;
}""")
FP8_E5M2_TO_FP16 = tl.constexpr("""{
    prmt.b32 $0, $2, 0, 0x1404;              // the upper half of an fp16
    prmt.b32 $1, $2, 0, 0x3424;
}""")
FP8_E4M3_TO_FP16 = tl.constexpr("""{
    .reg .b16 a, b;
    mov.b32 {a, b}, $2;
    cvt.rn.f16x2.e4m3x2 $0, a;
    cvt.rn.f16x2.e4m3x2 $1, b;
}""")
REGISTERS = """{
    .reg .b32 x, y;
    .reg .b16 a, b, c, d;
    .reg .f32 e, f, g, h;
"""
# Two pairs of fp16 in x and y; their fractions have three bits at most, so that bfloat16 holds them exactly.
PAIRS_TO_BF16 = """
    mov.b32 {a, b}, x;
    mov.b32 {c, d}, y;
    cvt.f32.f16 e, a;
    cvt.f32.f16 f, b;
    cvt.f32.f16 g, c;
    cvt.f32.f16 h, d;
    cvt.rn.bf16x2.f32 $0, f, e;
    cvt.rn.bf16x2.f32 $1, h, g;
}"""
FP8_E5M2_TO_BF16 = tl.constexpr(
    REGISTERS
    + """
    prmt.b32 x, $2, 0, 0x1404;
    prmt.b32 y, $2, 0, 0x3424;
"""
    + PAIRS_TO_BF16
)
FP8_E4M3_TO_BF16 = tl.constexpr(
    REGISTERS
    + """
    mov.b32 {a, b}, $2;
    cvt.rn.f16x2.e4m3x2 x, a;
    cvt.rn.f16x2.e4m3x2 y, b;
"""
    + PAIRS_TO_BF16
)

# A byte of int4 is a pair of numbers, n + 8 each. Two 16-bit numbers of $0 to $3 are one byte of $4.
INT4_TO_FP16 = tl.constexpr(
    """{
    .reg .b32 x, offset;
    mov.b32 offset, 0x64086408;                   // 1024 + 8
    shr.u32 x, $4, 4;
"""
    + "".join(
        f"""
    .reg .b32 n{i};
    prmt.b32 n{i}, $4, x, 0x0{i + 4}0{i};         // the low 4 bits of each half matter
    lop3.b32 n{i}, n{i}, 0x000F000F, 0x64006400, 0xEA;
    sub.f16x2 n{i}, n{i}, offset;
"""
        for i in range(4)
    )
    + "".join(f"mov.b32 ${i}, n{i};\n" for i in range(4))
    + "}"
)
# Times the scales in $5 to $8, each of which is the sum of two bfloat16 to a relative 2^-16.
INT4_TO_BF16 = tl.constexpr(
    """{
    .reg .b32 x, y, one, offset, zero;
    mov.b32 one, 0x3F803F80;
    mov.b32 zero, 0x80008000;                     // -0
    mov.b32 offset, 0xC308C308;                   // - (128 + 8)
    shr.u32 x, $4, 4;
"""
    + "".join(
        f"""
    .reg .b32 n{i}, s{i}, t{i};
    .reg .f32 r{i};
    prmt.b32 n{i}, $4, x, 0x0{i + 4}0{i};
    lop3.b32 n{i}, n{i}, 0x000F000F, 0x43004300, 0xEA;
    fma.rn.bf16x2 n{i}, n{i}, one, offset;
    cvt.rn.bf16x2.f32 s{i}, ${i + 5}, ${i + 5};
    shl.b32 y, s{i}, 16;
    mov.b32 r{i}, y;
    sub.f32 r{i}, ${i + 5}, r{i};
    cvt.rn.bf16x2.f32 t{i}, r{i}, r{i};
    fma.rn.bf16x2 t{i}, n{i}, t{i}, zero;
    fma.rn.bf16x2 n{i}, n{i}, s{i}, t{i};
"""
        for i in range(4)
    )
    + "".join(f"mov.b32 ${i}, n{i};\n" for i in range(4))
    + "}"
)

TO_FP16 = tl.constexpr(("", INT8_TO_FP16.value, FP8_E4M3_TO_FP16.value, FP8_E5M2_TO_FP16.value))
TO_BF16 = tl.constexpr(("", INT8_TO_BF16.value, FP8_E4M3_TO_BF16.value, FP8_E5M2_TO_BF16.value))
"""The code of each format, by its number."""


class StoredRows(NamedTuple):
    """Where rows of one head are: element offsets [N] from `base`, and those of their scales from `scales`."""

    base: tl.tensor
    offsets: tl.tensor
    scales: tl.tensor
    scale_offsets: tl.tensor


@triton.jit
def stored_rows(
    head, scales, page, row, page_stride, row_stride, scale_page, scale_row, N: tl.constexpr, ONE_PAGE: tl.constexpr
):
    """The `StoredRows` of N keys of a head. page, row: from `tile_page`."""
    base, offsets = tile_rows(head, page, row, page_stride, row_stride, N, ONE_PAGE)
    scales, scale_offsets = tile_rows(scales, page, row, scale_page, scale_row, N, ONE_PAGE)
    return StoredRows(base, offsets, scales, scale_offsets)


@triton.jit
def load_scales(rows, ok_n):
    """The scale of each row [N], for formats that have one per row."""
    return tl.load(rows.scales + rows.scale_offsets, mask=ok_n, other=0.0)


@triton.jit
def load_numbers(
    rows,
    ok_n,
    DIM: tl.constexpr,
    first,
    WIDTH: tl.constexpr,
    WHOLE: tl.constexpr,
    CHECKED: tl.constexpr,
    FORMAT: tl.constexpr,
    dtype: tl.constexpr,
    SCALED: tl.constexpr,
    PTX: tl.constexpr,
):
    """As `load_rows`, for rows in any format, as numbers of `dtype`.

    Args:
        rows: `StoredRows`. The scales of a row of int4 are contiguous.
        SCALED: ``value * scale`` in fp32, rounded once; otherwise the stored values, which are exact. int4 is always
            scaled.
        PTX: compute capability (major * 10 + minor) of the NVIDIA GPU; 0 for integer operations only.
    """
    if FORMAT == 0:
        return load_rows(rows.base, rows.offsets, ok_n, DIM, first, WIDTH, WHOLE, CHECKED)
    elif FORMAT == INT4:
        return _load_int4(rows, ok_n, DIM, first, WIDTH, WHOLE, CHECKED, dtype, PTX)
    else:
        stored = load_rows(rows.base, rows.offsets, ok_n, DIM, first, WIDTH, WHOLE, CHECKED)
        values = converted(stored, FORMAT, dtype, PTX)
        if SCALED:
            values = (values.to(tl.float32) * load_scales(rows, ok_n)[:, None]).to(dtype)
        return values


@triton.jit
def converted(stored, FORMAT: tl.constexpr, dtype: tl.constexpr, PTX: tl.constexpr):
    """The numbers of `dtype` that these bytes of int8 or fp8 store."""
    first_capability: tl.constexpr = 89 if FORMAT == FP8_E4M3 else 80
    in_ptx: tl.constexpr = first_capability <= PTX
    if in_ptx and dtype == tl.float16:
        code: tl.constexpr = TO_FP16[FORMAT]
        return tl.inline_asm_elementwise(code, "=r,=r,r", [stored], dtype=tl.float16, is_pure=False, pack=4)
    elif in_ptx and dtype == tl.bfloat16:
        code: tl.constexpr = TO_BF16[FORMAT]
        return tl.inline_asm_elementwise(code, "=r,=r,r", [stored], dtype=tl.bfloat16, is_pure=False, pack=4)
    elif FORMAT == INT8:
        return stored.to(tl.float32).to(dtype)
    elif FORMAT == FP8_E5M2:
        return _from_e5m2(stored).to(dtype)
    else:
        return _from_e4m3(stored).to(dtype)


@triton.jit
def _load_int4(
    rows,
    ok_n,
    DIM: tl.constexpr,
    first,
    WIDTH: tl.constexpr,
    WHOLE: tl.constexpr,
    CHECKED: tl.constexpr,
    dtype: tl.constexpr,
    PTX: tl.constexpr,
):
    """`load_numbers` for int4."""
    scales = rows.scales + rows.scale_offsets  # [N] pointers
    packed = load_rows(rows.base, rows.offsets, ok_n, DIM // 2, first // 2, WIDTH // 2, WHOLE, CHECKED)
    o_g = first // GROUP + tl.arange(0, WIDTH // GROUP)
    inside = ok_n[:, None] & (o_g < DIM // GROUP)[None, :]
    scale = tl.load(scales[:, None] + o_g[None, :], mask=inside, other=0.0)[:, :, None]
    pairs = packed.reshape(packed.shape[0], WIDTH // GROUP, GROUP // 2)
    if PTX >= 80 and dtype == tl.bfloat16:
        words = tl.inline_asm_elementwise(
            INT4_TO_BF16, "=r,=r,=r,=r,r,r,r,r,r", [pairs, scale], dtype=tl.uint32, is_pure=True, pack=4
        )
        low = words.to(tl.uint16).to(tl.bfloat16, bitcast=True)
        high = (words >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    elif PTX >= 80 and dtype == tl.float16:
        words = tl.inline_asm_elementwise(INT4_TO_FP16, "=r,=r,=r,=r,r", [pairs], dtype=tl.uint32, is_pure=True, pack=4)
        low = (words.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * scale).to(dtype)
        high = ((words >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * scale).to(dtype)
    else:
        low = (((pairs & 15).to(tl.float32) - 8.0) * scale).to(dtype)
        high = (((pairs >> 4).to(tl.float32) - 8.0) * scale).to(dtype)
    numbers = tl.join(low, high).reshape(packed.shape[0], WIDTH)
    if PTX >= 80 and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [numbers], dtype=tl.bfloat16, is_pure=False, pack=2)
    elif PTX >= 80 and dtype == tl.float16:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [numbers], dtype=tl.float16, is_pure=False, pack=2)
    else:
        return numbers


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

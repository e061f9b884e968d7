"""Rows of quantised keys and values as 16-bit words: pairs of 8-bit numbers, or four of int4.

A word has the size of the numbers that its parts become, and a thread converts those that it multiplies. So rows stay in
shared memory as they are stored, and matrix instructions read them there. Bytes (`kernels.triton.quantized`) are
converted first, written to shared memory as 16-bit numbers, and read once more; on an H200 that limited decoding.

The columns of a tile are in another order: those of the first part of each word, then those of the second part. Products
over them, and columns of the output, are computed for each part, and put in order once at the end.

The numbers are those of `quantized`: with PTX on NVIDIA GPUs, otherwise by integer operations.
"""

import triton
import triton.language as tl

from undivided.kernels.triton.quantized import FP8_E4M3, GROUP, INT8, converted, load_scales
from undivided.kernels.triton.tile import load_rows

REGISTERS = """
    .reg .b32 x, y, one, offset, zero, upper, lower;
    .reg .b16 a, b;
    .reg .f32 e, f;
    mov.b32 one, 0x3F803F80;                      // 1, as bfloat16
    mov.b32 zero, 0x80008000;                     // -0
"""
FIRST_BITS = ("mov.b32 x, $1;", "shr.u32 x, $1, 8;")
"""One byte of both words in the lower bits of each half: the lower bytes, or the upper ones."""

# $0 becomes a pair of 16-bit numbers. A number in the low bits of the fraction of a power of two adds its value to it.
INT8_TO_FP16 = """
    mov.b32 offset, 0x64806480;                   // 1024 + 128
    lop3.b32 x, x, 0x00FF00FF, 0x64806480, 0x6A;  // 1024 + (value + 128)
    sub.f16x2 $0, x, offset;
"""
INT8_TO_BF16 = """
    lop3.b32 y, x, 0x00800080, 0xC300C300, 0xEA;  // -128, or -256 if the number is negative
    lop3.b32 x, x, 0x007F007F, 0x43004300, 0xEA;  // 128 + (lower 7 bits)
    fma.rn.bf16x2 $0, x, one, y;
"""
E4M3_BYTES = (
    "prmt.b32 x, $1, 0, 0x4420; mov.b32 {a, b}, x; cvt.rn.f16x2.e4m3x2 x, a;",
    "prmt.b32 x, $1, 0, 0x4431; mov.b32 {a, b}, x; cvt.rn.f16x2.e4m3x2 x, a;",
)
E5M2_BYTES = ("prmt.b32 x, $1, 0, 0x2404;", "and.b32 x, $1, 0xFF00FF00;")  # the upper half of an fp16
FP16_RESULT = "mov.b32 $0, x;"
BF16_RESULT = """
    mov.b32 {a, b}, x;
    cvt.f32.f16 e, a;
    cvt.f32.f16 f, b;
    cvt.rn.bf16x2.f32 $0, f, e;
"""


def _codes(byte: int, int8: str, result: str) -> tl.constexpr:
    """The code of each format of 8 bits, by its number, for the lower (0) or the upper (1) bytes of two words."""
    bodies = (FIRST_BITS[byte] + int8, E4M3_BYTES[byte] + result, E5M2_BYTES[byte] + result)
    return tl.constexpr(("", *("{" + REGISTERS + body + "}" for body in bodies)))


LOWER_TO_FP16, UPPER_TO_FP16 = (_codes(byte, INT8_TO_FP16, FP16_RESULT) for byte in (0, 1))
LOWER_TO_BF16, UPPER_TO_BF16 = (_codes(byte, INT8_TO_BF16, BF16_RESULT) for byte in (0, 1))

# The numbers of int4 of the same four bits of two words in $1. To bfloat16 they are multiplied by the scales of both
# words, in $2 and $3 as `_halves` makes them.
NIBBLES_TO_FP16 = tl.constexpr(
    tuple(
        f"""{{{REGISTERS}
    mov.b32 offset, 0x64086408;                   // 1024 + 8
    shr.u32 x, $1, {4 * nibble};
    lop3.b32 x, x, 0x000F000F, 0x64006400, 0xEA;
    sub.f16x2 $0, x, offset;
}}"""
        for nibble in range(4)
    )
)
NIBBLES_TO_BF16 = tl.constexpr(
    tuple(
        f"""{{{REGISTERS}
    mov.b32 offset, 0xC308C308;                   // - (128 + 8)
    shr.u32 x, $1, {4 * nibble};
    lop3.b32 x, x, 0x000F000F, 0x43004300, 0xEA;
    fma.rn.bf16x2 x, x, one, offset;
    prmt.b32 upper, $2, $3, 0x7632;
    prmt.b32 lower, $2, $3, 0x5410;
    fma.rn.bf16x2 y, x, lower, zero;
    fma.rn.bf16x2 $0, x, upper, y;
}}"""
        for nibble in range(4)
    )
)


@triton.jit
def load_pairs(
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
    """As `quantized.load_numbers`, of words that are pairs of 8-bit numbers: even columns, then odd ones, each
    [N, WIDTH // 2]. The base of rows points to words; their offsets and DIM are those of numbers."""
    words = load_rows(rows.base, rows.offsets, ok_n, DIM // 2, first // 2, WIDTH // 2, WHOLE, CHECKED)
    even, odd = _bytes(words, FORMAT, dtype, PTX, 0), _bytes(words, FORMAT, dtype, PTX, 1)
    if SCALED:
        scale = load_scales(rows, ok_n)[:, None]
        even, odd = (even.to(tl.float32) * scale).to(dtype), (odd.to(tl.float32) * scale).to(dtype)
    return even, odd


@triton.jit
def _bytes(words, FORMAT: tl.constexpr, dtype: tl.constexpr, PTX: tl.constexpr, PART: tl.constexpr):
    """The numbers of the lower (PART 0) or the upper bytes of words."""
    first_capability: tl.constexpr = 89 if FORMAT == FP8_E4M3 else 80
    in_ptx: tl.constexpr = first_capability <= PTX
    if in_ptx and dtype == tl.float16:
        code: tl.constexpr = UPPER_TO_FP16[FORMAT] if PART else LOWER_TO_FP16[FORMAT]
        return tl.inline_asm_elementwise(code, "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2)
    elif in_ptx and dtype == tl.bfloat16:
        code: tl.constexpr = UPPER_TO_BF16[FORMAT] if PART else LOWER_TO_BF16[FORMAT]
        return tl.inline_asm_elementwise(code, "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2)
    else:
        stored = ((words >> (8 * PART)) & 0xFF).to(tl.uint8)
        if FORMAT == INT8:
            stored = stored.to(tl.int8, bitcast=True)
        return converted(stored, FORMAT, dtype, 0)


@triton.jit
def load_nibbles(
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
    """As `load_pairs`, of words of four numbers of int4, scaled: columns 0, 4, 8, ..., then 1, 5, 9, ..., and so on, each
    [N, WIDTH // 4]."""
    words = load_rows(rows.base, rows.offsets, ok_n, DIM // 4, first // 4, WIDTH // 4, WHOLE, CHECKED)
    o_g = first // GROUP + tl.arange(0, WIDTH // GROUP)
    inside = ok_n[:, None] & (o_g < DIM // GROUP)[None, :]
    scale = tl.load((rows.scales + rows.scale_offsets)[:, None] + o_g[None, :], mask=inside, other=0.0)
    if PTX >= 80 and dtype == tl.bfloat16:
        scale = _halves(scale)
    of_words = tl.broadcast_to(scale[:, :, None], words.shape[0], WIDTH // GROUP, GROUP // 4).reshape(words.shape)
    return (
        _nibbles(words, of_words, dtype, PTX, 0),
        _nibbles(words, of_words, dtype, PTX, 1),
        _nibbles(words, of_words, dtype, PTX, 2),
        _nibbles(words, of_words, dtype, PTX, 3),
    )


@triton.jit
def _halves(scale):
    """Two bfloat16 in 32 bits, the upper and the lower, whose sum is the scale to a relative 2^-16."""
    upper = scale.to(tl.bfloat16)
    lower = (scale - upper.to(tl.float32)).to(tl.bfloat16)
    upper_bits, lower_bits = upper.to(tl.uint16, bitcast=True), lower.to(tl.uint16, bitcast=True)
    return (upper_bits.to(tl.uint32) << 16) | lower_bits.to(tl.uint32)


@triton.jit
def _nibbles(words, scale, dtype: tl.constexpr, PTX: tl.constexpr, PART: tl.constexpr):
    """The numbers of bits 4 PART to 4 PART + 3 of words, times the scale of each word."""
    if PTX >= 80 and dtype == tl.bfloat16:
        code: tl.constexpr = NIBBLES_TO_BF16[PART]
        return tl.inline_asm_elementwise(code, "=r,r,r,r", [words, scale], dtype=tl.bfloat16, is_pure=True, pack=2)
    elif PTX >= 80 and dtype == tl.float16:
        code: tl.constexpr = NIBBLES_TO_FP16[PART]
        numbers = tl.inline_asm_elementwise(code, "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2)
        return (numbers.to(tl.float32) * scale).to(dtype)
    else:
        return ((((words >> (4 * PART)) & 15).to(tl.float32) - 8.0) * scale).to(dtype)

"""The PTX that converts quantised numbers, run by a small interpreter: every byte of every format, in both dtypes."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from undivided.kernels.triton import quantized
from undivided.kernels.triton import words as kernel_words
from undivided.quantization import DTYPES, FORMAT_CODES, Format, dequantize

WORD = 0xFFFFFFFF


def _permuted(a: int, b: int, selector: int) -> int:
    octets = (a | b << 32).to_bytes(8, "little")
    return int.from_bytes(bytes(octets[selector >> 4 * n & 7] for n in range(4)), "little")


def _halves(word: int, dtype: torch.dtype) -> Tensor:
    return torch.tensor([word & WORD], dtype=torch.uint32).view(torch.int32).view(dtype).double()


def _word(numbers: Tensor, dtype: torch.dtype) -> int:
    return int(numbers.to(dtype).view(torch.int32).item()) & WORD


def _float(word: int) -> Tensor:
    return torch.tensor([word], dtype=torch.uint32).view(torch.int32).view(torch.float32)


def _of_e4m3(half: int) -> int:
    values = torch.tensor([half & 255, half >> 8], dtype=torch.uint8).view(torch.float8_e4m3fn)
    return _word(values.float(), torch.float16)


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
OPERATIONS: dict[str, Callable[..., int]] = {
    "mov.b32": lambda a: a,
    "xor.b32": lambda a, b: a ^ b,
    "and.b32": lambda a, b: a & b,
    "shr.u32": lambda a, n: a >> n,
    "shl.b32": lambda a, n: a << n & WORD,
    "prmt.b32": _permuted,
    "lop3.b32": lambda a, b, c, table: {0xEA: a & b | c, 0x6A: (a & b) ^ c}[table],
    "sub.f16x2": lambda a, b: _word(_halves(a, FP16) - _halves(b, FP16), FP16),
    "fma.rn.bf16x2": lambda a, b, c: _word(_halves(a, BF16) * _halves(b, BF16) + _halves(c, BF16), BF16),
    "sub.f32": lambda a, b: _word(_float(a) - _float(b), FP32),
    "cvt.f32.f16": lambda a: _word(_halves(a, FP16)[:1], FP32),
    "cvt.rn.bf16x2.f32": lambda a, b: _word(torch.cat((_float(b), _float(a))), BF16),
    "cvt.rn.f16x2.e4m3x2": _of_e4m3,
}
"""Instructions of PTX on registers that hold 16 or 32 bits."""


def run(code: str, outputs: int, *inputs: int) -> list[int]:
    """The output registers of this inline assembly."""
    registers = {f"${outputs + n}": word for n, word in enumerate(inputs)}
    for line in re.sub(r"//.*", "", code).strip().strip("{}").split(";"):
        name, _, rest = line.strip().partition(" ")
        if not name or name == ".reg":
            continue
        halves = re.match(r"\{(\w+), (\w+)\}, (\S+)", rest)
        if halves:
            registers[halves[1]], registers[halves[2]] = registers[halves[3]] & 0xFFFF, registers[halves[3]] >> 16
            continue
        to, *given = (word.strip() for word in rest.split(","))
        words = [registers[word] if word in registers else int(word, 0) for word in given]
        registers[to] = OPERATIONS[name](*words)
    return [registers[f"${n}"] for n in range(outputs)]


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("format", ["int8", "fp8_e4m3", "fp8_e5m2"])
def test_every_byte_is_converted_exactly(format: Format, dtype: torch.dtype) -> None:
    code = (quantized.TO_FP16 if dtype == FP16 else quantized.TO_BF16).value[FORMAT_CODES[format]]
    stored = torch.arange(256, dtype=torch.uint8)
    words = [word for four in stored.view(torch.int32).tolist() for word in run(code, 2, four & WORD)]
    found = torch.tensor(words, dtype=torch.uint32).view(torch.int32).view(dtype)
    right = stored.view(DTYPES[format]).to(dtype)
    assert torch.equal(found.nan_to_num(nan=1e4), right.nan_to_num(nan=1e4))


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("format", ["int8", "fp8_e4m3", "fp8_e5m2"])
def test_every_byte_of_words_is_converted_exactly(format: Format, dtype: torch.dtype) -> None:
    """The lower bytes of two words, and the upper ones."""
    lower, upper = (
        (kernel_words.LOWER_TO_FP16, kernel_words.UPPER_TO_FP16)
        if dtype == FP16
        else (kernel_words.LOWER_TO_BF16, kernel_words.UPPER_TO_BF16)
    )
    stored = torch.arange(256, dtype=torch.uint8)
    for half, code in enumerate((lower, upper)):
        words = [run(code.value[FORMAT_CODES[format]], 1, four & WORD)[0] for four in stored.view(torch.int32).tolist()]
        found = torch.tensor(words, dtype=torch.uint32).view(torch.int32).view(dtype)
        right = stored[half::2].view(DTYPES[format]).to(dtype)
        assert torch.equal(found.nan_to_num(nan=1e4), right.nan_to_num(nan=1e4))


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.37, 0.111), (3e-30, 7e30), (0.0, 2.0), (float("nan"), 1.0)])
def test_every_number_of_int4_in_words_times_the_scale_of_its_word(scales: tuple[float, float]) -> None:
    """Two words of one instruction may belong to two keys."""
    stored = torch.arange(256, dtype=torch.uint8)
    both = torch.tensor(scales)
    upper = both.to(BF16)
    parts = torch.stack(((both - upper.float()).to(BF16), upper), -1)
    given = [word & WORD for word in parts.view(torch.int32).flatten().tolist()]
    for n in range(4):
        for dtype, code, more in (
            (BF16, kernel_words.NIBBLES_TO_BF16, given),
            (FP16, kernel_words.NIBBLES_TO_FP16, []),
        ):
            words = [run(code.value[n], 1, four & WORD, *more)[0] for four in stored.view(torch.int32).tolist()]
            found = torch.tensor(words, dtype=torch.uint32).view(torch.int32).view(dtype).view(-1, 2)
            numbers = (stored.view(torch.int16).int() >> 4 * n & 15).view(-1, 2).double() - 8
            if dtype == FP16:
                assert torch.equal(found.double(), numbers)
            else:
                right = numbers * both.double()
                torch.testing.assert_close(found.double(), right, rtol=2**-8 + 2**-15, atol=0, equal_nan=True)


@pytest.mark.parametrize("scale", [1.0, 0.37, 3e-30, 7e30, 0.0, float("nan")])
def test_every_byte_of_int4_times_its_scale(scale: float) -> None:
    """In bfloat16 rounded once, but for a relative 2^-15; in float16 the scale follows."""
    stored, scales = torch.arange(256, dtype=torch.uint8), torch.tensor([scale])
    bits = int(scales.view(torch.int32).item()) & WORD
    words = [
        word
        for four in stored.view(torch.int32).tolist()
        for word in run(quantized.INT4_TO_BF16.value, 4, four & WORD, *[bits] * 4)
    ]
    found = torch.tensor(words, dtype=torch.uint32).view(torch.int32).view(BF16).double()
    right = dequantize(stored, scales.expand(16).contiguous(), FP32).double()
    torch.testing.assert_close(found, right, rtol=2**-8 + 2**-15, atol=0, equal_nan=True)
    words = [
        word for four in stored.view(torch.int32).tolist() for word in run(quantized.INT4_TO_FP16.value, 4, four & WORD)
    ]
    found = torch.tensor(words, dtype=torch.uint32).view(torch.int32).view(FP16)
    assert torch.equal(found, dequantize(stored, torch.ones(16), FP16))

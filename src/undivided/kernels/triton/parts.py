"""Tiles in parts, by columns: products with rows of words (`words`) are computed for each part of a word.

A tile is a tuple of parts: one if rows are stored as numbers, otherwise one per number of a word, WORDS. Part i has
columns i, i + WORDS, i + 2 WORDS, and so on.
"""

import triton
import triton.language as tl

from undivided.kernels.triton.quantized import load_numbers
from undivided.kernels.triton.tile import dot
from undivided.kernels.triton.words import load_nibbles, load_pairs


@triton.jit
def load_parts(
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
    WORDS: tl.constexpr,
):
    """The parts of a tile of rows. Arguments are those of `quantized.load_numbers`."""
    if WORDS == 4:
        return load_nibbles(rows, ok_n, DIM, first, WIDTH, WHOLE, CHECKED, dtype, PTX)
    elif WORDS == 2:
        return load_pairs(rows, ok_n, DIM, first, WIDTH, WHOLE, CHECKED, FORMAT, dtype, SCALED, PTX)
    else:
        return (load_numbers(rows, ok_n, DIM, first, WIDTH, WHOLE, CHECKED, FORMAT, dtype, SCALED, PTX),)


@triton.jit
def split_columns(tile, ROWS: tl.constexpr, WIDTH: tl.constexpr, WORDS: tl.constexpr):
    """The parts of a tile [ROWS, WIDTH] of numbers."""
    if WORDS == 0:
        return (tile,)
    else:
        even, odd = tl.split(tile.reshape(ROWS, WIDTH // 2, 2))
        if WORDS == 2:
            return even, odd
        else:
            first, third = tl.split(even.reshape(ROWS, WIDTH // 4, 2))
            second, fourth = tl.split(odd.reshape(ROWS, WIDTH // 4, 2))
            return first, second, third, fourth


@triton.jit
def join_columns(parts, ROWS: tl.constexpr, WIDTH: tl.constexpr, WORDS: tl.constexpr):
    """The tile [ROWS, WIDTH] that has these parts; the reverse of `split_columns`."""
    if WORDS == 0:
        return parts[0]
    else:
        even, odd = parts[0], parts[1]
        if WORDS == 4:
            even = tl.join(parts[0], parts[2]).reshape(ROWS, WIDTH // 2)
            odd = tl.join(parts[1], parts[3]).reshape(ROWS, WIDTH // 2)
        return tl.join(even, odd).reshape(ROWS, WIDTH)


@triton.jit
def zero_parts(ROWS: tl.constexpr, WIDTH: tl.constexpr, WORDS: tl.constexpr):
    """The parts of a tile [ROWS, WIDTH] of zeros in fp32, to which products are added."""
    if WORDS == 0:
        return (tl.zeros([ROWS, WIDTH], tl.float32),)
    else:
        zeros = tl.zeros([ROWS, WIDTH // WORDS], tl.float32)
        if WORDS == 2:
            return zeros, zeros
        else:
            return zeros, zeros, zeros, zeros


@triton.jit
def dot_columns(q_parts, k_parts, PRECISION: tl.constexpr):
    """q k^T [M, N] in fp32, summed over the parts of the columns."""
    qk = tl.zeros([q_parts[0].shape[0], k_parts[0].shape[0]], tl.float32)
    PARTS: tl.constexpr = len(q_parts)
    for part in tl.static_range(PARTS):
        qk = dot(q_parts[part], tl.trans(k_parts[part]), qk, PRECISION)
    return qk


@triton.jit
def accumulate(acc, shrink, weights, v_parts, PRECISION: tl.constexpr, WORDS: tl.constexpr):
    """acc * shrink + weights v, in parts: a step of the online softmax for values. shrink [M], weights [M, N]."""
    weights, shrink = weights.to(v_parts[0].dtype), shrink[:, None]
    first = dot(weights, v_parts[0], acc[0] * shrink, PRECISION)
    if WORDS == 0:
        return (first,)
    else:
        second = dot(weights, v_parts[1], acc[1] * shrink, PRECISION)
        if WORDS == 2:
            return first, second
        else:
            third = dot(weights, v_parts[2], acc[2] * shrink, PRECISION)
            return first, second, third, dot(weights, v_parts[3], acc[3] * shrink, PRECISION)


@triton.jit
def select_rows(parts, rows, WORDS: tl.constexpr):
    """The parts of a tile, with 0 in place of other rows than these. rows [N]: whether a row is kept."""
    rows = rows[:, None]
    first = tl.where(rows, parts[0], 0.0)
    if WORDS == 0:
        return (first,)
    else:
        second = tl.where(rows, parts[1], 0.0)
        if WORDS == 2:
            return first, second
        else:
            return first, second, tl.where(rows, parts[2], 0.0), tl.where(rows, parts[3], 0.0)

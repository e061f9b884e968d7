"""One tile of scores, shared by every kernel of this folder.

Legend: M query rows, N keys of the tile; D head size of q and k. Scores are multiplied by ``log2(e)``, so that ``exp2``
replaces ``exp``. A row is a (query, head) pair; with grouped heads a tile has rows of several heads. A tile of scores
is [M, N], or [N, M] if the next product needs the transpose.

Memory: a tile is read once by each program that needs it. Nothing of size S x S is written, except the gradient of a
dense bias, which has that size.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from undivided.kernels.triton.config import is_interpreted

INTERPRETED = tl.constexpr(is_interpreted())
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

# constants of Philox4x32 (Salmon et al. 2011); `undivided.kernels.philox` defines the dropout pattern
ROUND_A = tl.constexpr(0xD2511F53)
ROUND_B = tl.constexpr(0xCD9E8D57)
WEYL_A = tl.constexpr(0x9E3779B9)
WEYL_B = tl.constexpr(0xBB67AE85)


class ScoreTerms(NamedTuple):
    """What turns the products of rows and keys into scores. Values of rows have an axis of length 1, that of keys."""

    bias_rows: tl.tensor  # pointers
    bias_k: tl.tensor  # stride of keys
    dense_rows: tl.tensor  # pointers
    dense_k: tl.tensor  # stride of keys
    slope: tl.tensor  # of ALiBi
    row_at: tl.tensor  # position of a row for ALiBi
    key_at: tl.tensor  # pointer to the positions of keys
    scale: tl.tensor
    softcap: tl.tensor


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """acc + a @ b in fp32. The interpreter cannot multiply bfloat16, so it gets the same numbers in fp32."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def tile_page(start, o_n, kv_len, pages, num_pages, PAGE: tl.constexpr, ONE_PAGE: tl.constexpr):
    """Where the keys o_n [N] of a tile are, which begins at `start`: (page, row in the page) of each, or, if they are in
    ONE_PAGE, of the first. Without pages (PAGE = 0) page 0 has all rows.

    pages: the row of the block table. ONE_PAGE: the table is read once, and offsets are the same for every tile.
    """
    page, row = 0, o_n
    if PAGE:
        if ONE_PAGE:
            # a tensor of one entry, because Triton 3.4 pipelines no scalars
            page, row = tl.sum(tl.load(pages + start // PAGE + tl.arange(0, 1)), 0), start % PAGE
        else:  # a tile may end after the table
            page, row = tl.load(pages + tl.minimum(o_n, kv_len - 1) // PAGE), o_n % PAGE
        page = tl.minimum(tl.maximum(page, 0), num_pages - 1)  # entries beyond a sequence's length may hold anything
    return tl.cast(page, tl.int64), row.to(tl.int64)


@triton.jit
def tile_rows(base, page, row, stride_page, stride_n, N: tl.constexpr, ONE_PAGE: tl.constexpr):
    """Where the rows of N keys are: (pointer, element offsets [N] from it). page, row: from `tile_page`."""
    offset = page * stride_page + row * stride_n
    if ONE_PAGE:
        return base + offset, tl.arange(0, N).to(tl.int64) * stride_n
    else:
        return base, offset


@triton.jit
def load_rows(
    base, offsets, ok_n, DIM: tl.constexpr, first, WIDTH: tl.constexpr, WHOLE: tl.constexpr, CHECKED: tl.constexpr
):
    """WIDTH columns from `first` on of the rows at these offsets, [N, WIDTH]; 0 outside. WHOLE: all columns exist; not
    CHECKED: all rows exist."""
    o_d = first + tl.arange(0, WIDTH)
    at = base + offsets[:, None] + o_d[None, :]
    if CHECKED:
        inside = ok_n[:, None]
        if not WHOLE:
            inside = inside & (o_d < DIM)[None, :]
        return tl.load(at, mask=inside, other=0.0)
    if not WHOLE:
        return tl.load(at, mask=(o_d < DIM)[None, :], other=0.0)
    return tl.load(at)


@triton.jit
def store_columns(rows, values, first, ok_m, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Write values [M, WIDTH] to the columns from `first` on of rows [M] of pointers, in the dtype of the memory."""
    o_d = first + tl.arange(0, WIDTH)
    at = rows[:, None] + o_d[None, :]
    tl.store(at, values.to(rows.dtype.element_ty), mask=ok_m[:, None] & (o_d < DIM)[None, :])


@triton.jit
def load_descriptor_rows(tensor, b, h, first, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Rows of one head from `first` on, [ROWS, WIDTH], by a tensor descriptor of blocks [1, 1, ROWS, WIDTH]; 0
    outside."""
    return tensor.load([b.to(tl.int32), h.to(tl.int32), first, 0]).reshape(ROWS, WIDTH)


@triton.jit
def row_features(
    o_m,
    ok_m,
    first_row,
    slopes,
    row_at,
    position,
    sequence,
    slopes_b,
    slopes_h,
    slopes_q,
    row_at_b,
    position_b,
    sequence_b,
    b,
    h,
    AXIS: tl.constexpr,
    ALIBI: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    """(slope, ALiBi position, dropout row, dropout sequence) of rows, 0 without the feature; the first two have an axis
    AXIS of length 1, as in `ScoreTerms`. h is one head, or one per row."""
    slope, at_m, i_m, b_m = 0.0, 0, 0, 0
    if ALIBI:
        at = slopes + b * slopes_b + h * slopes_h + (o_m + first_row) * slopes_q
        slope = tl.load(at, mask=ok_m, other=0.0)
        at_m = tl.load(row_at + b * row_at_b + o_m + first_row, mask=ok_m, other=0)
        slope, at_m = tl.expand_dims(slope, AXIS), tl.expand_dims(at_m, AXIS)
    if DROPOUT:
        i_m = tl.load(position + b * position_b + o_m + first_row, mask=ok_m, other=0)
        b_m = tl.load(sequence + b * sequence_b + o_m + first_row, mask=ok_m, other=0)
    return slope, at_m, i_m, b_m


@triton.jit
def tanh(x):
    """tanh(x), with a series near 0, where 1 - exp(-2x) would cancel."""
    y = tl.abs(x)
    e = tl.exp(-2.0 * y)
    far = (1.0 - e) / (1.0 + e)
    z = y * y
    near = y * (1.0 + z * (-1.0 / 3 + z * (2.0 / 15 + z * (-17.0 / 315 + z * (62.0 / 2835)))))
    t = tl.where(y < 0.25, near, far)
    return tl.where(x < 0, -t, t)


@triton.jit
def finish_scores(
    qk,
    allowed,
    keys,
    ok_rows,
    kv_len,
    terms,
    MASKED: tl.constexpr,
    BIAS: tl.constexpr,
    DENSE: tl.constexpr,
    ALIBI: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """(scores in base 2, -inf where masked; allowed pairs; d score / d (scale * qk); |i + d - j|), each in the shape of
    qk.

    terms: `ScoreTerms`. ok_rows and keys have an axis of length 1 too, as in `allowed_pairs`.
    """
    rate = 1.0
    distance = 0.0
    if SOFTCAP or ALIBI or BIAS:
        x = qk * terms.scale
        if SOFTCAP:
            t = tanh(x / terms.softcap)
            x = t * terms.softcap
            rate = 1.0 - t * t
        if ALIBI:
            key_position = tl.load(terms.key_at + keys, mask=keys < kv_len, other=0)
            distance = tl.abs(terms.row_at - key_position).to(tl.float32)
            x -= terms.slope * distance
        if BIAS:
            inside = ok_rows & (keys < kv_len)
            added = tl.load(terms.bias_rows + keys.to(tl.int64) * terms.bias_k, mask=inside, other=0.0).to(tl.float32)
            allowed &= added != float("-inf")
            x += added
        x *= LOG2E
    else:
        x = qk * (terms.scale * LOG2E)
    if DENSE:
        inside = ok_rows & (keys < kv_len)
        allowed &= tl.load(terms.dense_rows + keys.to(tl.int64) * terms.dense_k, mask=inside, other=0) != 0
    if MASKED:
        x = tl.where(allowed, x, float("-inf"))
    return x, allowed, rate, distance


@triton.jit
def _philox(c0, c1, c2, c3, seed):
    k0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    for _ in tl.static_range(7):
        a, b = c0, c2
        c0 = tl.umulhi(b, ROUND_B) ^ c1 ^ k0
        c2 = tl.umulhi(a, ROUND_A) ^ c3 ^ k1
        c1 = b * ROUND_B
        c3 = a * ROUND_A
        k0 += WEYL_A
        k1 += WEYL_B
    return c0, c1, c2, c3


@triton.jit
def dropout_keep(o_n, kv_len, key_at, i_m, h_m, b_m, seed, threshold, ALIGNED: tl.constexpr, N: tl.constexpr):
    """Which weights survive dropout, [M, N]: a function of seed, sequence, head and the two positions only.

    ALIGNED: the position of a key is its index, so that one generator call serves eight keys; otherwise one per key.
    """
    i, h, b = i_m.to(tl.uint32)[:, None], h_m.to(tl.uint32)[:, None], b_m.to(tl.uint32)[:, None]
    if ALIGNED:
        group = (tl.min(o_n, 0) // 8 + tl.arange(0, N // 8)).to(tl.uint32)[None, :]
        zero = (i * 0) + (group * 0)
        w0, w1, w2, w3 = _philox(group + zero, i + zero, h + zero, b + zero, seed)
        even = tl.interleave(tl.interleave(w0 & 0xFFFF, w2 & 0xFFFF), tl.interleave(w1 & 0xFFFF, w3 & 0xFFFF))
        odd = tl.interleave(tl.interleave(w0 >> 16, w2 >> 16), tl.interleave(w1 >> 16, w3 >> 16))
        draw = tl.interleave(even, odd)
    else:
        j = tl.load(key_at + o_n, mask=o_n < kv_len, other=0)
        group = (j // 8).to(tl.uint32)[None, :]
        zero = (i * 0) + (group * 0)
        w0, w1, w2, w3 = _philox(group + zero, i + zero, h + zero, b + zero, seed)
        which = (j % 8)[None, :]
        word = tl.where(which < 4, tl.where(which < 2, w0, w1), tl.where(which < 6, w2, w3))
        draw = (word >> (which % 2 * 16).to(tl.uint32)) & 0xFFFF
    return draw.to(tl.int32) >= threshold


@triton.jit
def next_weights(s, m, total, unit, MASKED: tl.constexpr):
    """A step of the online softmax, of scores [M, N] in units of ``unit * ln(2)``.

    Returns (weights relative to the largest score so far, the factor of earlier sums, that score, the sum of weights).
    """
    m_new = tl.maximum(m, tl.max(s, 1))
    safe = m_new
    if MASKED:
        safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s * unit - (safe * unit)[:, None])
    shrink = tl.exp2((m - safe) * unit)
    return p, shrink, m_new, total * shrink + tl.sum(p, 1)

"""Rows whose keys several programs share: the merge of what they wrote.

Split-KV divides the keys by the number of programs. Batch-invariant calls divide them into pieces of a fixed number of
keys, merged in their order: a row has the same bits whether one program computes all pieces, and merges each in
registers, or several programs compute them and `merge_pieces_kernel` merges. Products are added by explicit fused
multiply-adds, so that no compiler decides which of them are fused.
"""

# The arguments of kernels are grouped: pointers, strides, sizes, constants.
# fmt: off

import triton
import triton.language as tl

from undivided.kernels.triton.tile import LN2


@triton.jit
def merge(top, total, piece_top, piece_total):
    """The largest scores of some rows, in units of log 2, and their sums of weights, merged with those of the next piece.

    Returns (largest scores, sums of weights, which rows have keys in the piece, the factor of the earlier output, the
    factor of the piece's output).
    """
    some = piece_total != 0
    new_top = tl.where(some, tl.maximum(top, piece_top), top)
    safe = tl.where(new_top == float("-inf"), 0.0, new_top)
    keep, add = tl.exp2(top - safe), tl.exp2(piece_top - safe)
    total = tl.where(some, tl.fma(total, keep, piece_total * add), total)
    return new_top, total, some, keep, add


@triton.jit
def normalised(top, total):
    """(the log-sum-exp of rows, what their outputs are divided by), from their largest scores in units of log 2 and their
    sums of weights."""
    some = total != 0  # NaN is not 0: a row without keys has a total of 0, one with a NaN score does not
    divisor = tl.where(some, total, 1.0)
    return tl.where(some, (top + tl.log2(divisor)) * LN2, float("-inf")), divisor


@triton.jit
def merge_pieces_kernel(
    pieces, tops, totals, out, lse, sinks, piece_z, row_z, out_b, out_h, out_s, lse_b, lse_h, rows, groups, number,
    V_DIM: tl.constexpr, WIDTH: tl.constexpr, SINKS: tl.constexpr, GROUP: tl.constexpr, TOGETHER: tl.constexpr,
):
    """The output and the log-sum-exp of one row from its pieces, TOGETHER of which are loaded at once, then sinks.

    pieces [Z, B, G, R, Dv], tops and totals [Z, B, G, R] are contiguous fp32: sums of weighted values, largest scores
    and sums of weights. G are groups of GROUP heads, R their (query, head) pairs. The grid is (B * G * R,).
    """
    r = tl.program_id(0).to(tl.int64)
    pair, group, b = r % rows, r // rows % groups, r // rows // groups
    h, row = group * GROUP + pair % GROUP, pair // GROUP
    o_d = tl.arange(0, WIDTH)
    top, total, acc = float("-inf"), 0.0, tl.zeros([WIDTH], tl.float32)
    for first in range(0, number, TOGETHER):
        for i in tl.static_range(TOGETHER):
            z = tl.cast(first + i, tl.int64)
            exists = z < number
            piece_top = tl.load(tops + z * row_z + r, mask=exists, other=float("-inf"))
            piece_total = tl.load(totals + z * row_z + r, mask=exists, other=0.0)
            piece = tl.load(pieces + z * piece_z + r * V_DIM + o_d, mask=exists & (o_d < V_DIM), other=0.0)
            top, total, some, keep, add = merge(top, total, piece_top, piece_total)
            acc = tl.where(some, tl.fma(acc, keep, piece * add), acc)
    natural, divisor = normalised(top, total)
    result = acc / divisor
    if SINKS:
        result *= tl.where(total != 0, tl.sigmoid(natural - tl.load(sinks + h)), 0.0)
    tl.store(out + b * out_b + h * out_h + row * out_s + o_d, result.to(out.dtype.element_ty), mask=o_d < V_DIM)
    tl.store(lse + b * lse_b + h * lse_h + row, natural)


@triton.jit
def combine_kernel(
    partials, partial_lses, out, lse, sinks, places,
    partial_z, partial_row, lse_z, out_b, out_h, out_s, lse_b, lse_h, heads, q_len,
    V_DIM: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr, SINKS: tl.constexpr, PLACES: tl.constexpr,
    BLOCK_M: tl.constexpr, GROUP: tl.constexpr,
):
    """Merge the partial results of one row: ``lse = log(sum exp(lse_z))``, ``out = sum exp(lse_z - lse) * out_z``, then sinks.

    partials [Z, B * H * Sq, Dv] fp32 and partial_lses [Z, B * H * Sq] are contiguous. With PLACES, H * Sq are the groups
    of heads times the rows of all blocks, and rows that a block does not have are left out. The grid is (B * H * Sq,).
    """
    r = tl.program_id(0).to(tl.int64)
    b, h, row = r // (heads * q_len), r // q_len % heads, r % q_len
    exists = True
    if PLACES:
        place = places + row // BLOCK_M * 3
        pair = tl.load(place) + row % BLOCK_M
        exists = pair < tl.load(place + 1)
        h, row = h * GROUP + pair % GROUP, pair // GROUP
    if exists:
        o_z = tl.arange(0, SPLITS).to(tl.int64)
        o_d = tl.arange(0, WIDTH)
        lses = tl.load(partial_lses + o_z * lse_z + r)
        largest = tl.max(lses, 0)
        safe = tl.where(largest == float("-inf"), 0.0, largest)
        weight = tl.exp(lses - safe)
        total = tl.sum(weight, 0)
        some = total != 0  # as in `forward_kernel`
        natural = tl.where(some, safe + tl.log(tl.where(some, total, 1.0)), float("-inf"))
        pointers = partials + o_z[:, None] * partial_z + r * partial_row + o_d[None, :]
        values = tl.load(pointers, mask=(o_d < V_DIM)[None, :], other=0.0)
        result = tl.sum(values * weight[:, None], 0) / tl.where(some, total, 1.0)
        if SINKS:
            result *= tl.where(some, tl.sigmoid(natural - tl.load(sinks + h)), 0.0)
        tl.store(
            out + b * out_b + h * out_h + row * out_s + o_d, result.to(out.dtype.element_ty), mask=o_d < V_DIM
        )
        tl.store(lse + b * lse_b + h * lse_h + row, natural)

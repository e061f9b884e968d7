"""Which blocks of rows the documents of a pack have, and which tiles of keys each block needs, computed in one launch."""

# The arguments of kernels are grouped: pointers, sizes, constants.
# fmt: off

import triton
import triton.language as tl

from undivided.kernels.triton.key_ranges import FAR


@triton.jit
def run_of_tiles(at, rows, real, ALWAYS_MASKED: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr):
    """[begin, full_begin, full_end, end) in tiles of the union of the ranges [at[0], at[1]) of these rows: the tiles in
    the middle are full."""
    start = tl.load(at + rows * COLUMNS, mask=real, other=0)
    stop = tl.load(at + rows * COLUMNS + 1, mask=real, other=0)
    some = stop > start
    first, last = tl.min(tl.where(some, start, FAR), 0), tl.max(tl.where(some, stop, 0), 0)
    # of all rows: no tile is full if one of them has no keys
    latest = tl.max(tl.where(real, tl.where(some, start, FAR - BLOCK_N), 0), 0)
    earliest = tl.min(tl.where(real, tl.where(some, stop, 0), FAR), 0)
    begin, end = first // BLOCK_N, (last + BLOCK_N - 1) // BLOCK_N
    full_begin, full_end = (latest + BLOCK_N - 1) // BLOCK_N, tl.minimum(earliest, last) // BLOCK_N
    if ALWAYS_MASKED:
        full_begin, full_end = end, end
    if last == 0:  # no row has keys
        begin, end = last, last
    full_begin = tl.minimum(tl.maximum(full_begin, begin), end)
    return begin, full_begin, tl.minimum(tl.maximum(full_end, full_begin), end), end


@triton.jit
def document_blocks_kernel(
    ends, ranges, places, runs, number, q_len,
    SHORTEST: tl.constexpr, LONGEST: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    COLUMNS: tl.constexpr, ALWAYS_MASKED: tl.constexpr, DOCUMENTS: tl.constexpr,
):
    """Block number program_id of the documents of SHORTEST to LONGEST queries, in their order; the last ones may be empty.

    ends: int64 [number], one past the last query of each document; queries after all of them belong to the last one.
    ranges: int32 [q_len, COLUMNS], the keys of each query. DOCUMENTS: a power of two, at least their number.
    places: int32 [blocks, 3], first row and one past the last row of the block's document, and 0. A row is a (query, head
    of the group) pair. runs: int32 [blocks, 8], as `backends.triton.tables` describes them.
    """
    block = tl.program_id(0)
    o_n = tl.arange(0, DOCUMENTS)
    exists = o_n < number
    stop = tl.load(ends + o_n, mask=exists, other=0).to(tl.int32)
    start = tl.load(ends + o_n - 1, mask=exists & (o_n > 0), other=0).to(tl.int32)
    stop, start = tl.minimum(tl.where(o_n == number - 1, q_len, stop), q_len), tl.minimum(start, q_len)
    size = stop - start
    counts = tl.where((size >= SHORTEST) & (size <= LONGEST), (size * GROUP + BLOCK_M - 1) // BLOCK_M, 0)
    last = tl.cumsum(counts, 0)
    document = tl.sum((exists & (last <= block)).to(tl.int32), 0)
    own = (o_n == document) & exists
    first = tl.sum(tl.where(own, start * GROUP + (block - (last - counts)) * BLOCK_M, 0), 0)
    end = tl.sum(tl.where(own, stop * GROUP, 0), 0)
    tl.store(places + block * 3, first)
    tl.store(places + block * 3 + 1, end)
    tl.store(places + block * 3 + 2, 0)

    o_m = first + tl.arange(0, BLOCK_M)
    real, rows = o_m < end, o_m // GROUP
    begin, full, full_end, over = run_of_tiles(ranges, rows, real, ALWAYS_MASKED, COLUMNS, BLOCK_N)
    begin2, full2, full_end2, over2 = 0, 0, 0, 0
    if COLUMNS == 4:
        begin2, full2, full_end2, over2 = run_of_tiles(ranges + 2, rows, real, ALWAYS_MASKED, COLUMNS, BLOCK_N)
        if (over > begin) & (over2 > begin2) & (begin2 < over):  # tiles of both runs are visited once
            begin2 = over
        over2 = tl.maximum(over2, begin2)
        full2 = tl.minimum(tl.maximum(full2, begin2), over2)
        full_end2 = tl.minimum(tl.maximum(full_end2, full2), over2)
    at = runs + block * 8
    tl.store(at, begin)
    tl.store(at + 1, full)
    tl.store(at + 2, full_end)
    tl.store(at + 3, over)
    tl.store(at + 4, begin2)
    tl.store(at + 5, full2)
    tl.store(at + 6, full_end2)
    tl.store(at + 7, over2)

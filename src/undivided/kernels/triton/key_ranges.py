"""Which keys the rows of a block attend to: the ranges of each row, and the runs of tiles that the block needs."""

from typing import NamedTuple

import triton
import triton.language as tl

FAR = tl.constexpr(2**31 - 1)
"""Beyond every key."""


class KeyRanges(NamedTuple):
    """The two ranges [start, stop) of keys of each row; the second is empty if there is only one."""

    start: tl.tensor
    stop: tl.tensor
    start2: tl.tensor
    stop2: tl.tensor


class TileRuns(NamedTuple):
    """The tiles [first, last) of each of two runs of keys of a block of rows; those of [full_first, full_last) need no
    mask."""

    first: tl.tensor
    full_first: tl.tensor
    full_last: tl.tensor
    last: tl.tensor
    first2: tl.tensor
    full_first2: tl.tensor
    full_last2: tl.tensor
    last2: tl.tensor


@triton.jit
def row_ranges(ranges, rows, ok, COLUMNS: tl.constexpr):
    """The `KeyRanges` of these rows, from a table with COLUMNS entries per row."""
    nothing = rows * 0
    if COLUMNS == 0:
        return KeyRanges(nothing, nothing, nothing, nothing)
    at = ranges + rows * COLUMNS
    start, stop = tl.load(at, mask=ok, other=0), tl.load(at + 1, mask=ok, other=0)
    if COLUMNS == 2:
        return KeyRanges(start, stop, nothing, nothing)
    return KeyRanges(start, stop, tl.load(at + 2, mask=ok, other=0), tl.load(at + 3, mask=ok, other=0))


@triton.jit
def vertical(ranges):
    """The ranges of rows [M, 1], for scores [M, N]."""
    return KeyRanges(ranges.start[:, None], ranges.stop[:, None], ranges.start2[:, None], ranges.stop2[:, None])


@triton.jit
def horizontal(ranges):
    """The ranges of rows [1, M], for scores [N, M]."""
    return KeyRanges(ranges.start[None, :], ranges.stop[None, :], ranges.start2[None, :], ranges.stop2[None, :])


@triton.jit
def hull(ranges, COLUMNS: tl.constexpr):
    """The smallest [first, last) that contains the ranges of all rows; [0, 0) if no row has a key."""
    first = tl.min(tl.where(ranges.stop > ranges.start, ranges.start, FAR), 0)
    last = tl.max(ranges.stop, 0)
    if COLUMNS == 4:
        first = tl.minimum(first, tl.min(tl.where(ranges.stop2 > ranges.start2, ranges.start2, FAR), 0))
        last = tl.maximum(last, tl.max(ranges.stop2, 0))
    return first, last


@triton.jit
def allowed_pairs(keys, kv_len, ok_rows, ranges, COLUMNS: tl.constexpr):
    """Whether a pair is within the row's ranges and the tensors: [M, N] for rows [M, 1] and keys [1, N]; [N, M] for
    rows [1, M] and keys [N, 1]."""
    inside = ok_rows & (keys < kv_len)
    if COLUMNS == 0:
        return inside
    pairs = (keys >= ranges.start) & (keys < ranges.stop)
    if COLUMNS == 4:
        pairs |= (keys >= ranges.start2) & (keys < ranges.stop2)
    return inside & pairs


@triton.jit
def ancestor_pairs(node, ok_rows, ancestors, nodes):
    """Whether each row [M, 1] attends to these nodes of its draft tree [M, N]: to those before the tree (< 0), its
    ancestors, and itself. ancestors: pointers [M, 1] to a byte for each node."""
    inside = ok_rows & (node >= 0) & (node < nodes)
    return (node < 0) | (tl.load(ancestors + node, mask=inside, other=0) != 0)


@triton.jit
def load_runs(at):
    """The `TileRuns` of a block of rows."""
    return TileRuns(
        tl.load(at),
        tl.load(at + 1),
        tl.load(at + 2),
        tl.load(at + 3),
        tl.load(at + 4),
        tl.load(at + 5),
        tl.load(at + 6),
        tl.load(at + 7),
    )


@triton.jit
def count_tiles(runs):
    """(number of partial tiles at the edges of both runs, number of full tiles)."""
    edges = runs.full_first - runs.first + runs.last - runs.full_last
    edges = edges + runs.full_first2 - runs.first2 + runs.last2 - runs.full_last2
    return edges, runs.full_last - runs.full_first + runs.full_last2 - runs.full_first2


@triton.jit
def nth_tile(n, runs, FULL: tl.constexpr):
    """The n-th tile: of the full tiles, or of the partial tiles at the edges of the two runs."""
    if FULL:
        one = runs.full_last - runs.full_first
        return tl.where(n < one, runs.full_first + n, runs.full_first2 + n - one)
    left, right = runs.full_first - runs.first, runs.last - runs.full_last
    left2 = runs.full_first2 - runs.first2
    in_first = tl.where(n < left, runs.first + n, runs.full_last + n - left)
    m = n - left - right
    is_first = n < left + right
    return tl.where(is_first, in_first, tl.where(m < left2, runs.first2 + m, runs.full_last2 + m - left2))


@triton.jit
def tiles_before(tile, runs):
    """How many tiles of two runs come before a tile."""
    one = tl.minimum(tl.maximum(tile, runs.first), runs.last) - runs.first
    return one + tl.minimum(tl.maximum(tile, runs.first2), runs.last2) - runs.first2

"""How the forward divides its work: blocks of rows, heads that share a block, and splits of the keys.

A few rows per key/value head are decoded: the heads of a group share one block, so that each key is read once, and keys
are split among programs. Many rows prefill, a block of rows of one head at a time. A pack has both kinds of documents
(see `packs`), and batch-invariant blocks are those of `invariant`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

from torch import Tensor

from undivided.backends.triton import invariant, packs, tables, trees
from undivided.backends.triton.inputs import KernelInputs, processors
from undivided.backends.triton.rows import Rows
from undivided.kernels.triton import config
from undivided.masks import NormalForm
from undivided.request.problem import Problem

MAX_DECODE_ROWS = 64
"""Up to this many (query, head) rows per key/value head share one tile, and with it each read of the keys
(decoding)."""
MAX_DECODE_QUERIES = 4
"""Up to this many queries are decoded even if all heads of a key/value head have more rows: as many heads as fit share
a tile (DeepSeek V3 has 128 heads over one)."""
MAX_SHORT = 16
"""Queries of a document that is decoded in a pack. With more, tiles of 16 rows would read keys more often than tiles of
64 rows of each head."""
MAX_SPLITS = 32
"""Upper limit of split-KV; each split writes a partial result in fp32."""
WARPS = 8
"""Warps of decoding that a processor runs at once: registers allow no more."""
KEYS_PER_SPLIT = 256
"""A split with fewer keys costs more than it saves."""
MAX_PIECE_BYTES = 128 << 20
"""Pieces of batch-invariant calls take at most so much memory: if they took more, one program computes a block."""


class LaunchBlocks(NamedTuple):
    """The work of one launch. A row of a block is a (query, head of the group) pair.

    Args:
        tile: rows of a block, keys of a tile, warps and stages.
        steps: columns of keys and values that are read at a time.
        group: heads of a key/value head that share a block.
        number: blocks of rows.
        splits: splits of the keys, or programs that share the pieces of `invariant`.
        tile_ranges: int32 [B|1, number, 8], the tiles of keys of each block, as `tables.Tables.rows`.
        places: int32 [B|1, number, 3], where blocks begin and end; None if they follow one another.
        tile_ranges_of: computes `tile_ranges` for another mask of the same structure; None if they depend on more than
            its ranges.
    """

    tile: config.Config
    steps: config.Steps
    group: int
    number: int
    splits: int
    tile_ranges: Tensor
    places: Tensor | None
    tile_ranges_of: Callable[[NormalForm], Tensor] | None = None


def all_blocks(inputs: KernelInputs, rows: Rows) -> list[LaunchBlocks]:
    """The blocks of each launch that these rows need."""
    if inputs.problem.batch_invariant:
        return [_batch_invariant(inputs, rows)]
    if packs.applies(inputs.call, inputs.form):
        return _document_blocks(inputs)
    return [_consecutive_blocks(inputs, rows)]


def _batch_invariant(inputs: KernelInputs, rows: Rows) -> LaunchBlocks:
    """Blocks that begin where a sequence begins. Their pieces are the same, however many programs share them."""
    problem, form = inputs.problem, inputs.form if inputs.masked else None
    tile, group, steps = inputs.tile("forward"), problem.heads // problem.kv_heads, _steps(problem, "forward")
    blocks = invariant.blocks(form, problem, rows.span, tile, group, inputs.q.device)
    number = blocks.places.shape[1]
    programs = number * -(-problem.v_dim // steps.values) * problem.kv_heads * problem.batch
    pieces, length = invariant.pieces(problem), rows.span.stop - rows.span.start
    splits = 1
    if pieces * problem.batch * problem.heads * length * problem.v_dim * 4 <= MAX_PIECE_BYTES:
        splits = _splits(inputs, pieces * invariant.piece(), programs, tile, invariant.piece())
    return LaunchBlocks(tile, steps, group, number, splits, blocks.tile_ranges, blocks.places)


def _consecutive_blocks(inputs: KernelInputs, rows: Rows) -> LaunchBlocks:
    """Blocks that follow one another, of rows that are decoded or prefilled."""
    problem, length = inputs.problem, rows.span.stop - rows.span.start
    few = length * problem.heads <= MAX_DECODE_ROWS * problem.kv_heads or length <= MAX_DECODE_QUERIES
    decoding = few and rows.span.start == 0
    group = _heads_of_a_tile(problem, length) if decoding else 1
    name = "decode" if decoding else "forward"
    tile, steps = inputs.tile(name), _steps(problem, name)
    if decoding:
        tile = inputs.with_rows(tile, length * group)
    count = -(-length * group // tile.block_m)
    programs = count * -(-problem.v_dim // steps.values) * (problem.heads // group) * problem.batch
    splits = _splits(inputs, problem.kv_len, programs, tile) if decoding else 1
    sizes, device = (problem.q_len, problem.kv_len, tile.block_m, tile.block_n), inputs.q.device

    def tile_ranges_of(form: NormalForm | None, always_masked: bool = False) -> Tensor:
        return tables.cached_tables(form, *sizes, device, group=group, always_masked=always_masked).rows

    tile_ranges = _tile_ranges(inputs, (tile, group), tile_ranges_of)[:, rows.span.start // tile.block_m :]
    by_ranges = inputs.masked and not inputs.always_masked and rows.span.start == 0
    return LaunchBlocks(tile, steps, group, count, splits, tile_ranges, None, tile_ranges_of if by_ranges else None)


def _tile_ranges(
    inputs: KernelInputs, key: Hashable, tile_ranges_of: Callable[[NormalForm | None, bool], Tensor]
) -> Tensor:
    """The tiles of each block of rows, from a function of the mask and of whether no tile is full; with a draft tree,
    those before it are full."""
    form = inputs.form if inputs.masked else None
    if form is None or inputs.tree is None or inputs.bias is not None:
        return tile_ranges_of(form, inputs.always_masked)
    return trees.tile_ranges(form, key, lambda form: tile_ranges_of(form, not form.exact))


def _document_blocks(inputs: KernelInputs) -> list[LaunchBlocks]:
    """The blocks of long documents and those of short ones, or of one kind if that is known (see `packs`)."""
    problem = inputs.problem
    assert problem.documents is not None
    group = _heads_of_a_tile(problem, MAX_DECODE_QUERIES)
    short = min(MAX_DECODE_ROWS // group, MAX_SHORT)
    longest = problem.documents[1]
    if longest is not None and longest <= short:
        return [_blocks_of_lengths(inputs, "decode", group, 0, None)]
    return [
        _blocks_of_lengths(inputs, "forward", 1, short + 1, None),
        _blocks_of_lengths(inputs, "decode", group, 0, short),
    ]


def _blocks_of_lengths(inputs: KernelInputs, name: str, group: int, shortest: int, longest: int | None) -> LaunchBlocks:
    """The blocks, for the tile sizes of a pass, of the documents of `shortest` to `longest` queries."""
    problem, form = inputs.problem, inputs.form
    assert form is not None and problem.documents is not None
    number, _, longest_kv = problem.documents
    tile, steps, splits = inputs.tile(name), _steps(problem, name), 1
    if name == "decode" and longest is None and (most := problem.documents[1]) is not None:
        tile = inputs.with_rows(tile, most * group)
    blocks = packs.blocks(form, problem.q_len, tile, group, inputs.always_masked, shortest, longest)

    def tile_ranges_of(form: NormalForm | None, always_masked: bool) -> Tensor:
        assert form is not None
        return packs.blocks(form, problem.q_len, tile, group, always_masked, shortest, longest).tile_ranges

    tile_ranges = _tile_ranges(inputs, (tile, group, shortest, longest), tile_ranges_of)
    if name == "decode":
        keys = min(longest_kv or problem.kv_len, -(-problem.kv_len // number))
        programs = number * -(-problem.v_dim // steps.values) * (problem.heads // group)
        splits = _splits(inputs, keys, programs, tile)
    return LaunchBlocks(tile, steps, group, blocks.places.shape[1], splits, tile_ranges, blocks.places)


def _heads_of_a_tile(problem: Problem, queries: int) -> int:
    """How many heads of a key/value head share a tile of so many queries: all, or the largest divisor that fits."""
    heads = problem.heads // problem.kv_heads
    return max(n for n in range(1, heads + 1) if heads % n == 0 and (n == 1 or n * queries <= MAX_DECODE_ROWS))


def _steps(problem: Problem, name: str) -> config.Steps:
    """The steps of columns of a pass."""
    few_bytes = problem.dtype.itemsize == 2 and problem.quantized is None
    return config.column_steps(problem.qk_dim, problem.v_dim, name == "decode" and few_bytes)


def _splits(inputs: KernelInputs, kv_len: int, programs: int, tile: config.Config, fewest: int = KEYS_PER_SPLIT) -> int:
    """Number of splits of the keys, a power of two: as many programs as processors run at once, with at least so many
    keys in each."""
    at_once = max(WARPS // tile.warps, 2) * processors(inputs.q.device)
    splits = min(at_once // programs, -(-kv_len // fewest), MAX_SPLITS)
    return 1 << max(splits, 1).bit_length() - 1

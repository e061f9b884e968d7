"""Which tiles a block of query rows needs, and which of them need no mask; computed from the row ranges on the device.

A block of rows needs the tiles that the union of its rows' ranges touches, one run per range. A tile is full if every
row of the block allows all of its keys. That gives eight numbers per block of rows, counted in tiles:

    [first, full_first, full_last, last) of the first range, and of the second

Nothing here waits for the device. What follows from a mask is computed once (`once_per_mask`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from undivided.arguments.tensors import is_traced
from undivided.masks import NormalForm

T = TypeVar("T")

FAR = 2**31 - 1
"""Beyond every key."""
PAIRS_AT_ONCE = 1 << 22
"""(row block, key tile) pairs compared at once by `column_table`: 32 MiB of int32."""


class Tables(NamedTuple):
    """The tables of a mask.

    rows: int32 [B|1, row blocks, 8], as described above.
    columns: int32 [B|1, key tiles, 4]: [first, last) block of rows that needs the tile with its mask, and [first, last)
        block that needs it without; not every block between them does. None if not requested.
    """

    rows: Tensor
    columns: Tensor | None


class RowBlocks(NamedTuple):
    """Blocks of rows that begin where sequences begin, of P blocks at most: only the device knows how many there are.

    places: int32 [B|1, P, 3]: the first row of each, one past the last row of its sequence, and the key at which its
        tiles begin; the rows are 0 and 0 of a block that does not exist.
    tile_ranges: int32 [B|1, P, 8]: as `Tables.rows`, in tiles from that key on.
    """

    places: Tensor
    tile_ranges: Tensor


_of_masks: WeakKeyDictionary[NormalForm, dict[Hashable, Any]] = WeakKeyDictionary()


def once_per_mask(form: NormalForm, key: Hashable, compute: Callable[..., T], *arguments: Any) -> T:
    """``compute(*arguments)``, kept as long as the mask under `key`, which says what is computed and from what; while
    something traces, nothing is kept."""
    kept = _of_masks.setdefault(form, {})
    found: T | None = kept.get(key)
    if found is None:
        found = compute(*arguments)
        if not is_traced():
            kept[key] = found
    return found


def cached_tables(
    form: NormalForm | None,
    q_len: int,
    kv_len: int,
    block_m: int,
    block_n: int,
    device: torch.device,
    *,
    group: int = 1,
    always_masked: bool = False,
    columns: bool = False,
) -> Tables:
    """The tables of a mask (None: every pair is allowed), cached per mask.

    Args:
        group: heads that share a block of rows, so that a query is `group` rows.
        always_masked: no tile is full, because more than ranges decides (a bias, a dense mask).
        columns: also the blocks of rows that each key tile needs, for a pass over keys.
    """
    if form is None:
        return _every_pair(q_len * group, kv_len, block_m, block_n, device, always_masked, columns)
    key = (block_m, block_n, group, always_masked, columns)
    return once_per_mask(form, ("tables", key), _tables, form, kv_len, *key)


def _tables(
    form: NormalForm, kv_len: int, block_m: int, block_n: int, group: int, always_masked: bool, columns: bool
) -> Tables:
    rows = _row_table(form.ranges.clamp(0, kv_len), block_m, block_n, group, always_masked or not form.exact)
    return Tables(rows, column_table(rows, -(-kv_len // block_n)) if columns else None)


def _every_pair(
    rows: int, kv_len: int, block_m: int, block_n: int, device: torch.device, always_masked: bool, columns: bool
) -> Tables:
    whole = 0 if always_masked else kv_len // block_n
    compute = _plain_tables.__wrapped__ if is_traced() else _plain_tables
    return compute(-(-rows // block_m), -(-kv_len // block_n), whole, device, columns)


@functools.lru_cache(64)  # a few lengths per kind of layer, 32 bytes per block of rows
def _plain_tables(blocks: int, tiles: int, whole: int, device: torch.device, columns: bool) -> Tables:
    """The tables without a mask, written on the device: copying numbers there would wait for it."""
    table = torch.zeros((1, max(blocks, 1), 8), dtype=torch.int32, device=device)
    table[..., 2] = whole
    table[..., 3] = tiles
    return Tables(table, column_table(table, tiles) if columns else None)


def _row_table(ranges: Tensor, block_m: int, block_n: int, group: int, always_masked: bool) -> Tensor:
    _, queries, width = ranges.shape
    rows = queries * group
    blocks = max(-(-rows // block_m), 1)
    if queries == 1:
        sides = [ranges[..., side : side + 2] for side in range(0, width, 2)]
        runs = [_run_of_one(ends, block_n, always_masked).expand(-1, blocks, -1) for ends in sides]
    else:
        if group > 1:
            ranges = ranges.repeat_interleave(group, dim=1)
        least, greatest = _ends_of_blocks(ranges, blocks * block_m - rows, block_m)
        runs = [*_runs(least, greatest, block_n, always_masked).unbind(2)]
    if width == 2:
        return torch.nn.functional.pad(runs[0], (0, 4)).contiguous()
    return torch.cat((runs[0], without_overlap(*runs)), -1).contiguous()


def _ends_of_blocks(ranges: Tensor, missing: int, block: int) -> tuple[Tensor, Tensor]:
    """The least and the greatest [start, stop) of the rows of each block, [B, blocks, runs, 2]. A row without keys
    starts far behind all keys and stops at 0. The last block lacks some rows."""
    start, stop = ranges.unflatten(-1, (-1, 2)).unbind(-1)
    none = stop <= start
    ends = torch.stack((start.masked_fill(none, FAR), stop.masked_fill(none, 0)), -1)
    least = greatest = ends
    if missing:
        beyond = (0, 0, 0, 0, 0, missing)
        least, greatest = (torch.nn.functional.pad(ends, beyond, value=value) for value in (FAR, 0))
    return least.unflatten(1, (-1, block)).amin(2), greatest.unflatten(1, (-1, block)).amax(2)


def _runs(least: Tensor, greatest: Tensor, block_n: int, always_masked: bool) -> Tensor:
    """[first, full_first, full_last, last) tile of each run of each block, [B, blocks, runs, 4]."""
    (first, earliest), (latest, last) = least.unbind(-1), greatest.unbind(-1)
    more = block_n - 1
    begin, end = first // block_n, (last + more) // block_n
    if always_masked:
        full_begin = full_end = end
    else:  # a tile is full only if all rows of the block have a range
        full_begin = torch.where(latest < FAR, (latest.clamp(max=FAR - more) + more) // block_n, end)
        full_end = torch.minimum(earliest, last) // block_n
    full_begin = full_begin.clamp(begin, end)
    full_end = torch.maximum(full_end, full_begin).clamp(max=end)
    run = torch.stack((begin, full_begin, full_end, end), -1)
    return run.masked_fill((last <= first)[..., None], 0)


def _run_of_one(ranges: Tensor, block_n: int, always_masked: bool) -> Tensor:
    """`_runs` of blocks whose rows are one query, with one range [B, 1, 2]: a third of the operators, in every step of
    decoding."""
    ends = ranges * (ranges[..., 1:] > ranges[..., :1])
    run = torch.stack((ends // block_n, (ends + (block_n - 1)) // block_n), -1).flatten(-2)
    # [begin, full_begin, full_end, end), but a range within one tile ends in it before the next one begins
    if always_masked:
        run[..., 1:3] = run[..., 3:]
    else:
        run[..., 2] = torch.maximum(run[..., 1], run[..., 2])
    return run


def without_overlap(run: Tensor, second: Tensor) -> Tensor:
    """The second run without the tiles of the first: tiles of both are visited once and masked by both ranges."""
    begin, full_begin, full_end, end = second.unbind(-1)
    first, last = run[..., 0], run[..., 3]
    overlap = (last > first) & (end > begin) & (begin < last)
    begin = torch.where(overlap, last, begin)
    end = torch.maximum(begin, end)
    full_begin = full_begin.clamp(begin, end)
    full_end = torch.maximum(full_end.clamp(begin, end), full_begin)
    return torch.stack((begin, full_begin, full_end, end), -1)


def column_table(rows: Tensor, tiles: int) -> Tensor:
    """For each key tile, the [first, last) blocks of rows that need it; see `Tables.columns`."""
    batch, blocks, _ = rows.shape
    number = torch.arange(1, blocks + 1, device=rows.device, dtype=torch.int32)[:, None]
    runs = rows.view(batch, 1, blocks, 2, 4)
    begin, end = runs[..., :2], runs[..., 2:].flip(-1)  # of (all tiles of a run, its full tiles)
    columns = []
    step = max(PAIRS_AT_ONCE // max(blocks * batch, 1), 1)
    for start in range(0, tiles, step):
        tile = torch.arange(start, min(start + step, tiles), device=rows.device, dtype=torch.int32)[:, None, None, None]
        needed = ((tile >= begin) & (tile < end)).any(-2)
        needed[..., 0] &= ~needed[..., 1]  # [B, tiles, blocks, (with the mask, without)]
        last = (needed * number).amax(-2)
        first = torch.where(needed, number - 1, FAR).amin(-2)
        columns.append(torch.stack((first.where(last > 0, 0), last), -1).flatten(-2))
    if not columns:
        return rows.new_zeros((batch, 0, 4))
    return torch.cat(columns, 1)

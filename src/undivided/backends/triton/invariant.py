"""Batch-invariant forward: blocks of rows and tiles of keys that begin where a sequence begins, all of them masked.

A row's tiles are then the same in every call, in ascending order, whichever rows share its block. A tile in which a
row has no key leaves its maximum, its sum and its output as they are, to the bit. Nothing here waits for the device.

Legend: B batch, Sq query rows, P blocks of rows, M rows of a block: (query, head of the group) pairs.
"""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from undivided.arguments.tensors import is_traced
from undivided.backends.triton import places, tables
from undivided.kernels.triton.config import Config
from undivided.masks import NormalForm
from undivided.request.problem import Problem


class Blocks(NamedTuple):
    """The blocks of rows of a launch.

    Args:
        number: P, an upper limit: the number of blocks of all sequences is known on the device only.
        places: int32 [B|1, P, 3]: the first row, one past the last row, and the key at which the tiles begin.
        runs: int32 [B|1, P, 8]: as `tables.Tables.rows`, in tiles from that key on; no tile is full.
    """

    number: int
    places: Tensor
    runs: Tensor


_cached: WeakKeyDictionary[NormalForm, dict[object, Blocks]] = WeakKeyDictionary()


def blocks(
    form: NormalForm | None, problem: Problem, rows: slice, tile: Config, group: int, device: torch.device
) -> Blocks:
    """The blocks of these rows of a mask (None: every pair is allowed), cached per mask.

    Args:
        form: the mask's ranges.
        problem: the problem of the call.
        rows: the rows of the launch; rows of a block are counted from its first.
        tile: the tile sizes.
        group: heads that share a block of rows, so that a query is `group` rows.
        device: device of the tables.
    """
    if form is None:
        uniform = places.uniform(problem.q_len * group, tile.block_m, device)
        runs = torch.zeros(1, uniform.shape[1], 8, dtype=torch.int32, device=device)
        runs[..., 1:4] = -(-problem.kv_len // tile.block_n)
        return Blocks(uniform.shape[1], uniform, runs)
    memory = _cached.setdefault(form, {})
    key = (rows.start, rows.stop, tile.block_m, tile.block_n, group)
    cached = memory.get(key)
    if cached is None:
        cached = _blocks(form, problem, rows, tile, group)
        if not is_traced():
            memory[key] = cached
    return cached


def _blocks(form: NormalForm, problem: Problem, rows: slice, tile: Config, group: int) -> Blocks:
    ends = None if form.geometry is None else form.geometry.q_slot_ends
    device = form.ranges.device
    if ends is None:
        at = places.uniform((rows.stop - rows.start) * group, tile.block_m, device)
    else:
        at = places.of_documents(ends, rows, problem.q_len, group, tile.block_m)
    query, real = places.rows_of(at, tile.block_m, group)
    index = (query + rows.start).clamp(max=max(problem.q_len - 1, 0))
    origin = torch.zeros(1, at.shape[1], dtype=torch.int64, device=device)
    if form.first_key is not None:
        origin = form.first_key[:, index[0, :, 0]].long()
    at = at.expand(origin.shape[0], -1, -1).clone()
    at[..., 2] = origin
    table = form.table[:, index[0]]  # [B|1, P, M, 2|4]
    runs = [
        _run(table[..., side], table[..., side + 1], real, origin, tile.block_n)
        for side in range(0, table.shape[-1], 2)
    ]
    runs.append(tables.without_overlap(*runs) if len(runs) == 2 else torch.zeros_like(runs[0]))
    return Blocks(at.shape[1], at, torch.cat((runs[0], runs[-1]), -1).contiguous())


def _run(start: Tensor, stop: Tensor, real: Tensor, origin: Tensor, block_n: int) -> Tensor:
    """[first, last, last, last) tile of the hull of the ranges of each block: none of them is full."""
    some = real & (stop > start)
    first = torch.where(some, start, tables.FAR).amin(-1) - origin
    last = torch.where(some, stop, 0).amax(-1) - origin
    last = -(-last // block_n)
    run = torch.stack((first // block_n, last, last, last), -1)
    return run.masked_fill(~some.any(-1)[..., None], 0).to(torch.int32)

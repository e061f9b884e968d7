"""Batch-invariant forward: blocks of rows and tiles of keys that begin where a sequence begins, all of them masked.

A row's tiles are then the same in every call, in ascending order, whichever rows share its block. A tile in which a
row has no key leaves its maximum, its sum and its output as they are, to the bit. Pieces of a fixed number of keys are
summed from zero and merged in their order, so that programs can share a long sequence without another result. Nothing
here waits for the device.

Legend: B batch, Sq query rows, P blocks of rows, M rows of a block: (query, head of the group) pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from undivided.backends.triton import tables
from undivided.backends.triton.tables import RowBlocks
from undivided.kernels.triton.config import Config, is_interpreted
from undivided.masks import NormalForm
from undivided.request.problem import Problem

PIECE = 1024
"""Keys of a piece, a multiple of every tile's. Decoding 8k keys is shared by 8 programs per key/value head; prefill
merges once per piece, which is as much work as one or two tiles take for their softmax."""
INTERPRETED_PIECE = 32
"""The same under Triton's interpreter, so that short test sequences have several pieces."""


def piece() -> int:
    """Keys of a piece."""
    return INTERPRETED_PIECE if is_interpreted() else PIECE


def pieces(problem: Problem) -> int:
    """Pieces of the longest sequence, at most."""
    longest = None if problem.documents is None else problem.documents[2]
    return -(-(longest or problem.kv_len) // piece())


def blocks(
    form: NormalForm | None, problem: Problem, rows: slice, tile: Config, group: int, device: torch.device
) -> RowBlocks:
    """The blocks of these rows of a mask (None: every pair is allowed), cached per mask. No tile is full.

    Args:
        form: the mask's ranges.
        problem: the problem of the call.
        rows: the rows of the launch; rows of a block are counted from its first.
        tile: the tile sizes.
        group: heads that share a block of rows, so that a query is `group` rows.
        device: device of the tables.
    """
    if form is None:
        places = _uniform_places(problem.q_len * group, tile.block_m, device)
        runs = torch.zeros(1, places.shape[1], 8, dtype=torch.int32, device=device)
        runs[..., 1:4] = -(-problem.kv_len // tile.block_n)
        return RowBlocks(places, runs)
    key = ("invariant", rows.start, rows.stop, tile.block_m, tile.block_n, group)
    return tables.once_per_mask(form, key, _blocks, form, problem, rows, tile, group)


def _blocks(form: NormalForm, problem: Problem, rows: slice, tile: Config, group: int) -> RowBlocks:
    ends = None if form.geometry is None else form.geometry.q_slot_ends
    device = form.ranges.device
    if ends is None:
        places = _uniform_places((rows.stop - rows.start) * group, tile.block_m, device)
    else:
        places = _document_places(ends, rows, problem.q_len, group, tile.block_m)
    first, end = places[..., 0].long(), places[..., 1].long()
    inside = first[..., None] + torch.arange(tile.block_m, device=device)  # [1, P, M]
    real = inside < end[..., None]
    index = (inside // group + rows.start).clamp(max=max(problem.q_len - 1, 0))
    origin = torch.zeros(1, places.shape[1], dtype=torch.int64, device=device)
    if form.first_key is not None:
        origin = form.first_key[:, index[0, :, 0]].long()
    places = places.expand(origin.shape[0], -1, -1).clone()
    places[..., 2] = origin
    table = form.table[:, index[0]]  # [B|1, P, M, 2|4]
    runs = [
        _run(table[..., side], table[..., side + 1], real, origin, tile.block_n)
        for side in range(0, table.shape[-1], 2)
    ]
    runs.append(tables.without_overlap(*runs) if len(runs) == 2 else torch.zeros_like(runs[0]))
    return RowBlocks(places, torch.cat((runs[0], runs[-1]), -1).contiguous())


def _uniform_places(rows: int, block_m: int, device: torch.device) -> Tensor:
    """Places of blocks of equal size, [1, P, 3]."""
    first = torch.arange(0, max(rows, 1), block_m, dtype=torch.int32, device=device)
    return torch.stack((first, torch.full_like(first, rows), torch.zeros_like(first)), -1)[None]


def _document_places(ends: Tensor, rows: slice, q_len: int, group: int, block_m: int) -> Tensor:
    """Places of blocks that begin at the first row of each document, [1, P, 3]; the last ones may be empty."""
    stop = ends.clone()
    stop[-1] = q_len  # rows after all documents have results too: 0
    start = torch.cat((torch.zeros_like(stop[:1]), stop[:-1]))
    start, stop = ((bound.clamp(rows.start, rows.stop) - rows.start) * group for bound in (start, stop))
    counts = -(-(stop - start) // block_m)
    last = counts.cumsum(0)
    max_blocks = -(-(rows.stop - rows.start) * group // block_m) + ends.numel()
    number = torch.arange(max_blocks, device=ends.device)
    document = torch.searchsorted(last, number, right=True)
    exists = document < ends.numel()
    document = document.clamp(max=ends.numel() - 1)
    first = start[document] + (number - (last - counts)[document]) * block_m
    places = torch.stack((first, stop[document], torch.zeros_like(first)), -1)
    return (places * exists[:, None]).to(torch.int32)[None]


def _run(start: Tensor, stop: Tensor, real: Tensor, origin: Tensor, block_n: int) -> Tensor:
    """[first, last, last, last) tile of the hull of the ranges of each block: none of them is full."""
    some = real & (stop > start)
    first = torch.where(some, start, tables.FAR).amin(-1) - origin
    last = torch.where(some, stop, 0).amax(-1) - origin
    last = -(-last // block_n)
    run = torch.stack((first // block_n, last, last, last), -1)
    return run.masked_fill(~some.any(-1)[..., None], 0).to(torch.int32)

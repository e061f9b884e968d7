"""Where the blocks of rows of a launch lie, if they do not simply follow one another: a block never has rows of two
documents.

Legend: N documents, P blocks of rows, M rows of a block. A row is a (query, head of the group) pair. Nothing here waits
for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor


def uniform(rows: int, block_m: int, device: torch.device) -> Tensor:
    """Places of blocks of equal size, int32 [1, P, 3]: first row, one past the last row, and 0."""
    first = torch.arange(0, max(rows, 1), block_m, dtype=torch.int32, device=device)
    return torch.stack((first, torch.full_like(first, rows), torch.zeros_like(first)), -1)[None]


def of_documents(ends: Tensor, rows: slice, q_len: int, group: int, block_m: int, longer_than: int = 0) -> Tensor:
    """Places of blocks that begin at the first row of each document, [1, P, 3]; the last ones may be empty.

    Args:
        ends: one past the last query of each document, int64 [N].
        rows: the queries of the launch, from whose first the rows are counted.
        q_len: all queries; those after all documents belong to the last one.
        group: heads per query.
        longer_than: documents of at most this many rows have no blocks.
    """
    start, stop = _bounds(ends, rows, q_len, group)
    size = stop - start
    counts = -(-size // block_m) * (size > longer_than)
    last = counts.cumsum(0)
    max_blocks = -(-(rows.stop - rows.start) * group // block_m) + ends.numel()
    number = torch.arange(max_blocks, device=ends.device)
    document = torch.searchsorted(last, number, right=True)
    exists = document < ends.numel()
    document = document.clamp(max=ends.numel() - 1)
    first = start[document] + (number - (last - counts)[document]) * block_m
    places = torch.stack((first, stop[document], torch.zeros_like(first)), -1)
    return (places * exists[:, None]).to(torch.int32)[None]


def of_short_documents(ends: Tensor, q_len: int, group: int, block_m: int, longest: int) -> Tensor:
    """Places of the blocks of the documents of at most `longest` rows, [1, P, 3]: as many for every document, so that
    most of them may be empty."""
    start, stop = _bounds(ends, slice(0, q_len), q_len, group)
    blocks = -(-longest // block_m)
    first = start[:, None] + torch.arange(0, blocks * block_m, block_m, device=ends.device)
    exists = (first < stop[:, None]) & (stop - start <= longest)[:, None]
    places = torch.stack((first, stop[:, None].expand_as(first), torch.zeros_like(first)), -1)
    return (places * exists[..., None]).to(torch.int32).flatten(0, 1)[None]


def _bounds(ends: Tensor, rows: slice, q_len: int, group: int) -> tuple[Tensor, Tensor]:
    """First row and one past the last row of each document, int64 [N]."""
    stop = ends.clone()
    stop[-1] = q_len  # rows after all documents have results too: 0
    start = torch.cat((torch.zeros_like(stop[:1]), stop[:-1]))
    start, stop = ((bound.clamp(rows.start, rows.stop) - rows.start) * group for bound in (start, stop))
    return start, stop


def rows_of(places: Tensor, block_m: int, group: int) -> tuple[Tensor, Tensor]:
    """The query of each row of each block, int64 [1, P, M], and whether the block has that row."""
    row = places[..., :1].long() + torch.arange(block_m, device=places.device)
    return row // group, row < places[..., 1:2]

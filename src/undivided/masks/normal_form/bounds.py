"""Operations on bounds of ranges, int ``[B|1, Sq, 2|4]``: find, normalise, intersect, and count per cell of a grid."""

from __future__ import annotations

import torch
from torch import Tensor

from undivided.arguments.tensors import readable

_LARGE = 1 << 14
"""Pairs from which on rows are searched word by word."""


def row_hull(allowed: Tensor) -> tuple[Tensor, Tensor]:
    """Per row the first key that is allowed and one past the last one, int ``[.., rows]``; ``keys`` and 0 if none is.

    Args:
        allowed: bool ``[.., rows, keys]``.

    >>> row_hull(torch.tensor([[False, True, False, True, False], [False] * 5]))
    (tensor([1, 5], dtype=torch.int32), tensor([4, 0], dtype=torch.int32))
    """
    if allowed.numel() >= _LARGE and readable(allowed):
        return _row_hull_by_words(allowed)
    keys = allowed.shape[-1]
    index = torch.arange(keys, dtype=torch.int32, device=allowed.device)
    return torch.where(allowed, index, keys).amin(-1), torch.where(allowed, index + 1, 0).amax(-1)


def _row_hull_by_words(allowed: Tensor) -> tuple[Tensor, Tensor]:
    """As `row_hull`, eight keys at a time: 2048 x 2048 pairs take a tenth to a fifth of the time."""
    keys = allowed.shape[-1]
    if keys % 8 or allowed.storage_offset() % 8 or not allowed.is_contiguous():
        padded = torch.zeros(*allowed.shape[:-1], -(-keys // 8) * 8, dtype=torch.bool)
        padded[..., :keys] = allowed
        allowed = padded
    words = allowed.view(torch.int64)
    index = torch.arange(words.shape[-1], dtype=torch.int32)  # amin of int64 takes ten times as long
    used = words != 0
    first = torch.where(used, index, words.shape[-1] - 1).amin(-1, keepdim=True)
    last = torch.where(used, index, 0).amax(-1, keepdim=True)
    from_left, from_right = torch.arange(1, 9, dtype=torch.int32), torch.arange(8, 0, -1, dtype=torch.int32)
    in_first = words.gather(-1, first.long()).view(torch.bool) * from_right
    in_last = words.gather(-1, last.long()).view(torch.bool) * from_left
    start = first[..., 0] * 8 + (8 - in_first.amax(-1))
    stop = last[..., 0] * 8 + in_last.amax(-1)
    return start.clamp(max=keys), stop


def tidy(bounds: Tensor) -> Tensor:
    """The bounds in order, int32: touching ranges joined, empty ranges ``[0, 0)`` and last."""
    start, stop = bounds[..., 0], bounds[..., 1]
    used = stop > start
    if bounds.shape[-1] == 2:
        return (bounds * used[..., None]).to(torch.int32)
    next_start, next_stop = bounds[..., 2], bounds[..., 3]
    next_used = next_stop > next_start
    joined = used & next_used & (stop == next_start)
    stop = torch.where(joined | ~used, next_stop, stop)
    start = torch.where(used, start, next_start)
    both = used & next_used & ~joined
    first = torch.stack((start, stop), -1) * (used | next_used)[..., None]
    return torch.cat((first, bounds[..., 2:] * both[..., None]), -1).to(torch.int32)


def overlap(a: Tensor, b: Tensor) -> Tensor:
    """The intersection of two ranges ``[B|1, Sq, 2]``."""
    start = torch.maximum(a[..., 0], b[..., 0])
    return torch.stack((start, torch.minimum(a[..., 1], b[..., 1]).clamp(min=start)), -1)


def count_in_cells(ranges: Tensor, cell: Tensor, cells: int, cuts: Tensor) -> Tensor:
    """Pairs of ranges in each cell of a grid, int64 ``[B|1, cells, len(cuts)-1]``.

    A range [s, e) covers F(e) - F(s) of a column, F(x) = clamp(x - left, 0, width): the full width of every column
    left of x, and x - left of the column that contains x. So each end needs one histogram entry and one remainder.

    Args:
        ranges: ``[B|1, Sq, 2|4]``.
        cell: the row of cells that each query row belongs to, int64 ``[Sq]``.
        cells: number of rows of cells.
        cuts: ascending edges of the columns, int64 ``[columns + 1]``.
    """
    batch, columns = ranges.shape[0], cuts.numel() - 1
    if columns < 1 or not ranges.shape[1]:
        return torch.zeros(batch, cells, max(columns, 0), dtype=torch.int64, device=ranges.device)
    left_of = torch.zeros(batch, cells * (columns + 1), dtype=torch.int64, device=ranges.device)
    remainder = torch.zeros_like(left_of)
    for side in range(ranges.shape[-1]):
        end = ranges[..., side].to(torch.int64)
        column = torch.searchsorted(cuts, end, right=True) - 1
        sign = 1 if side % 2 else -1
        index = cell * (columns + 1) + column
        left_of.scatter_add_(1, index, torch.full_like(index, sign))
        remainder.scatter_add_(1, index, (end - cuts[column]) * sign)
    left_of = left_of.view(batch, cells, columns + 1)
    beyond = left_of.flip(-1).cumsum(-1).flip(-1)[..., 1:]
    return beyond * cuts.diff() + remainder.view(batch, cells, columns + 1)[..., :-1]

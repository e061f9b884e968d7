"""The normal form of a mask for one call: ranges of keys for every row, in O(S) memory.

For every query row the allowed keys are one range ``[start, stop)``, or two. What is not a range (dense
tensors, predicates, document ids in several runs, a second union) stays beside the ranges as an ``Extra``, a
further condition on a pair, and is evaluated for the block asked for, never as one S x S temporary. Nothing
here waits for a GPU, but ``NormalForm.hull``, which serves CPU kernels.

Axes: B batch, H heads, Sq query rows, Sk keys; r and k rows and keys of a block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from undivided.masks.normal_form.positions import Geometry

Index = slice | Tensor

# Pairs evaluated at a time: 4 MiB of bool, 16 MiB for the int32 temporaries beside it; small beside S x S,
# large enough that the Python around each block does not show.
BLOCK_PAIRS = 1 << 22
all_ = slice(None)


class Extra(Protocol):
    """What ranges cannot say, evaluated for one block of raw indices."""

    def pairs(self, batch: slice, heads: slice, rows: Index, keys: Index) -> Tensor:
        """Allowed pairs, bool ``[b|1, h|1, r|1, k|1]``."""
        ...


def _narrow(tensor: Tensor, dim: int, index: slice) -> Tensor:
    """``tensor`` at ``index`` along ``dim``, unless that dimension is broadcast."""
    if tensor.shape[dim] == 1:
        return tensor
    start, stop, _ = index.indices(tensor.shape[dim])
    return tensor.narrow(dim, start, max(stop - start, 0))


def _at(tensor: Tensor, dim: int, index: Index) -> Tensor:
    if isinstance(index, slice) or tensor.shape[dim] == 1:
        return _narrow(tensor, dim, index if isinstance(index, slice) else slice(None))
    return tensor.index_select(dim, index)


def index_tensor(index: Index, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    if isinstance(index, Tensor):
        return index.to(dtype)
    return torch.arange(index.start, index.stop, dtype=dtype, device=device)


@dataclass(frozen=True, eq=False)
class RangePairs:
    """Ranges as pairs: ``ranges`` int32 ``[B|1, Sq, 2|4]``."""

    ranges: Tensor

    def pairs(self, batch: slice, heads: slice, rows: Index, keys: Index) -> Tensor:
        ranges = _narrow(self.ranges, 0, batch)[:, None, rows, :, None]
        key = index_tensor(keys, ranges.device, ranges.dtype)
        allowed = (key >= ranges[..., 0, :]) & (key < ranges[..., 1, :])
        if ranges.shape[3] == 4:
            allowed |= (key >= ranges[..., 2, :]) & (key < ranges[..., 3, :])
        return allowed


@dataclass(frozen=True, eq=False)
class IdPairs:
    """Equal ids as pairs, int64 ``[B|1, S]``; rows of negative ids have no range, so nothing is said of them."""

    ids_q: Tensor
    ids_kv: Tensor

    def pairs(self, batch: slice, heads: slice, rows: Index, keys: Index) -> Tensor:
        ids_q = _narrow(self.ids_q, 0, batch)[:, None, rows, None]
        ids_kv = _narrow(self.ids_kv, 0, batch)[:, None, None, keys]
        return ids_q == ids_kv


@dataclass(frozen=True, eq=False)
class DensePairs:
    tensor: Tensor

    def pairs(self, batch: slice, heads: slice, rows: Index, keys: Index) -> Tensor:
        return _at(_at(_narrow(_narrow(self.tensor, 0, batch), 1, heads), 2, rows), 3, keys)


@dataclass(frozen=True, eq=False)
class SomePairs:
    """Another extra for some of its rows, keys and heads: int64 indices, None for all."""

    whole: Extra
    rows: Tensor | None = None
    keys: Tensor | None = None
    first_head: int = 0

    def pairs(self, batch: slice, heads: slice, rows: Index, keys: Index) -> Tensor:
        heads = slice(heads.start + self.first_head, heads.stop + self.first_head)
        rows = rows if self.rows is None else self.rows[rows]
        return self.whole.pairs(batch, heads, rows, keys if self.keys is None else self.keys[keys])


def _some(extra: Extra, rows: Tensor, keys: Tensor, heads: slice) -> Extra:
    """A dense tensor is cut out, since kernels read it in place; anything else is asked for these indices."""
    if isinstance(extra, DensePairs):
        return DensePairs(_at(_at(_narrow(extra.tensor, 1, heads), 2, rows), 3, keys))
    return SomePairs(extra, rows, keys, heads.start)


def all_pairs(extras: Sequence[Extra], batch: slice, heads: slice, rows: Index, keys: Index) -> Tensor:
    allowed = extras[0].pairs(batch, heads, rows, keys)
    for extra in extras[1:]:
        allowed = allowed & extra.pairs(batch, heads, rows, keys)
    return allowed


def row_blocks(rows: int, pairs_per_row: int) -> Iterator[slice]:
    """Slices of rows with at most ``BLOCK_PAIRS`` pairs each (at least one row)."""
    step = max(1, BLOCK_PAIRS // max(1, pairs_per_row))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


@dataclass(frozen=True, eq=False)
class NormalForm:
    """A mask for one call: ranges of keys for every row, and what they leave open.

    Args:
        ranges: int32 ``[B|1, Sq, 2|4]``, ``[start, stop)`` of raw key indices; with four columns the first
            range lies before the second; an unused or empty one is ``[0, 0)``.
        kv_len: number of keys.
        batch, heads: sizes that the ``1`` of a broadcast dimension stands for.
        extras: what the ranges do not say; each is a further condition on a pair.
        geometry: where the sequences lie; None: one that starts at 0.
        row_index, key_index: int64 raw indices of these rows and (sorted) keys, where they are some of a
            longer sequence's (see ``shard``); the geometry is that of the whole.
        first_head: which head these heads start at, where they are some of more.

    >>> form = NormalForm(torch.tensor([[[0, 1], [0, 2]]], dtype=torch.int32), kv_len=2)
    >>> form.allowed(slice(0, 1), slice(0, 2), slice(0, 2), slice(0, 1)).int().tolist()
    [[[[1, 0], [1, 1]]]]
    """

    ranges: Tensor
    kv_len: int
    batch: int = 1
    heads: int = 1
    extras: tuple[Extra, ...] = ()
    geometry: Geometry | None = None
    row_index: Tensor | None = None
    key_index: Tensor | None = None
    first_head: int = 0

    @property
    def exact(self) -> bool:
        """Whether the ranges alone say everything."""
        return not self.extras

    @cached_property
    def table(self) -> Tensor:
        """The ranges as a kernel may trust them: contiguous, its own memory, inside the keys."""
        return self.ranges.clamp(0, self.kv_len).contiguous()

    @property
    def q_len(self) -> int:
        return self.ranges.shape[1]

    def allowed(self, batch: slice, rows: slice, keys: slice, heads: slice) -> Tensor:
        """The exact pairs of a block, bool ``[b|1, h|1, r, k]``."""
        batch, rows = _bounded(batch, self.batch), _bounded(rows, self.q_len)
        keys, heads = _bounded(keys, self.kv_len), _bounded(heads, self.heads)
        pairs = RangePairs(self.ranges).pairs(batch, heads, rows, keys)
        if self.extras:
            pairs = pairs & all_pairs(self.extras, batch, heads, rows, keys)
        return pairs

    def hull(self, batch: slice, rows: slice) -> tuple[int, int]:
        """The smallest ``[start, stop)`` of keys over these rows; (0, 0) for none. For CPU kernels."""
        starts, stops = self._row_hulls
        starts, stops = _narrow(starts, 0, batch)[:, rows], _narrow(stops, 0, batch)[:, rows]
        if not starts.numel() or not range(self.batch)[batch]:
            return 0, 0
        start, stop = int(starts.amin()), int(stops.amax())
        return (start, stop) if start < stop else (0, 0)

    def covers(self, batch: slice, rows: slice, keys: slice) -> bool:
        """Whether every one of these rows may attend to every one of these keys. For CPU kernels."""
        ranges = _narrow(self.ranges, 0, batch)[:, rows]
        if self.extras or not ranges.numel() or ranges.shape[-1] == 4:
            return False
        starts_by, stops_from = int(ranges[..., 0].amax()), int(ranges[..., 1].amin())
        return starts_by <= int(keys.start) and stops_from >= int(keys.stop)

    @cached_property
    def _row_hulls(self) -> tuple[Tensor, Tensor]:
        """First and one-past-last key of each row ``[B|1, Sq]``; ``kv_len`` and 0 for rows without keys."""
        start, stop = self.ranges[..., 0], self.ranges[..., 1]
        if self.ranges.shape[-1] == 4:
            stop = torch.maximum(stop, self.ranges[..., 3])
        return torch.where(stop > start, start, self.kv_len), stop

    @cached_property
    def rows_allowed(self) -> Tensor:
        """Rows with any allowed key, bool ``[B|1, Sq]`` (with extras: ``[B|1, H|1, Sq]``)."""
        if self.exact:
            return self.ranges[..., 1] > self.ranges[..., 0]
        blocks = [self.allowed(all_, rows, all_, all_).any(-1) for rows in self._row_blocks()]
        return torch.cat(blocks, -1) if blocks else self.ranges.new_zeros(1, 1, 0, dtype=torch.bool)

    @cached_property
    def keys_allowed(self) -> Tensor:
        """Keys that any row of any batch element and head may attend to, bool ``[Sk]``."""
        if self.exact:
            edges = torch.zeros(self.kv_len + 1, dtype=torch.int64, device=self.ranges.device)
            for side in range(self.ranges.shape[-1]):
                ends = self.ranges[..., side].reshape(-1).to(torch.int64)
                edges.scatter_add_(0, ends, torch.full_like(ends, -1 if side % 2 else 1))
            return edges.cumsum(0)[:-1] > 0
        found = torch.zeros(self.kv_len, dtype=torch.bool, device=self.ranges.device)
        for rows in self._row_blocks():
            found |= self.allowed(all_, rows, all_, all_).any((0, 1, 2))
        return found

    def _row_blocks(self) -> Iterator[slice]:
        """Slices of rows whose exact pairs fit in a block, for all keys and all heads that differ."""
        one = slice(0, 1)
        if not self.q_len or not self.kv_len:
            return row_blocks(self.q_len, 1)
        probe = self.allowed(all_, one, one, all_)
        return row_blocks(self.q_len, probe.numel() * self.kv_len)

    def counts(self, row_edges: Sequence[int], key_edges: Sequence[int]) -> Tensor:
        """Allowed pairs in each cell of a grid, int64 ``[B|1, H|1, len(row_edges)-1, len(key_edges)-1]``.

        The edges ascend from 0 to the number of rows and of keys. From ranges alone this takes O(S + cells); whatever
        is not a range is evaluated a block at a time.
        """
        row_cuts = torch.tensor(row_edges, device=self.ranges.device)
        key_cuts = torch.tensor(key_edges, device=self.ranges.device)
        cell = torch.searchsorted(row_cuts, torch.arange(self.q_len, device=row_cuts.device), right=True) - 1
        if (single := self._single_ranges()) is not None:
            found = sum(_range_counts(one, cell, len(row_edges) - 1, key_cuts) for one in single)
            assert isinstance(found, Tensor)
            return found[:, None]
        total: Tensor | None = None
        for rows in self._row_blocks():
            running = torch.nn.functional.pad(self.allowed(all_, rows, all_, all_).cumsum(-1), (1, 0))
            in_cells = running.index_select(-1, key_cuts).diff(dim=-1)
            if total is None:
                total = in_cells.new_zeros(*in_cells.shape[:2], len(row_edges) - 1, in_cells.shape[-1])
            total.index_add_(2, cell[rows], in_cells)
        if total is None:
            return torch.zeros(1, 1, len(row_edges) - 1, len(key_edges) - 1, dtype=torch.int64, device=cell.device)
        return total

    def _single_ranges(self) -> list[Tensor] | None:
        """The pairs as disjoint ranges, int32 ``[B|1, Sq, 2]`` each; None if an extra is not made of ranges."""
        pieces = list(self.ranges.split(2, -1))
        for extra in self.extras:
            if not isinstance(extra, RangePairs):
                return None
            pieces = [_overlap(one, other) for one in pieces for other in extra.ranges.split(2, -1)]
        return pieces

    @cached_property
    def pairs(self) -> int:
        """Allowed pairs of all batch elements and heads.

        >>> NormalForm(torch.tensor([[[0, 1], [0, 2]]], dtype=torch.int32), kv_len=2, heads=4).pairs
        12
        """
        found = self.counts([0, self.q_len], [0, self.kv_len])
        broadcast = [
            size // have if have else 0 for size, have in zip((self.batch, self.heads), found.shape, strict=False)
        ]
        return int(found.sum()) * math.prod(broadcast)

    def tiles(self, block_q: int, block_k: int) -> Tensor:
        """Which tiles are empty (0), partial (1) or full (2): uint8 ``[B|1, H|1, nq, nk]``."""
        row_edges, key_edges = _edges(self.q_len, block_q), _edges(self.kv_len, block_k)
        rows = torch.tensor(row_edges, device=self.ranges.device).diff()
        keys = torch.tensor(key_edges, device=self.ranges.device).diff()
        blocks = []
        for some in row_blocks(len(rows), len(keys) * 8):
            part = self._rows(slice(row_edges[some.start], row_edges[some.stop]))
            edges = [edge - row_edges[some.start] for edge in row_edges[some.start : some.stop + 1]]
            counts = part.counts(edges, key_edges)
            full = counts == rows[some, None] * keys
            blocks.append((counts > 0).to(torch.uint8) + full.to(torch.uint8))
        if not blocks:
            return torch.zeros(1, 1, 0, len(keys), dtype=torch.uint8, device=self.ranges.device)
        return torch.cat(blocks, 2)

    def _rows(self, rows: slice) -> NormalForm:
        index = torch.arange(rows.start, rows.stop, device=self.ranges.device)
        extras = tuple(SomePairs(extra, index) for extra in self.extras)
        return NormalForm(self.ranges[:, rows], self.kv_len, self.batch, self.heads, extras)

    def shard(self, rows: Tensor, keys: Tensor, heads: slice | None = None) -> NormalForm:
        """The same mask for some rows, keys and heads: int64 indices, the keys ascending; all heads if None.

        A range of all keys holds a range of the sorted local ones, so the result has as many columns.

        >>> form = NormalForm(torch.tensor([[[0, 1], [0, 2], [0, 3], [0, 4]]], dtype=torch.int32), kv_len=4)
        >>> form.shard(torch.tensor([0, 3]), torch.tensor([1, 2])).ranges.tolist()
        [[[0, 0], [0, 2]]]
        """
        heads = slice(0, self.heads) if heads is None else heads
        local = torch.searchsorted(keys, self.ranges.index_select(1, rows).to(keys.dtype))
        return NormalForm(
            tidy(local),
            keys.numel(),
            self.batch,
            heads.stop - heads.start,
            tuple(_some(extra, rows, keys, heads) for extra in self.extras),
            self._geometry,
            rows if self.row_index is None else self.row_index[rows],
            keys if self.key_index is None else self.key_index[keys],
            self.first_head + heads.start,
        )

    @cached_property
    def q_position(self) -> Tensor:
        """i' of each row, int32 ``[B|1, Sq]``."""
        return self._picked(self._geometry.q_position, self.row_index)

    @cached_property
    def kv_position(self) -> Tensor:
        """j' of each key, int32 ``[B|1, Sk]``."""
        return self._picked(self._geometry.kv_position, self.key_index)

    @cached_property
    def shift(self) -> Tensor:
        """d of each row's sequence, int32 ``[B|1, Sq]``."""
        return self._picked(self._geometry.anchor - self._geometry.q_position, self.row_index)

    @cached_property
    def q_sequence(self) -> Tensor:
        """The batch element of each row, int32 ``[B, Sq]``; packed: its document, ``[1, Sq]``."""
        return self._picked(self._geometry.q_sequence, self.row_index)

    @staticmethod
    def _picked(values: Tensor, index: Tensor | None) -> Tensor:
        return (values if index is None else values.index_select(1, index)).to(torch.int32)

    @cached_property
    def _geometry(self) -> Geometry:
        if self.geometry is not None:
            return self.geometry
        rows, keys = self.q_len, self.kv_len
        return Geometry(self.batch, rows, keys, self.ranges.device, 0, rows, 0, keys)


def _bounded(index: slice, length: int) -> slice:
    start, stop, _ = index.indices(length)
    return slice(start, max(start, stop))


def _edges(length: int, step: int) -> list[int]:
    return [*range(0, length, step), length]


def _overlap(a: Tensor, b: Tensor) -> Tensor:
    """Keys in both of two ranges ``[B|1, Sq, 2]``."""
    start = torch.maximum(a[..., 0], b[..., 0])
    return torch.stack((start, torch.minimum(a[..., 1], b[..., 1]).clamp(min=start)), -1)


def _range_counts(ranges: Tensor, cell: Tensor, cells: int, cuts: Tensor) -> Tensor:
    """Pairs of ``[B|1, Sq, 2|4]`` ranges in each cell, int64 ``[B|1, cells, len(cuts)-1]``.

    A range [s, e) covers F(e) - F(s) of a column, F(x) = clamp(x - left, 0, width): all of every column left
    of x, and x - left of the one that x is in. So each end needs one histogram entry and one remainder.
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
        where = cell * (columns + 1) + column
        left_of.scatter_add_(1, where, torch.full_like(where, sign))
        remainder.scatter_add_(1, where, (end - cuts[column]) * sign)
    left_of = left_of.view(batch, cells, columns + 1)
    beyond = left_of.flip(-1).cumsum(-1).flip(-1)[..., 1:]
    return beyond * cuts.diff() + remainder.view(batch, cells, columns + 1)[..., :-1]


def tidy(bounds: Tensor) -> Tensor:
    """Bounds ``[B|1, Sq, 2|4]`` in order: touching ranges joined, empty ones ``[0, 0)`` and last."""
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

"""``NormalForm``: a mask for one call as ranges of keys per row, in O(S) memory.

The allowed keys of a query row are one range ``[start, stop)``, or two. A condition that is not a range (dense
tensors, predicates, document ids in several runs, a second union) is kept beside the ranges as an ``Extra`` and
evaluated per block, never as an S x S temporary. Only ``hull`` and ``covers``, for CPU kernels, wait for a GPU.

Axes: B batch, H heads, Sq query rows, Sk keys; r and k rows and keys of a block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from undivided.arguments.tensors import batch_stride
from undivided.masks.normal_form.bounds import count_in_cells, overlap, tidy
from undivided.masks.normal_form.pairs import Extra, RangePairs, SelectedPairs, all_pairs, narrow, row_blocks, select
from undivided.masks.normal_form.positions import Geometry
from undivided.masks.normal_form.tree_pairs import TreePairs

T = TypeVar("T")

ALL = slice(None)


class _first_value(cached_property[T]):
    """A cached property whose first value stays, because a kernel reads it at its address.

    If two threads compute the value at once, `cached_property` of Python 3.12 and later keeps the second one.
    """

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        first: T = instance.__dict__.setdefault(self.attrname, self.func(instance))
        return first


@dataclass(frozen=True, eq=False)
class NormalForm:
    """A mask for one call: ranges of keys per row, and further conditions on pairs.

    Args:
        ranges: ``[start, stop)`` of raw key indices, int32 ``[B|1, Sq, 2|4]``. With four columns the first range lies
            before the second. An empty range is ``[0, 0)``.
        kv_len: number of keys.
        batch, heads: sizes of the dimensions that are broadcast.
        extras: further conditions on a pair, which the ranges do not express.
        geometry: positions of the sequences. None: one sequence that starts at 0.
        row_index, key_index: raw indices of the rows and (ascending) keys, int64, if they are a selection from a
            longer sequence (see ``shard``); the geometry is that of the whole sequence.
        first_head, first_sequence: numbers of the first head and sequence in the whole, if the form is of a selection.

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
    first_sequence: int = 0

    @property
    def exact(self) -> bool:
        """Whether the ranges alone describe the mask."""
        return not self.extras

    @_first_value
    def table(self) -> Tensor:
        """The ranges for a kernel, int32 ``[B|1, Sq, 2|4]``: a contiguous copy, within the keys."""
        return self.ranges.clamp(0, self.kv_len).contiguous()

    @cached_property
    def table_place(self) -> tuple[int, int, int]:
        """Address of `table`, its batch stride (0 if it is broadcast), and its columns."""
        table = self.table
        return table.data_ptr(), batch_stride(table), table.shape[2]

    @property
    def tree(self) -> TreePairs | None:
        """The draft tree, for a kernel that reads it; None if ranges and a tree are not the whole mask."""
        if len(self.extras) != 1 or self.row_index is not None or self.key_index is not None:
            return None
        tree = self.extras[0]
        return tree if isinstance(tree, TreePairs) else None

    @_first_value
    def first_key(self) -> Tensor | None:
        """Raw index of the first key of each row's sequence, contiguous int32 ``[B|1, Sq]``; None if all are 0."""
        geometry = self.geometry
        if geometry is None or not isinstance(geometry.kv_start, Tensor):
            return None
        first = geometry.per_row(geometry.kv_start)
        if not isinstance(first, Tensor):
            return None
        rows = first.shape[0], geometry.q_len
        return first.expand(rows).clamp(0, self.kv_len).to(torch.int32).contiguous()

    @property
    def q_len(self) -> int:
        """Number of query rows."""
        return self.ranges.shape[1]

    def allowed(self, batch: slice, rows: slice, keys: slice, heads: slice) -> Tensor:
        """The exact pairs of a block.

        Args:
            batch, rows, keys, heads: slices of raw indices.

        Returns:
            Bool ``[b|1, h|1, r, k]``.
        """
        batch, rows = _bounded(batch, self.batch), _bounded(rows, self.q_len)
        keys, heads = _bounded(keys, self.kv_len), _bounded(heads, self.heads)
        pairs = RangePairs(self.ranges).pairs(batch, heads, rows, keys)
        if self.extras:
            pairs = pairs & all_pairs(self.extras, batch, heads, rows, keys)
        return pairs

    def hull(self, batch: slice, rows: slice) -> tuple[int, int]:
        """The smallest range of keys that contains all ranges of some rows. For CPU kernels.

        Args:
            batch, rows: slices of raw indices.

        Returns:
            ``(start, stop)``; (0, 0) if no key is allowed.
        """
        starts, stops = self._row_hulls
        starts, stops = narrow(starts, 0, batch)[:, rows], narrow(stops, 0, batch)[:, rows]
        if not starts.numel() or not range(self.batch)[batch]:
            return 0, 0
        start, stop = int(starts.amin()), int(stops.amax())
        return (start, stop) if start < stop else (0, 0)

    def covers(self, batch: slice, rows: slice, keys: slice) -> bool:
        """Whether every one of some rows may attend to every one of some keys. For CPU kernels.

        Args:
            batch, rows, keys: slices of raw indices.

        Returns:
            True if all pairs are known to be allowed; False also for a form with extras or two ranges per row.
        """
        ranges = narrow(self.ranges, 0, batch)[:, rows]
        if self.extras or not ranges.numel() or ranges.shape[-1] == 4:
            return False
        starts_by, stops_from = int(ranges[..., 0].amax()), int(ranges[..., 1].amin())
        return starts_by <= int(keys.start) and stops_from >= int(keys.stop)

    @cached_property
    def _row_hulls(self) -> tuple[Tensor, Tensor]:
        """First and one-past-last key of each row, ``[B|1, Sq]``; ``kv_len`` and 0 for rows without keys."""
        start, stop = self.ranges[..., 0], self.ranges[..., 1]
        if self.ranges.shape[-1] == 4:
            stop = torch.maximum(stop, self.ranges[..., 3])
        return torch.where(stop > start, start, self.kv_len), stop

    @cached_property
    def rows_allowed(self) -> Tensor:
        """Whether each row has an allowed key, bool ``[B|1, Sq]`` (with extras: ``[B|1, H|1, Sq]``)."""
        if self.exact:
            return self.ranges[..., 1] > self.ranges[..., 0]
        blocks = [self.allowed(ALL, rows, ALL, ALL).any(-1) for rows in self._row_blocks()]
        return torch.cat(blocks, -1) if blocks else self.ranges.new_zeros(1, 1, 0, dtype=torch.bool)

    @cached_property
    def keys_allowed(self) -> Tensor:
        """Whether any row of any batch element and head may attend to each key, bool ``[Sk]``."""
        if self.exact:
            edges = torch.zeros(self.kv_len + 1, dtype=torch.int64, device=self.ranges.device)
            for side in range(self.ranges.shape[-1]):
                ends = self.ranges[..., side].reshape(-1).to(torch.int64)
                edges.scatter_add_(0, ends, torch.full_like(ends, -1 if side % 2 else 1))
            return edges.cumsum(0)[:-1] > 0
        return self.keys_by_head.any(1).any(0)

    @cached_property
    def keys_by_head(self) -> Tensor:
        """Whether any row may attend to each key, by the exact pairs, bool ``[B|1, H|1, Sk]``."""
        seen = torch.zeros(1, 1, self.kv_len, dtype=torch.bool, device=self.ranges.device)
        for rows in self._row_blocks():
            seen = seen | self.allowed(ALL, rows, ALL, ALL).any(2)
        return seen

    def _row_blocks(self) -> Iterator[slice]:
        """Slices of rows whose exact pairs, for all keys and all distinct heads, fit in a block."""
        one = slice(0, 1)
        if not self.q_len or not self.kv_len:
            return row_blocks(self.q_len, 1)
        probe = self.allowed(ALL, one, one, ALL)
        return row_blocks(self.q_len, probe.numel() * self.kv_len)

    def counts(self, row_edges: Sequence[int], key_edges: Sequence[int]) -> Tensor:
        """Number of allowed pairs in each cell of a grid.

        This takes O(S + cells) time for ranges; extras that are not ranges are evaluated block by block.

        Args:
            row_edges, key_edges: ascending edges of the cells, from 0 to the number of rows and of keys.

        Returns:
            int64 ``[B|1, H|1, len(row_edges) - 1, len(key_edges) - 1]``.
        """
        row_cuts = torch.tensor(row_edges, device=self.ranges.device)
        key_cuts = torch.tensor(key_edges, device=self.ranges.device)
        cell = torch.searchsorted(row_cuts, torch.arange(self.q_len, device=row_cuts.device), right=True) - 1
        if (single := self._single_ranges()) is not None:
            counts = sum(count_in_cells(one, cell, len(row_edges) - 1, key_cuts) for one in single)
            assert isinstance(counts, Tensor)
            return counts[:, None]
        total: Tensor | None = None
        for rows in self._row_blocks():
            running = torch.nn.functional.pad(self.allowed(ALL, rows, ALL, ALL).cumsum(-1), (1, 0))
            in_cells = running.index_select(-1, key_cuts).diff(dim=-1)
            if total is None:
                total = in_cells.new_zeros(*in_cells.shape[:2], len(row_edges) - 1, in_cells.shape[-1])
            total.index_add_(2, cell[rows], in_cells)
        if total is None:
            return torch.zeros(1, 1, len(row_edges) - 1, len(key_edges) - 1, dtype=torch.int64, device=cell.device)
        return total

    def _single_ranges(self) -> list[Tensor] | None:
        """The pairs as disjoint ranges, int32 ``[B|1, Sq, 2]`` each; None if an extra is not a range."""
        pieces = list(self.ranges.split(2, -1))
        for extra in self.extras:
            if not isinstance(extra, RangePairs):
                return None
            pieces = [overlap(one, other) for one in pieces for other in extra.ranges.split(2, -1)]
        return pieces

    @cached_property
    def pairs(self) -> int:
        """Number of allowed pairs of all batch elements and heads.

        >>> NormalForm(torch.tensor([[[0, 1], [0, 2]]], dtype=torch.int32), kv_len=2, heads=4).pairs
        12
        """
        counts = self.counts([0, self.q_len], [0, self.kv_len])
        broadcast = [
            size // have if have else 0 for size, have in zip((self.batch, self.heads), counts.shape, strict=False)
        ]
        return int(counts.sum()) * math.prod(broadcast)

    def tiles(self, block_q: int, block_k: int) -> Tensor:
        """The kind of each tile: empty (0), partial (1) or full (2).

        Args:
            block_q, block_k: rows and keys of a tile.

        Returns:
            uint8 ``[B|1, H|1, ceil(Sq / block_q), ceil(Sk / block_k)]``.
        """
        row_edges, key_edges = _edges(self.q_len, block_q), _edges(self.kv_len, block_k)
        rows = torch.tensor(row_edges, device=self.ranges.device).diff()
        keys = torch.tensor(key_edges, device=self.ranges.device).diff()
        blocks = []
        for tiles in row_blocks(len(rows), len(keys) * 8):
            form = self._rows(slice(row_edges[tiles.start], row_edges[tiles.stop]))
            edges = [edge - row_edges[tiles.start] for edge in row_edges[tiles.start : tiles.stop + 1]]
            counts = form.counts(edges, key_edges)
            full = counts == rows[tiles, None] * keys
            blocks.append((counts > 0).to(torch.uint8) + full.to(torch.uint8))
        if not blocks:
            return torch.zeros(1, 1, 0, len(keys), dtype=torch.uint8, device=self.ranges.device)
        return torch.cat(blocks, 2)

    def _rows(self, rows: slice) -> NormalForm:
        index = torch.arange(rows.start, rows.stop, device=self.ranges.device)
        extras = tuple(SelectedPairs(extra, index) for extra in self.extras)
        return NormalForm(self.ranges[:, rows], self.kv_len, self.batch, self.heads, extras)

    def shard(self, rows: Tensor, keys: Tensor, heads: slice | None = None) -> NormalForm:
        """The same mask for a selection of rows, keys and heads.

        A range of all keys contains a range of the selected ascending keys, so the result has as many columns.

        Args:
            rows: indices of the rows, int64.
            keys: indices of the keys, int64, ascending.
            heads: slice of the heads. None: all.

        Returns:
            The form of the selection.

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
            tuple(select(extra, rows, keys, heads) for extra in self.extras),
            self._geometry,
            rows if self.row_index is None else self.row_index[rows],
            keys if self.key_index is None else self.key_index[keys],
            self.first_head + heads.start,
            self.first_sequence,
        )

    @cached_property
    def q_position(self) -> Tensor:
        """i' of each row, int32 ``[B|1, Sq]``."""
        return self._select_at(self._geometry.q_position, self.row_index)

    @cached_property
    def kv_position(self) -> Tensor:
        """j' of each key, int32 ``[B|1, Sk]``."""
        return self._select_at(self._geometry.kv_position, self.key_index)

    @cached_property
    def shift(self) -> Tensor:
        """d of each row's sequence, int32 ``[B|1, Sq]``."""
        return self._select_at(self._geometry.anchor - self._geometry.q_position, self.row_index)

    @cached_property
    def q_sequence(self) -> Tensor:
        """The batch element of each row, int32 ``[B, Sq]``; packed: the document, ``[1, Sq]``."""
        return self._select_at(self._geometry.q_sequence, self.row_index)

    @cached_property
    def sequence_number(self) -> Tensor:
        """`q_sequence`, counted from the first sequence of the whole: the number by which dropout draws."""
        return self.q_sequence + self.first_sequence if self.first_sequence else self.q_sequence

    @staticmethod
    def _select_at(values: Tensor, index: Tensor | None) -> Tensor:
        return (values if index is None else values.index_select(1, index)).to(torch.int32)

    @cached_property
    def _geometry(self) -> Geometry:
        if self.geometry is not None:
            return self.geometry
        rows, keys = self.q_len, self.kv_len
        return Geometry(self.batch, rows, keys, self.ranges.device, 0, rows, 0, keys)


def _bounded(index: slice, length: int) -> slice:
    """The slice with both ends within the length."""
    start, stop, _ = index.indices(length)
    return slice(start, max(start, stop))


def _edges(length: int, step: int) -> list[int]:
    return [*range(0, length, step), length]

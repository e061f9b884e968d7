"""Conditions on pairs that are evaluated block by block: ranges, equal ids, dense tensors, and selections of these.

Axes: B batch, H heads, Sq query rows, Sk keys; r and k rows and keys of a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Index = slice | Tensor

# Pairs evaluated at a time: 4 MiB of bool and 16 MiB of int32 temporaries. Small compared with S x S, and large
# enough to hide the Python overhead per block.
BLOCK_PAIRS = 1 << 22


class Extra(Protocol):
    """A condition that ranges cannot express, evaluated for one block of raw indices."""

    def pairs(self, batch: slice, heads: slice, rows: Index, keys: Index) -> Tensor:
        """Allowed pairs, bool ``[b|1, h|1, r|1, k|1]``."""
        ...


@dataclass(frozen=True, eq=False)
class RangePairs:
    """The pairs inside ranges, int32 ``[B|1, Sq, 2|4]``."""

    ranges: Tensor

    def pairs(self, batch: slice, heads: slice, rows: Index, keys: Index) -> Tensor:
        """Allowed pairs, bool ``[b|1, 1, r, k]``."""
        ranges = narrow(self.ranges, 0, batch)[:, None, rows, :, None]
        key = index_tensor(keys, ranges.device, ranges.dtype)
        allowed = (key >= ranges[..., 0, :]) & (key < ranges[..., 1, :])
        if ranges.shape[3] == 4:
            allowed |= (key >= ranges[..., 2, :]) & (key < ranges[..., 3, :])
        return allowed


@dataclass(frozen=True, eq=False)
class IdPairs:
    """The pairs with equal ids, int64 ``[B|1, S]``. Rows with a negative id have empty ranges, which exclude them."""

    ids_q: Tensor
    ids_kv: Tensor

    def pairs(self, batch: slice, heads: slice, rows: Index, keys: Index) -> Tensor:
        """Allowed pairs, bool ``[b|1, 1, r, k]``."""
        ids_q = narrow(self.ids_q, 0, batch)[:, None, rows, None]
        ids_kv = narrow(self.ids_kv, 0, batch)[:, None, None, keys]
        return ids_q == ids_kv


@dataclass(frozen=True, eq=False)
class DensePairs:
    """The True entries of a tensor, bool ``[B|1, H|1, Sq|1, Sk|1]``."""

    tensor: Tensor

    def pairs(self, batch: slice, heads: slice, rows: Index, keys: Index) -> Tensor:
        """Allowed pairs, bool ``[b|1, h|1, r|1, k|1]``."""
        return _take(_take(narrow(narrow(self.tensor, 0, batch), 1, heads), 2, rows), 3, keys)


@dataclass(frozen=True, eq=False)
class SelectedPairs:
    """Another extra for some of its rows and keys (int64 indices, None: all) and heads."""

    whole: Extra
    rows: Tensor | None = None
    keys: Tensor | None = None
    first_head: int = 0

    def pairs(self, batch: slice, heads: slice, rows: Index, keys: Index) -> Tensor:
        """Allowed pairs, bool ``[b|1, h|1, r|1, k|1]``."""
        heads = slice(heads.start + self.first_head, heads.stop + self.first_head)
        rows = rows if self.rows is None else self.rows[rows]
        return self.whole.pairs(batch, heads, rows, keys if self.keys is None else self.keys[keys])


def select(extra: Extra, rows: Tensor, keys: Tensor, heads: slice) -> Extra:
    """An extra for some rows, keys and heads. A dense tensor is cut, because kernels read it in place."""
    if isinstance(extra, DensePairs):
        return DensePairs(_take(_take(narrow(extra.tensor, 1, heads), 2, rows), 3, keys))
    return SelectedPairs(extra, rows, keys, heads.start)


def all_pairs(extras: Sequence[Extra], batch: slice, heads: slice, rows: Index, keys: Index) -> Tensor:
    """The pairs that every extra allows, bool ``[b|1, h|1, r|1, k|1]``."""
    allowed = extras[0].pairs(batch, heads, rows, keys)
    for extra in extras[1:]:
        allowed = allowed & extra.pairs(batch, heads, rows, keys)
    return allowed


def row_blocks(rows: int, pairs_per_row: int) -> Iterator[slice]:
    """Slices of rows with at most ``BLOCK_PAIRS`` pairs each (at least one row)."""
    step = max(1, BLOCK_PAIRS // max(1, pairs_per_row))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def narrow(tensor: Tensor, dim: int, index: slice) -> Tensor:
    """``tensor`` at ``index`` along ``dim``, or unchanged if that dimension is broadcast."""
    if tensor.shape[dim] == 1:
        return tensor
    start, stop, _ = index.indices(tensor.shape[dim])
    return tensor.narrow(dim, start, max(stop - start, 0))


def index_tensor(index: Index, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """The index as a tensor, ``[n]``."""
    if isinstance(index, Tensor):
        return index.to(dtype)
    return torch.arange(index.start, index.stop, dtype=dtype, device=device)


def _take(tensor: Tensor, dim: int, index: Index) -> Tensor:
    """``tensor`` at ``index`` along ``dim``; all of it if that dimension is broadcast."""
    if isinstance(index, slice) or tensor.shape[dim] == 1:
        return narrow(tensor, dim, index if isinstance(index, slice) else slice(None))
    return tensor.index_select(dim, index)

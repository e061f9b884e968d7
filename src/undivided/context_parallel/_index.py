"""Indices along an axis, as slices where they are runs, so that what need not be copied is a view."""

from __future__ import annotations

from torch import Tensor

Index = slice | Tensor


def as_index(index: Tensor) -> Index:
    """Ascending int64 indices as a slice where they follow one another."""
    count = index.numel()
    if count == 0:
        return slice(0, 0)
    first, last = int(index[0]), int(index[-1])
    return slice(first, last + 1) if last - first + 1 == count else index


def take(tensor: Tensor, dim: int, index: Index) -> Tensor:
    """The tensor at these indices along a dimension: a view for a slice."""
    if isinstance(index, slice):
        return tensor.narrow(dim, index.start, index.stop - index.start)
    return tensor.index_select(dim, index)


def add(total: Tensor, dim: int, index: Index, values: Tensor) -> None:
    """Add values to the tensor at these indices along a dimension, in place."""
    if isinstance(index, slice):
        take(total, dim, index).add_(values)
    else:
        total.index_add_(dim, index, values.to(total.dtype))


def count(index: Index) -> int:
    """How many indices."""
    return index.stop - index.start if isinstance(index, slice) else index.numel()


def unless_broadcast(tensor: Tensor, dim: int, index: Index) -> Tensor:
    """`take`, or the tensor itself where that dimension is broadcast."""
    return tensor if tensor.shape[dim] == 1 else take(tensor, dim, index)

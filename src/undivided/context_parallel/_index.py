"""Indices along an axis, as slices where they are runs, so that what need not be copied is a view."""

from __future__ import annotations

from collections.abc import Sequence

import torch
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


def places(parts: Sequence[Tensor]) -> tuple[Index, ...]:
    """Where the ascending positions of each part lie among those of all parts, ascending.

    >>> places([torch.tensor([1, 4]), torch.tensor([6, 7]), torch.tensor([2, 3])])
    (tensor([0, 3]), slice(4, 6, None), slice(1, 3, None))
    """
    rank = torch.cat(list(parts)).argsort().argsort()
    return tuple(as_index(index) for index in rank.split([part.numel() for part in parts]))


def joined(parts: list[Tensor], where: Sequence[Index]) -> Tensor:
    """One tensor [B, S, H, X] of parts that lie at `places` of S. The list is emptied, so that each goes once it is
    copied."""
    if len(parts) == 1:
        return parts.pop()
    batch, _, heads, size = parts[0].shape
    whole = parts[0].new_empty((batch, sum(part.shape[1] for part in parts), heads, size))
    for index in where:
        put(whole, 1, index, parts.pop(0))
    return whole


def put(total: Tensor, dim: int, index: Index, values: Tensor) -> None:
    """Write values into the tensor at these indices along a dimension."""
    if isinstance(index, slice):
        take(total, dim, index).copy_(values)
    else:
        total.index_copy_(dim, index, values)


def is_on_its_own(tensor: Tensor) -> bool:
    """Whether it is not a part of something larger, which it would keep alive."""
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def on_its_own(tensor: Tensor) -> Tensor:
    """Contiguous, and not a part of something larger."""
    tensor = tensor.contiguous()
    return tensor if is_on_its_own(tensor) else tensor.clone()

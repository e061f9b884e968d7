"""Indices along an axis: slices if the indices are consecutive, so that reading them is a view and not a copy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Index = slice | Tensor

HASH_FACTOR, _HASH_INCREMENT = 6364136223846793005, 1442695040888963407
"""Of Knuth's linear congruential generator: they spread the bits of an index."""


def as_index(index: Tensor) -> Index:
    """Ascending int64 indices, as a slice if they are consecutive.

    >>> as_index(torch.tensor([3, 4, 5])), as_index(torch.tensor([3, 5]))
    (slice(3, 6, None), tensor([3, 5]))
    """
    count = index.numel()
    if count == 0:
        return slice(0, 0)
    first, last = int(index[0]), int(index[-1])
    return slice(first, last + 1) if last - first + 1 == count else index


def take(tensor: Tensor, dim: int, index: Index) -> Tensor:
    """The tensor at these indices of one dimension: a view for a slice, a copy otherwise."""
    if isinstance(index, slice):
        return tensor.narrow(dim, index.start, index.stop - index.start)
    return tensor.index_select(dim, index)


def take_unless_broadcast(tensor: Tensor, dim: int, index: Index) -> Tensor:
    """`take`, or the tensor itself if that dimension has size 1."""
    return tensor if tensor.shape[dim] == 1 else take(tensor, dim, index)


def add(total: Tensor, dim: int, index: Index, values: Tensor) -> None:
    """Add values to `total` at these indices of one dimension, in place."""
    if isinstance(index, slice):
        take(total, dim, index).add_(values)
    else:
        total.index_add_(dim, index, values.to(total.dtype))


def put(total: Tensor, dim: int, index: Index, values: Tensor) -> None:
    """Write values into `total` at these indices of one dimension."""
    if isinstance(index, slice):
        take(total, dim, index).copy_(values)
    else:
        total.index_copy_(dim, index, values)


def count(index: Index) -> int:
    """The number of indices."""
    return index.stop - index.start if isinstance(index, slice) else index.numel()


def within(part: slice, whole: slice) -> slice:
    """A range in a larger one, numbered from the start of that one.

    >>> within(slice(6, 8), slice(4, 8))
    slice(2, 4, None)
    """
    return slice(part.start - whole.start, part.stop - whole.start)


def merged_slots(chunks: Sequence[Tensor]) -> tuple[Index, ...]:
    """For each chunk, where its ascending positions land in the sorted union of all chunks.

    >>> merged_slots([torch.tensor([1, 4]), torch.tensor([6, 7]), torch.tensor([2, 3])])
    (tensor([0, 3]), slice(4, 6, None), slice(1, 3, None))
    """
    rank = torch.cat(list(chunks)).argsort().argsort()
    return tuple(as_index(index) for index in rank.split([chunk.numel() for chunk in chunks]))


def join(chunks: list[Tensor], slots: Sequence[Index]) -> Tensor:
    """One tensor [B, S, H, X] with each chunk at its `merged_slots` of S.

    The list is emptied on the way, so that the memory of each chunk is free as soon as it has been copied.
    """
    if len(chunks) == 1:
        return chunks.pop()
    batch, _, heads, size = chunks[0].shape
    whole = chunks[0].new_empty((batch, sum(chunk.shape[1] for chunk in chunks), heads, size))
    for index in slots:
        put(whole, 1, index, chunks.pop(0))
    return whole


def owns_storage(tensor: Tensor) -> bool:
    """Whether the tensor is all of its storage; a view of a larger one would keep that one alive."""
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def with_own_storage(tensor: Tensor) -> Tensor:
    """The tensor, contiguous and not a view of a larger one."""
    tensor = tensor.contiguous()
    return tensor if owns_storage(tensor) else tensor.clone()


def hash_entries(values: Tensor) -> Tensor:
    """A hash of int64 [n] that depends on their order, as a 0-d int64 tensor."""
    factors = torch.arange(values.numel(), device=values.device) * HASH_FACTOR + _HASH_INCREMENT
    return ((values + 1) * (factors ^ (factors >> 29))).sum()

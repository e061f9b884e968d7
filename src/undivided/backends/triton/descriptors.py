"""Tensor descriptors, by which TMA loads blocks of rows."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def row_descriptor(tensor: Tensor, rows: int) -> Any:
    """A tensor descriptor of [1, 1, rows, D] blocks of a [B, H, S, D] tensor; None if its address or strides are not
    multiples of 16 bytes."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    sizes, size = list(tensor.shape), tensor.element_size()
    # the stride of an axis of length 1 is never used, but must be valid
    steps = [sizes[-1] if n == 1 else step for n, step in zip(sizes, tensor.stride(), strict=True)][:-1]
    odd = any(step <= 0 or step * size % 16 for step in steps)
    if odd or tensor.stride(-1) != 1 or tensor.data_ptr() % 16:
        return None
    return TensorDescriptor(tensor, sizes, [*steps, 1], [1, 1, rows, sizes[-1]])


def with_tensor(descriptor: Any, tensor: Tensor | None) -> Any:
    """The descriptor with another tensor of the same kind, or without one, so that it keeps no memory of a call. Its
    class would check all fields again."""
    other = object.__new__(type(descriptor))
    other.__dict__.update(descriptor.__dict__)
    other.base = tensor
    return other

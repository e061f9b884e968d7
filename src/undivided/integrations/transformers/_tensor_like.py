"""Objects that a model passes to its layers in place of tensors; they become dense if the model computes with them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


class TensorLike(ABC):
    """An object with the shape, dtype and device of a tensor of 4 axes, and all operations of its dense tensor."""

    ndim = 4
    requires_grad = False
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @property
    @abstractmethod
    def dense(self) -> Tensor:
        """The tensor that a model computes with."""

    def contiguous(self) -> Self:
        """This object, because it has no memory layout.

        Returns:
            This object.
        """
        return self

    detach = contiguous

    def to(self, *args: Any, **options: Any) -> Any:
        """This object on another device or in another dtype.

        Args:
            args, options: as for ``Tensor.to``.

        Returns:
            This object if device and dtype are its own, its structure on another device if it has one there; otherwise
            the dense tensor, converted.
        """
        device, dtype = _target(args, options)
        if dtype is not None and dtype != self.dtype:
            return self.dense.to(*args, **options)
        if device is None or device == self.device or torch.empty(0, device=device).device == self.device:
            return self
        return self._moved(device)

    def _moved(self, device: torch.device) -> Any:
        """This object on another device; the dense tensor if it cannot be moved."""
        return self.dense.to(device)

    def dim(self) -> int:
        """The number of axes.

        Returns:
            4.
        """
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        """The shape, or one entry of it.

        Args:
            dim: the axis, int; None for all.

        Returns:
            A ``torch.Size``, or an int.
        """
        return self.shape if dim is None else self.shape[dim]

    def __getitem__(self, index: Any) -> Any:
        """This object for a slice of everything, else a part of the dense tensor."""
        parts = index if isinstance(index, tuple) else (index,)
        if len(parts) <= 4 and all(
            isinstance(part, slice) and part.indices(size) == (0, size, 1)
            for part, size in zip(parts, self.shape, strict=False)
        ):
            return self
        return self.dense[index]

    def __getattr__(self, name: str) -> Any:
        """Any other attribute or method of tensors, from the dense tensor."""
        if name.startswith("_"):  # copying and pickling look for such names
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.dense, name)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """The result of a PyTorch function for the dense tensors."""
        args, kwargs = tree_map(_dense, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __hash__(self) -> int:
        return id(self)


def _target(args: tuple[Any, ...], options: dict[str, Any]) -> tuple[torch.device | None, torch.dtype | None]:
    """The device and dtype of the arguments of ``Tensor.to``, None for those that stay."""
    device = dtype = None
    for value in (*args, *options.values()):
        if isinstance(value, Tensor | TensorLike):
            device, dtype = value.device, value.dtype
        elif isinstance(value, torch.dtype):
            dtype = value
        elif isinstance(value, torch.device | str | int) and not isinstance(value, bool):
            device = torch.device(value)
    return device, dtype


def _dense(value: object) -> object:
    return value.dense if isinstance(value, TensorLike) else value


def _operator(name: str) -> Callable[..., Any]:
    def apply(self: TensorLike, *others: Any) -> Any:
        return getattr(self.dense, name)(*map(_dense, others))

    return apply


for _name in (
    "add radd sub rsub mul rmul truediv rtruediv and rand or ror xor rxor eq ne lt le gt ge invert neg len iter bool"
).split():
    setattr(TensorLike, f"__{_name}__", _operator(f"__{_name}__"))

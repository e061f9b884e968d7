"""A `Mask` that a model passes to its layers; it becomes a dense tensor if the model computes with it."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from undivided.integrations.transformers._patterns import Pattern
from undivided.masks import Mask


class Sizes(NamedTuple):
    """The sizes of a call, and the absolute positions of its first query and of its first key."""

    batch: int
    q_len: int
    kv_len: int
    q_offset: int = 0
    kv_offset: int = 0

    @property
    def diagonal(self) -> int:
        """d: the key at the position of the first query."""
        return self.q_offset - self.kv_offset

    @property
    def end(self) -> int:
        """One past the key at the position of the last query."""
        return self.diagonal + self.q_len


class ModelMask:
    """An undivided `Mask` in place of the 4-D mask tensor of other attention implementations.

    A model that only passes it to its layers keeps the mask's structure. If the model computes with it (a slice, a
    reshape, an operator or function of PyTorch, a tensor method), the result is that of the dense mask, which is
    created then and cached.

    Args:
        mask: which pairs may attend.
        pattern: the pattern that the mask is from, for documents that only the attention gets.
        sizes: the sizes of the call.
        device, dtype: of the dense mask. ``torch.bool`` gives the mask of "sdpa", True = attend. A floating-point dtype
            gives that of "eager": 0 and the lowest number.

    >>> from undivided import masks
    >>> mask = ModelMask(masks.causal(), Pattern(right=0), Sizes(1, 2, 2), torch.device("cpu"))
    >>> mask.shape, torch.where(mask, 0, -1).tolist()
    (torch.Size([1, 1, 2, 2]), [[[[0, -1], [0, 0]]]])
    """

    ndim = 4
    requires_grad = False

    def __init__(
        self, mask: Mask, pattern: Pattern, sizes: Sizes, device: torch.device, dtype: torch.dtype = torch.bool
    ) -> None:
        self.mask, self.pattern, self.sizes, self.device, self.dtype = mask, pattern, sizes, device, dtype
        self.shape = torch.Size((sizes.batch, 1, sizes.q_len, sizes.kv_len))
        self.documents: tuple[Tensor, Tensor, Mask] | None = None

    @functools.cached_property
    def dense(self) -> Tensor:
        """The mask that a model computes with, ``[B, 1, Sq, Sk]``."""
        pairs = self.to_dense()
        if self.dtype == torch.bool:
            return pairs
        warnings.warn(
            "a model that supports neither 'sdpa' nor 'flex_attention' computes with its attention mask: this part of "
            "the model runs as with attn_implementation='eager', not on undivided",
            stacklevel=3,
        )
        lowest = torch.finfo(self.dtype).min
        return torch.where(pairs, torch.zeros((), dtype=self.dtype, device=self.device), lowest)

    def to_dense(self) -> Tensor:
        """Every pair as a boolean tensor.

        Returns:
            bool ``[B, 1, Sq, Sk]``, True = attend.
        """
        sizes = self.sizes
        return self.mask.to_dense(sizes.batch, 1, sizes.q_len, sizes.kv_len, self.device)

    def contiguous(self) -> ModelMask:
        """This object, because it has no memory layout.

        Returns:
            This object.
        """
        return self

    detach = contiguous

    def to(self, *args: Any, **options: Any) -> Any:
        """The mask on another device or in another dtype.

        Args:
            args, options: as for ``Tensor.to``.

        Returns:
            This object if device and dtype are its own; otherwise the dense mask, converted.
        """
        here = (self.dtype, self.device, str(self.device), None)
        stays = all(one in here for one in (*args, *options.values()) if not isinstance(one, bool))
        return self if stays else self.dense.to(*args, **options)

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
        """This object for a slice of everything, else a part of the dense mask."""
        each = index if isinstance(index, tuple) else (index,)
        if len(each) <= 4 and all(
            isinstance(one, slice) and one.indices(size) == (0, size, 1)
            for one, size in zip(each, self.shape, strict=False)
        ):
            return self
        return self.dense[index]

    def __getattr__(self, name: str) -> Any:
        """Any other attribute or method of tensors, from the dense mask."""
        if name.startswith("_"):  # copying and pickling look for such names
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.dense, name)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """The result of a PyTorch function for the dense mask."""
        args, kwargs = tree_map(_dense, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return f"<ModelMask {list(self.shape)}: {self.mask!r}>"


def _dense(value: object) -> object:
    return value.dense if isinstance(value, ModelMask) else value


def _operator(name: str) -> Callable[..., Any]:
    def apply(self: ModelMask, *others: Any) -> Any:
        return getattr(self.dense, name)(*map(_dense, others))

    return apply


for _name in (
    "add radd sub rsub mul rmul truediv rtruediv and rand or ror xor rxor eq ne lt le gt ge invert neg len iter bool"
).split():
    setattr(ModelMask, f"__{_name}__", _operator(f"__{_name}__"))

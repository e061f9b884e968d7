"""A `Mask` on its way through a model, which becomes a tensor as soon as the model computes with it."""

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
        """d: the key that the first query stands on."""
        return self.q_offset - self.kv_offset

    @property
    def end(self) -> int:
        """One past the key that the last query stands on."""
        return self.diagonal + self.q_len


class ModelMask:
    """An undivided `Mask` in the place of the 4-D mask that a model has with another attention implementation.

    A model that only passes it on keeps its structure. One that computes with it (a slice, a reshape, an operator or
    function of PyTorch, a method of tensors) gets that result for the dense mask, which is made then and kept.

    Args:
        mask: which pairs may attend.
        pattern: what the mask says apart from padding, for documents that only the attention is told of.
        sizes: those of the call.
        device, dtype: of the dense mask. ``torch.bool``: the mask of "sdpa", True = attend. A floating-point dtype:
            that of "eager", 0 and the lowest number.

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
            "a model that supports neither 'sdpa' nor 'flex_attention' computes with its attention "
            "mask itself: what it "
            "computes so runs as with attn_implementation='eager', not on undivided",
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
        """Itself: it has no memory to put in order.

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
            Itself for its own device and dtype; otherwise the dense mask, converted.
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
        """Itself for a slice that leaves nothing out, else a part of the dense mask."""
        each = index if isinstance(index, tuple) else (index,)
        if len(each) <= 4 and all(
            isinstance(one, slice) and one.indices(size) == (0, size, 1)
            for one, size in zip(each, self.shape, strict=False)
        ):
            return self
        return self.dense[index]

    def __getattr__(self, name: str) -> Any:
        """Whatever else tensors have, of the dense mask."""
        if name.startswith("_"):  # what copying and pickling look for
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.dense, name)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """A function of PyTorch, of the dense mask."""
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

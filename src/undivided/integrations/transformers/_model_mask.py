"""A `Mask` that a model passes to its layers; it becomes a dense tensor if the model computes with it."""

from __future__ import annotations

import ctypes
import functools
import warnings
from typing import NamedTuple, cast

import torch
from torch import Tensor

from undivided import masks
from undivided.arguments.tensors import is_traced, jit_trace, missing_memory
from undivided.backends._base import KeyRange
from undivided.context_parallel.context import ContextParallel
from undivided.errors import InputError
from undivided.integrations.transformers._patterns import Chunked, Pattern
from undivided.integrations.transformers._tensor_like import TensorLike
from undivided.masks import FULL, Mask
from undivided.run.replay import PreparedCall


class MaskSizes(NamedTuple):
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


class ModelMask(TensorLike):
    """An undivided `Mask` in place of the 4-D mask tensor of other attention implementations.

    A model that only passes it to its layers keeps the mask's structure. If the model computes with it (a slice, a
    reshape, an operator or function of PyTorch, a tensor method), the result is that of the dense mask, which is
    created then and cached.

    Args:
        mask: which pairs may attend; None: `keys` says so.
        pattern: the pattern that the mask is from, for documents that only the attention gets.
        sizes: the sizes of the call.
        device, dtype: of the dense mask. ``torch.bool`` gives the mask of "sdpa", True = attend. A floating-point dtype
            gives that of "eager": 0 and the lowest number.
        context: the ranks over which the sequence is spread; None is one process. The mask is then that of the whole
            sequence, while the sizes are those of this rank, and there is no dense mask.
        keys: the keys of each sequence, if it has one query and they are known as numbers.

    >>> from undivided import masks
    >>> mask = ModelMask(masks.causal(), Pattern(right=0), MaskSizes(1, 2, 2), torch.device("cpu"))
    >>> mask.shape, torch.where(mask, 0, -1).tolist()
    (torch.Size([1, 1, 2, 2]), [[[[0, -1], [0, 0]]]])
    """

    def __init__(
        self,
        mask: Mask | None,
        pattern: Pattern,
        sizes: MaskSizes,
        device: torch.device,
        dtype: torch.dtype = torch.bool,
        *,
        context: ContextParallel | None = None,
        keys: tuple[KeyRange, ...] | None = None,
    ) -> None:
        self.context, self.keys = context, keys
        self.pattern, self.sizes, self.device, self.dtype = pattern, sizes, device, dtype
        if mask is not None:
            self.mask = mask
        self.shape = torch.Size((sizes.batch, 1, sizes.q_len, sizes.kv_len))
        self.documents: tuple[Tensor, Tensor, Mask] | None = None
        self.in_one_row: ModelMask | None = None
        """The same mask with the documents of all rows in one, for batch-invariant results."""
        self.prepared: dict[object, PreparedCall | None] = {}
        self.has_read_positions = False
        self._copies: dict[torch.device, ModelMask] = {}

    def __getstate__(self) -> dict[str, object]:
        """Everything but what was prepared, which has pointers."""
        return {**self.__dict__, "prepared": {}}

    @functools.cached_property
    def mask(self) -> Mask:
        """Which pairs may attend. A step of decoding needs it only if its layers cannot run what an earlier step has
        prepared."""
        assert self.keys is not None
        if self.sees_all_keys:
            return FULL
        starts = [start for start, _ in self.keys]
        return masks.lengths([stop - start for start, stop in self.keys], kv_start=starts if any(starts) else None)

    @functools.cached_property
    def sees_all_keys(self) -> bool:
        """Whether every sequence attends to all keys, as far as `keys` says so."""
        everything = 0, self.sizes.kv_len
        return self.keys is not None and all(key_range == everything for key_range in self.keys)

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

        Raises:
            InputError: the sequence is spread over ranks.
        """
        if self.context is not None:
            raise InputError(
                "attention_mask",
                f"be passed to the attention as it is: the sequence is spread over {self.context.world} ranks",
                "a model that computes with its mask",
            )
        sizes = self.sizes
        return self.mask.to_dense(sizes.batch, 1, sizes.q_len, sizes.kv_len, self.device)

    def _moved(self, device: torch.device) -> ModelMask | Tensor:
        """The mask on another device, cached: with the layers of a model on several GPUs, each layer asks for it."""
        if self.context is not None or "predicate" in self.mask.structure.kinds:  # what a function captures stays
            return self.dense.to(device)
        copy = self._copies.get(device)
        if copy is None:
            copy = ModelMask(self.mask.to(device), self.pattern.to(device), self.sizes, device, self.dtype)
            if self.in_one_row is not None:
                copy.in_one_row = cast(ModelMask, self.in_one_row._moved(device))  # it has no predicate
            self._copies[device] = copy
        return copy

    def __repr__(self) -> str:
        return f"<ModelMask {list(self.shape)}: {self.mask!r}>"


def keys_of_one_query(pattern: Pattern, sizes: MaskSizes, device: torch.device) -> tuple[KeyRange, ...] | None:
    """The keys of the only query of each sequence; None if there are more queries, or if the keys may be no range.

    A model that decodes asks for such a mask in each step: as numbers, it takes a tenth of the time of `to_mask`.

    >>> keys_of_one_query(Pattern(left=2, right=0), MaskSizes(1, 1, 8, q_offset=4), torch.device("cpu"))
    ((2, 5),)
    """
    batch, q_len, kv_len, _, kv_offset = sizes
    if q_len != 1 or device.type != "cpu" or kv_offset < 0 or is_traced() or jit_trace() is not None:
        return None
    if pattern.rest or pattern.packed is not None or len(pattern.padding) > 1:
        return None
    if not all(hides_nothing(chunk, pattern, sizes) for chunk in pattern.chunks):
        return None
    first = 0 if pattern.left is None else max(sizes.diagonal - pattern.left, 0)
    stop = kv_len if pattern.right is None else min(sizes.diagonal + pattern.right + 1, kv_len)
    if stop <= first:
        return None
    if not pattern.padding:
        return ((first, stop),) * batch
    real = _mask_bytes(pattern.padding[0])
    if real is None or pattern.padding[0].shape[0] != batch:
        return None
    stored = pattern.padding[0].shape[1]  # keys beyond are not real
    if b"\0" not in real and stored >= kv_offset + stop:
        return ((first, stop),) * batch
    keys = []
    row_start, row_stop = kv_offset + first, min(kv_offset + stop, stored)
    for row in range(0, batch * stored, stored):
        found = _real_range(real[row + row_start : row + row_stop])
        if found is None:
            return None
        keys.append((first + found[0], first + found[1]) if found[1] else (0, 0))
    return tuple(keys)


def hides_nothing(chunk: Chunked, pattern: Pattern, sizes: MaskSizes) -> bool:
    """Whether all real keys up to the last query are in one chunk.

    If chunks start after the first position, there is a part of a chunk before them. In models this part is padding,
    because chunks start at the first token of a left-padded text.
    """
    if chunk.size < sizes.q_offset + sizes.q_len:
        return False
    first = int(chunk.start.max()) if chunk.start.numel() else 0
    if first <= 0:
        return True
    return any(real.shape[1] >= first and _starts_with_padding(real, chunk.start) for real in pattern.padding)


def _starts_with_padding(real: Tensor, start: Tensor) -> bool:
    """Whether no key before a row's start is real."""
    before = torch.arange(real.shape[1], device=real.device) < start.to(real.device)[:, None]
    return not bool((before & real.to(torch.bool)).any())


def _real_range(real: bytes) -> tuple[int, int] | None:
    """The range of the bytes that are not 0; (0, 0) if there is none, and None if a byte between them is 0.

    >>> _real_range(bytes([0, 1, 1])), _real_range(bytes(3)), _real_range(bytes([1, 0, 1]))
    ((1, 3), (0, 0), None)
    """
    to_end = real.lstrip(b"\0")
    between = to_end.rstrip(b"\0")
    if b"\0" in between:
        return None
    start = len(real) - len(to_end)
    return (start, start + len(between)) if between else (0, 0)


def _mask_bytes(real: Tensor) -> bytes | None:
    """The bytes of a mask of real keys, not 0 where a key is real; None if they cannot be read, or there are none."""
    if type(real) is not Tensor or real.dtype != torch.bool or not real.is_cpu or not real.is_contiguous():
        return None
    if missing_memory(real) or not (address := real.data_ptr()):
        return None
    return ctypes.string_at(address, real.numel())

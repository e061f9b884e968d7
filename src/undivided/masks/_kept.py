"""Caches of masks that are built again from the same arguments.

A layer that builds its mask in each call would otherwise check it and compute its ranges each time, which takes ten
times as long as a small call.

kept         decorates a function that builds masks. It finds a mask by the addresses of the arguments' tensors, and
             returns it only if their bytes are unchanged. For small CPU tensors only: changes of large or GPU tensors
             would go unnoticed.
TensorMasks  masks that live as long as the caller's tensors, of any size. They are found by in-place version and, on
             the CPU, by content.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from undivided._bounded import Bounded
from undivided.arguments.tensors import (
    have_small_storages,
    is_dense,
    is_lazy,
    is_traced,
    jit_trace,
    memory,
    small_storages,
    versions,
)
from undivided.masks._fields import MaskFields
from undivided.masks._predicate import Predicate

P = ParamSpec("P")
M = TypeVar("M", bound=MaskFields)
T = TypeVar("T")

_recent: Bounded[object, tuple[Sequence[Tensor], object, Any]] = Bounded(16)
"""By the arguments: the tensors of the call and of the mask, their contents, and the mask. An entry holds its tensors,
so that no others can lie where they do."""


class _State(NamedTuple):
    versions: tuple[object, ...]
    addresses: list[int]

    @staticmethod
    def read(tensors: Sequence[Tensor]) -> _State | None:
        """The state of plain tensors outside of tracing; None if a change may go unseen."""
        if is_traced() or jit_trace() is not None or not all(type(tensor) is Tensor for tensor in tensors):
            return None
        contents = versions(tensors)
        return None if contents is None else _State(contents, [tensor.data_ptr() for tensor in tensors])


def _owner(tensor: Tensor) -> Tensor | torch.UntypedStorage:
    """What a tensor and its views share, because a layer may make the same view anew in each call.

    Not the storage: the mask's own tensor shares it, so that the entry would keep itself alive. Small inference tensors
    are the exception, because their views have no base.
    """
    base = tensor._base
    if base is not None:
        return base
    return tensor.untyped_storage() if tensor.is_inference() and have_small_storages((tensor,)) else tensor


def _key(key: object, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """The key of an entry: the owners, and which part of them the tensors are."""
    parts = [(id(_owner(t)), t.dtype, t.storage_offset(), t.shape, t.stride(), t.is_neg()) for t in tensors]
    return key, *parts


class _Entry(NamedTuple, Generic[T]):
    owners: list[weakref.ref[Any]]
    state: _State
    copies: list[Tensor | None]
    """Of the memory of large tensors on the CPU, because no version counts what ``torch.distributed`` receives, or what
    is written through ``.data``."""
    mask: T

    @property
    def copied(self) -> int:
        """Bytes of the copies."""
        return sum(0 if copy is None else copy.nbytes for copy in self.copies)

    def is_of(self, tensors: Sequence[Tensor], state: _State) -> bool:
        """Whether it is of these tensors, whose key it has, in this state, and no copy differs from them."""
        return (
            self.state == state
            and all(reference() is not None for reference in self.owners)  # their ids are in the key
            and all(
                copy is None or torch.equal(copy, memory(tensor))
                for copy, tensor in zip(self.copies, tensors, strict=True)
            )
        )


_VIEW_BYTES = 1 << 25
"""The largest number of bytes in copies of one tensor's views, of which a model may make thousands. The oldest are
dropped first; two views are always kept."""


class TensorMasks(Generic[T]):
    """Masks of tensors that all layers of a model receive, or objects that have such a mask. A mask that is to go with
    its tensors must not hold these themselves: ``tensor.detach()`` has the same memory and version.

    >>> from undivided import masks
    >>> recent, tensor = TensorMasks(8), torch.rand(4, 4) < 0.5
    >>> build = lambda: masks.dense(tensor.detach())
    >>> recent.get("dense", (tensor,), build) is recent.get("dense", (tensor,), build)
    True
    """

    def __init__(self, most: int) -> None:
        self._entries: Bounded[tuple[Any, ...], _Entry[T]] = Bounded(most)

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: object, tensors: Sequence[Tensor]) -> T | None:
        """As `get`, or None if there is no mask for these tensors, or one of them has changed or moved."""
        state = _State.read(tensors)
        if state is None:
            return None
        entry = self._entries.get(_key(key, tensors))
        return entry.mask if entry is not None and entry.is_of(tensors, state) else None

    def get(self, key: object, tensors: Sequence[Tensor], build: Callable[[], T]) -> T:
        """The mask that ``build`` has built for these tensors, if none has changed or moved; else a new one.

        Args:
            key: what the mask depends on besides the tensors.
            tensors: those that it depends on.
            build: without arguments.
        """
        state = _State.read(tensors)
        if state is None:
            return build()
        key = _key(key, tensors)
        entry = self._entries.get(key)
        if entry is not None and entry.is_of(tensors, state):
            return entry.mask

        def forget(_: object) -> None:
            self._entries.pop(key, None)

        # before `build`: if another thread writes to a tensor in the meantime, the next call finds other values
        copies = [
            memory(tensor).clone() if tensor.is_cpu and not isinstance(content, bytes) else None
            for tensor, content in zip(tensors, state.versions, strict=True)
        ]
        mask = build()
        entry = _Entry([weakref.ref(_owner(tensor), forget) for tensor in tensors], state, copies, mask)
        if entry.copied:
            self._drop_views(key, entry.copied)
        self._entries[key] = entry
        return mask

    def _drop_views(self, key: tuple[Any, ...], size: int) -> None:
        """Makes room for so many bytes of copies among other views of the same tensors: the oldest go."""
        owners = [part[0] for part in key[1:]]
        views = [(k, e.copied) for k, e in list(self._entries.items()) if e.copied and [p[0] for p in k[1:]] == owners]
        while len(views) > 1 and size + sum(copied for _, copied in views) > _VIEW_BYTES:
            self._entries.pop(views.pop(0)[0], None)


_JOINED_MASKS = 8
"""How many joined masks one mask caches."""


def _place(tensor: Tensor) -> object:
    """Where a tensor on the CPU lies, equal for equal views; None if it has no such place."""
    if not tensor.is_cpu or not is_dense(tensor) or is_lazy(tensor):
        return None
    try:
        return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
    except RuntimeError:  # a tensor of torch.func outside of its function
        return None


def kept(build: Callable[P, M]) -> Callable[P, M]:
    """A function that builds masks, which returns the same object for the same arguments while nothing changed."""

    @functools.wraps(build)
    def call(*arguments: P.args, **options: P.kwargs) -> M:
        if is_traced() or jit_trace() is not None:
            return build(*arguments, **options)
        identities: list[object] = [build, tuple(options)]
        tensors: list[Tensor] = []
        for value in (*arguments, *options.values()):
            if type(value) is Tensor and (place := _place(value)) is not None:
                tensors.append(value)
                identities.append(place)
            elif value is None or type(value) in (int, str):
                identities.append(value)
            else:
                return build(*arguments, **options)
        key = tuple(identities)
        entry = _recent.get(key)
        if entry is not None and entry[1] == small_storages(entry[0]):
            found: M = entry[2]
            return found
        mask = build(*arguments, **options)
        watched = (*tensors, *(own for own in mask.tensors if not any(own is tensor for tensor in tensors)))
        contents = small_storages(watched)
        if contents is not None:
            _recent[key] = watched, contents, mask
        return mask

    return call


def joined(join: Callable[[M, object], M], a: M, b: object) -> M:
    """``join(a, b)``, the same object for the same masks if one of them has neither tensors nor functions."""
    if torch.compiler.is_compiling() or not isinstance(b, MaskFields):
        return join(a, b)
    holder, other = (b, a) if b.tensors else (a, b)
    if other.tensors or Predicate.name in other.structure.kinds:  # `holder` may be kept for longer than `other`
        return join(a, b)
    joined_masks: Bounded[object, M] = holder.__dict__.setdefault("_joined", Bounded(_JOINED_MASKS))
    key = join, holder is a, other
    result = joined_masks.get(key)
    if result is None:
        result = joined_masks[key] = join(a, b)
    return result

"""``MaskFields``: the fields of a mask, the values that follow from them alone, and the cache of other results."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from undivided.arguments.tensors import has_dispatch, is_captured, is_traced, versions
from undivided.errors import InputError
from undivided.masks._alignment import Align
from undivided.masks._memory import DerivedValues, TensorIdentities
from undivided.masks._parts import Documents, Part, find_part
from undivided.masks._predicate import Predicate
from undivided.masks._structure import Structure, mask_kinds, part_detail

T = TypeVar("T")

RESULTS_PER_MASK = 64
"""Each size of call takes up to four. Sizes differ by kind of layer and by step of decoding, and one causal mask serves
all calls of `scaled_dot_product_attention`."""


class _Entry:
    """A cached result of a mask.

    Args:
        state: `MaskFields.state` when the result was built.
        result: the result.
    """

    __slots__ = ("is_used", "result", "state")

    def __init__(self, state: object, result: Any) -> None:
        self.state, self.result = state, result
        self.is_used = False  # since the entry was last considered for removal


@dataclass(frozen=True, eq=False, repr=False)
class MaskFields(DerivedValues):
    """The alignment, band and parts of a mask."""

    align: Align | None = None
    left: int | None = None
    right: int | None = None
    parts: tuple[Part, ...] = ()

    def __bool__(self) -> bool:
        # every mask would be true: `documents(...) and causal()` would be causal() alone
        hint = "masks.documents(offsets) & masks.causal(); `mask is not None` asks whether there is a mask"
        raise InputError("mask", "be joined by & or |", "'and', 'or', 'not' or 'if'", hint)

    def __invert__(self) -> NoReturn:
        hint = "masks.dense(~mask.to_dense(batch, heads, q_len, kv_len))"
        raise InputError("mask", "be joined by & or |", f"~{self!r}", hint)

    @property
    def band(self) -> tuple[int | None, int | None]:
        """``(left, right)`` of the band, which is the intersection of all causal and window masks; None: unbounded."""
        return self.left, self.right

    @property
    def is_full(self) -> bool:
        """Whether nothing is masked: no band and no part. An alignment may remain, for ALiBi."""
        return self.is_band and self.left is None and self.right is None

    @property
    def is_band(self) -> bool:
        """Whether the mask is only a band: causal, a window or every pair."""
        return len(self.parts) == 0

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor of the mask once, in the order of ``flatten``."""
        cached = self.__dict__.get("_tensors")
        if cached is not None:
            return cached  # type: ignore[no-any-return]
        tensors: list[Tensor] = []
        for part in self.parts:
            for tensor in part.tensors:
                if not any(tensor is other for other in tensors):
                    tensors.append(tensor)
        if not torch.compiler.is_compiling():
            self.__dict__["_tensors"] = tuple(tensors)
        return tuple(tensors)

    @property
    def has_dispatch(self) -> bool:
        """Whether a tensor of the mask is of a class with ``__torch_dispatch__``."""
        cached = self.__dict__.get("_has_dispatch")
        if cached is None:
            cached = any(map(has_dispatch, self.tensors))
            if not torch.compiler.is_compiling():
                self.__dict__["_has_dispatch"] = cached
        return bool(cached)

    @property
    def kinds(self) -> frozenset[str]:
        """The names of what the mask contains.

        ``causal`` or ``window`` for the band, the constructors' names for the parts, ``global`` for a window joined to
        a prefix or sinks, and ``q_lengths``, ``starts`` and ``padded`` if lengths or documents hold these.
        """
        return mask_kinds(self.band, self.parts)

    @property
    def structure(self) -> Structure:
        """The mask without its tensors; kernels are selected by it."""
        structure = self.__dict__.get("_structure")
        if structure is None:
            detail = tuple(part_detail(part) for part in self.parts)
            structure = Structure(self.align, self.left, self.right, self.kinds, detail)
            self.__dict__["_structure"] = structure
        return structure

    @property
    def document_sizes(self) -> tuple[int, int | None, int | None] | None:
        """``(documents, longest query, longest key)``; a length is None if it is on a GPU. None: no documents."""
        documents = find_part(self.parts, Documents)
        if documents is None:
            return None
        return documents.cu_seqlens_q.shape[0] - 1, documents.longest("q"), documents.longest("kv")

    def state(self) -> object:
        """A value that changes whenever a tensor of the mask, or one that its predicates capture, changes in place.

        Returns:
            A value to compare by ``==``; None if changes cannot be observed (inference tensors; predicates whose
            tensors are unknown).

        >>> from undivided import masks
        >>> kv = torch.tensor([2, 3])
        >>> mask = masks.lengths(kv)
        >>> before = mask.state()
        >>> kv[0] = 1
        >>> mask.state() == before
        False
        """
        watched = self.__dict__.get("_watched")
        if watched is not None:
            return versions(watched)
        if "predicate" not in self.structure.kinds:
            self.__dict__["_watched"] = self.tensors
            return versions(self.tensors)
        captured: list[Tensor] = []
        for part in self.parts:
            if isinstance(part, Predicate):
                tensors = part.captured()
                if tensors is None:
                    return None
                captured += tensors
        now = versions((*self.tensors, *captured))
        return None if now is None else (now, TensorIdentities(captured))

    def cached(self, key: object, build: Callable[..., T], *arguments: object) -> T:
        """The result of ``build(*arguments)``, cached under ``key`` until a tensor of the mask changes.

        Nothing is cached while a call is traced. In a CUDA graph, tensors on the GPU are read again at every replay,
        so that lengths may change between replays. CPU tensors cannot be read there, and results from before the
        capture are used.

        Args:
            key: a hashable key.
            build: a function of ``arguments``.
            arguments: passed to ``build``; they are not part of the key.

        Returns:
            The new or the cached result.

        >>> from undivided import masks
        >>> mask = masks.causal()
        >>> mask.cached("key", list) is mask.cached("key", list)
        True
        """
        if is_traced() and not (is_captured() and self._is_on_host()):
            return build(*arguments)
        now: object = ()
        if self.parts:
            now = self.state()
            if now is None:
                return build(*arguments)
        entries: dict[object, _Entry] = self.__dict__.setdefault("_entries", {})
        entry = entries.get(key)
        if entry is not None and entry.state == now:
            entry.is_used = True
            return entry.result  # type: ignore[no-any-return]
        result = build(*arguments)
        entries[key] = _Entry(now, result)
        if len(entries) > RESULTS_PER_MASK:
            _remove_one(entries)
        return result

    def _take_use(self, key: Hashable) -> bool:
        """Whether the cached result under a key was used since it was last considered for removal."""
        entry: _Entry | None = self.__dict__.get("_entries", {}).get(key)
        if entry is None:
            return False
        is_used, entry.is_used = entry.is_used, False
        return is_used

    def _drop(self, key: Hashable) -> None:
        """Drop the cached result under a key; the next call builds it anew."""
        self.__dict__.get("_entries", {}).pop(key, None)

    def _is_on_host(self) -> bool:
        """Whether the mask has tensors and all are on the CPU."""
        return bool(self.tensors) and all(tensor.device.type == "cpu" for tensor in self.tensors)


def _remove_one(entries: dict[object, _Entry]) -> None:
    """Remove the oldest result that was not used since the last removal; those that were used become the newest.

    This is second-chance eviction. Sorting by the last use would hash a key, which can be long, at each use.
    """
    for key in list(entries):
        entry = entries.pop(key, None)  # another thread may have removed it
        if entry is None or not entry.is_used:
            return
        entry.is_used = False
        entries[key] = entry

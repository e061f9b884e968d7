"""The pattern of a mask function of transformers, read from its closure.

Transformers describes a mask as a function of absolute positions ``fn(batch, head, q, k)``, built from a few kinds of
closures. They are recognised by their code and read into a `Pattern`. `learn` first compares each kind with its pattern
over a grid of positions. A closure that is unknown, or that changed its meaning, stays a function, which is evaluated
pair by pair.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from undivided.arguments.tensors import jit_trace, values_are_traced

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""``fn(batch, head, q, k) -> bool tensor`` over indices that broadcast, q and k in absolute positions."""


@dataclass(frozen=True, eq=False)
class Chunked:
    """Chunks of ``size`` positions, counted from ``start[b]``, int ``[B]``; a query attends only within its chunk."""

    size: int
    start: Tensor


@dataclass(frozen=True, eq=False)
class Packed:
    """Packed documents: the ascending ids of the tokens, and their positions within the documents, int ``[B, S]``.

    Without positions, bands count the tokens of the whole row.
    """

    ids: Tensor
    positions: Tensor | None


@dataclass(frozen=True, eq=False)
class Pattern:
    """An intersection of conditions on absolute positions q and k.

    Args:
        left, right: a band, ``q - left <= k <= q + right``; None is unbounded.
        chunks: a query attends only within its chunk.
        packed: a query attends only within its document; band and chunks then count positions within the document.
        padding: the real keys, bool ``[B, S]``.
        rest: functions for all other conditions.
    """

    left: int | None = None
    right: int | None = None
    chunks: tuple[Chunked, ...] = ()
    packed: Packed | None = None
    padding: tuple[Tensor, ...] = ()
    rest: tuple[MaskFunction, ...] = ()

    def __and__(self, other: Pattern) -> Pattern:
        if self.packed is not None and (other.packed is not None or other.chunks):
            other = Pattern(rest=(other.allows,))  # two sets of documents, or chunks that cross documents
        elif other.packed is not None and self.chunks:
            return other & self
        return Pattern(
            _smaller(self.left, other.left),
            _smaller(self.right, other.right),
            self.chunks + other.chunks,
            self.packed or other.packed,
            self.padding + other.padding,
            self.rest + other.rest,
        )

    @property
    def has_diagonal(self) -> bool:
        """Whether a condition compares the positions of q and k."""
        return self.left is not None or self.right is not None or len(self.chunks) > 0

    def with_padding(self, real: Tensor) -> Pattern:
        """The pattern with further real keys, bool ``[B, S]``; `dataclasses.replace` takes twice as long."""
        return Pattern(self.left, self.right, self.chunks, self.packed, (*self.padding, real), self.rest)

    def to(self, device: torch.device) -> Pattern:
        """The same pattern with its tensors on a device; what functions capture is not moved."""
        packed = self.packed
        if packed is not None:
            positions = packed.positions
            packed = Packed(packed.ids.to(device), None if positions is None else positions.to(device))
        chunks = tuple(Chunked(chunk.size, chunk.start.to(device)) for chunk in self.chunks)
        padding = tuple(real.to(device) for real in self.padding)
        return dataclasses.replace(self, chunks=chunks, packed=packed, padding=padding)

    def allows(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Whether the query at position q may attend to the key at position k; defines the fields."""
        allowed = torch.ones((), dtype=torch.bool, device=q.device)
        for real in self.padding:
            allowed = allowed & real[b, k]
        for fn in self.rest:
            allowed = allowed & fn(b, h, q, k)
        if self.packed is not None:
            allowed = allowed & (self.packed.ids[b, q] == self.packed.ids[b, k])
            if self.packed.positions is not None:
                q, k = self.packed.positions[b, q], self.packed.positions[b, k]
        if self.left is not None:
            allowed = allowed & (k >= q - self.left)
        if self.right is not None:
            allowed = allowed & (k <= q + self.right)
        for chunk in self.chunks:
            start = chunk.start[b]
            allowed = allowed & ((q - start) // chunk.size == (k - start) // chunk.size)
        return allowed


def _smaller(a: int | None, b: int | None) -> int | None:
    return min((side for side in (a, b) if side is not None), default=None)


def is_recorded() -> bool:
    """Whether torch.export or torch.jit.trace records a graph, in which what is read from values is a constant."""
    return values_are_traced() or jit_trace() is not None


def read(fn: MaskFunction) -> Pattern:
    """The pattern of a mask function; an unknown function becomes `Pattern.rest`.

    >>> from transformers import masking_utils
    >>> learn(masking_utils)
    >>> pattern = read(masking_utils.sliding_window_causal_mask_function(4))
    >>> pattern.left, pattern.right, pattern.rest
    (3, 0, ())
    """
    reader = _readers.get(getattr(fn, "__code__", None))  # type: ignore[arg-type]
    pattern = None if reader is None else reader(_closure(fn))
    return Pattern(rest=(fn,)) if pattern is None else pattern


Closure = Mapping[str, Any]
Reader = Callable[[Closure], "Pattern | None"]


def _closure(fn: MaskFunction) -> Closure:
    """The variables that a function closes over, by name."""
    assert isinstance(fn, FunctionType)
    cells = fn.__closure__ or ()
    return dict(zip(fn.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True))


def _read_and(closure: Closure) -> Pattern | None:
    functions = tuple(closure["mask_functions"])
    packed = _read_packed(*functions) if len(functions) == 2 else None
    return packed or functools.reduce(Pattern.__and__, map(read, functions), Pattern())


def _read_packed(first: MaskFunction, second: MaskFunction) -> Pattern | None:
    """The pattern of two functions, one for equal ids and one for the mask within a document, in either order."""
    functions = {_readers.get(getattr(fn, "__code__", None)): fn for fn in (first, second)}  # type: ignore[arg-type]
    if functions.keys() != {_read_ids, _read_within}:
        return None
    within = _closure(functions[_read_within])
    documents, inner = _read_ids(_closure(functions[_read_ids])), read(within["mask_function"])
    if documents is None or documents.packed is None:
        return None
    if inner.packed is not None or inner.padding or inner.rest:  # they would have to use positions within the document
        return None
    return dataclasses.replace(inner, packed=Packed(documents.packed.ids, within["position_ids"]))


def _read_ids(closure: Closure) -> Pattern | None:
    """Documents by the ids of their tokens; None if a document may be in several parts, or has a negative id, and while
    a graph is recorded, which knows no ids."""
    ids: Tensor = closure["packed_sequence_mask"]
    if ids.is_floating_point() or ids.dtype == torch.bool or is_recorded():
        return None
    if not bool((ids[:, 1:] >= ids[:, :-1]).all() & (ids >= 0).all()):
        return None
    return Pattern(packed=Packed(ids, None))


def _read_within(closure: Closure) -> None:
    """None: a mask of positions within documents is a pattern only beside the ids of the documents."""


def _read_window(closure: Closure) -> Pattern | None:
    """A window of ``sliding_window`` keys that ends with the query's own; None if it has no key."""
    size: int = closure["sliding_window"]
    return Pattern(left=size - 1) if size >= 1 else None


def _read_window_both_ways(closure: Closure) -> Pattern:
    size: int = closure["sliding_window"]
    return Pattern(left=size, right=size)


def _read_padding(closure: Closure) -> Pattern:
    return Pattern(padding=(closure["padding_mask"],))


def _read_chunks(closure: Closure) -> Pattern:
    return Pattern(chunks=(Chunked(closure["chunk_size"], closure["left_padding"]),))


_readers: dict[CodeType, Reader] = {}
"""Readers by the code of the closures that they read; `learn` adds those that it has verified."""


def learn(masking_utils: ModuleType) -> None:
    """Add the readers whose patterns agree with the closures of ``transformers.masking_utils``."""
    for reader, samples in _samples(masking_utils):
        code = None
        try:
            for make in samples:
                whole, part = make()
                code = part.__code__
                _readers[code] = reader
                pattern = read(whole)
                is_unknown = whole in pattern.rest or part in pattern.rest
                if is_unknown or not torch.equal(_pairs(whole), _pairs(pattern.allows)):
                    raise ValueError(f"{part.__qualname__} has another meaning")
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):  # removed, or built in another way
            _readers.pop(code, None)  # type: ignore[arg-type]


Sample = Callable[[], tuple[Any, Any]]
"""Creates a function, and the part of it that a reader is for: most often the same function twice."""


def _samples(masking_utils: ModuleType) -> Iterator[tuple[Reader, Sequence[Sample]]]:
    """Each reader, and samples of its closures; readers that others use come first.

    No reader depends on a function that others can do without, so that a function that transformers removes or renames
    costs the structure of its own masks only.
    """
    utils: Any = masking_utils
    ids, positions = torch.tensor([[0, 0, 0, 1, 1, 1, 1]] * 2), torch.tensor([[1, 0, 2, 1, 3, 2, 0]] * 2)
    real = torch.tensor([[True] * 5 + [False] * 2, [False, True, True, False, True, True, True]])
    yield lambda closure: Pattern(right=0), [lambda: (utils.causal_mask_function,) * 2]
    yield lambda closure: Pattern(), [lambda: (utils.bidirectional_mask_function,) * 2]
    yield _read_window, [lambda: (utils.sliding_window_overlay(3),) * 2]
    yield _read_window_both_ways, [lambda: (utils.sliding_window_bidirectional_overlay(2),) * 2]
    yield _read_chunks, [lambda: (utils.chunked_overlay(3, torch.tensor([0, 2])),) * 2]
    yield _read_padding, [lambda: (utils.padding_mask_function(real),) * 2]
    yield _read_ids, [lambda: (utils.packed_sequence_mask_function(ids),) * 2]
    yield _read_and, [lambda: (utils.and_masks(utils.causal_mask_function, lambda b, h, q, k: k > q - 2),) * 2]

    def packed(is_swapped: bool) -> tuple[Any, Any]:
        within = utils.remap_positions_for_packed_sequence(utils.causal_mask_function, positions)
        both = utils.packed_sequence_mask_function(ids), within
        return utils.and_masks(*(reversed(both) if is_swapped else both)), within  # swapped by transformers 5.24

    yield _read_within, [lambda: packed(False), lambda: packed(True)]


def _pairs(fn: MaskFunction) -> Tensor:
    """A mask function evaluated on a grid of 2 sequences and 7 positions, bool ``[2, 1, 7, 7]``."""
    b, position = torch.arange(2), torch.arange(7)
    q, k = position[None, None, :, None], position[None, None, None]
    pairs = fn(b[:, None, None, None], b[None, :1, None, None], q, k)
    return pairs.expand(2, 1, 7, 7)

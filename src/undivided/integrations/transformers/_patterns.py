"""What a mask function of transformers says, read from the function itself.

Transformers describes a mask as a function of absolute positions ``fn(batch, head, q, k)``, built from a handful of
closures. Those are recognised by their code and taken apart into a `Pattern`; each is first compared, over a grid of
positions, with what we take it for. A closure that is unknown, or no longer means what it did, stays a function that is
asked pair by pair.
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

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""``fn(batch, head, q, k) -> bool tensor`` over indices that broadcast, q and k in absolute positions."""


@dataclass(frozen=True, eq=False)
class Chunked:
    """Positions in chunks of ``size`` counted from ``start[b]``, int ``[B]``, that see only themselves."""

    size: int
    start: Tensor


@dataclass(frozen=True, eq=False)
class Packed:
    """Packed documents: their ids, ascending, and the position of each token in its own, int ``[B, S]``."""

    ids: Tensor
    positions: Tensor


@dataclass(frozen=True, eq=False)
class Pattern:
    """An intersection of conditions on absolute positions q and k.

    Args:
        left, right: a band, ``q - left <= k <= q + right``; None is unbounded.
        chunks: chunks that see only themselves.
        packed: documents that see only themselves; band and chunks then count positions within a document.
        padding: keys that are real, bool ``[B, S]``.
        rest: functions that say what the above does not.
    """

    left: int | None = None
    right: int | None = None
    chunks: tuple[Chunked, ...] = ()
    packed: Packed | None = None
    padding: tuple[Tensor, ...] = ()
    rest: tuple[MaskFunction, ...] = ()

    def __and__(self, other: Pattern) -> Pattern:
        if self.packed is not None and (other.packed is not None or other.chunks):
            other = Pattern(rest=(other.allows,))  # documents in documents, or chunks that do not begin with them
        elif other.packed is not None and self.chunks:
            return other & self
        return Pattern(
            _least(self.left, other.left),
            _least(self.right, other.right),
            self.chunks + other.chunks,
            self.packed or other.packed,
            self.padding + other.padding,
            self.rest + other.rest,
        )

    def allows(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Whether the query at position q may attend to the key at position k: what the fields mean."""
        allowed = torch.ones((), dtype=torch.bool, device=q.device)
        for real in self.padding:
            allowed = allowed & real[b, k]
        for fn in self.rest:
            allowed = allowed & fn(b, h, q, k)
        if self.packed is not None:
            allowed = allowed & (self.packed.ids[b, q] == self.packed.ids[b, k])
            q, k = self.packed.positions[b, q], self.packed.positions[b, k]
        if self.left is not None:
            allowed = allowed & (k >= q - self.left)
        if self.right is not None:
            allowed = allowed & (k <= q + self.right)
        for chunk in self.chunks:
            start = chunk.start[b]
            allowed = allowed & ((q - start) // chunk.size == (k - start) // chunk.size)
        return allowed


def _least(a: int | None, b: int | None) -> int | None:
    return min((side for side in (a, b) if side is not None), default=None)


def read(fn: MaskFunction) -> Pattern:
    """The pattern of a mask function: structure where it is known, the function itself where it is not.

    >>> from transformers import masking_utils
    >>> learn(masking_utils)
    >>> pattern = read(masking_utils.sliding_window_causal_mask_function(4))
    >>> pattern.left, pattern.right, pattern.rest
    (3, 0, ())
    """
    reader = _readers.get(getattr(fn, "__code__", None))  # type: ignore[arg-type]
    found = None if reader is None else reader(_closure(fn))
    return Pattern(rest=(fn,)) if found is None else found


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


def _read_packed(ids: MaskFunction, within: MaskFunction) -> Pattern | None:
    """Packed documents are two functions that mean something together alone: equal ids, and what holds in a
    document."""
    names = [getattr(fn, "__qualname__", "").partition(".")[0] for fn in (ids, within)]
    if names != ["packed_sequence_mask_function", "remap_positions_for_packed_sequence"]:
        return None
    inner = read(_closure(within)["mask_function"])
    if inner.packed is not None or inner.padding or inner.rest:  # these would need the document's positions too
        return None
    packed = Packed(_closure(ids)["packed_sequence_mask"], _closure(within)["position_ids"])
    return dataclasses.replace(inner, packed=packed)


def _read_window(closure: Closure) -> Pattern | None:
    """The last ``sliding_window`` keys up to the query's own, which counts; of no keys there is no band."""
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
"""The code of the closures that mean what we take them for, and how each is read. `learn` fills it."""


def learn(masking_utils: ModuleType) -> None:
    """Compare what the readers take the closures of ``transformers.masking_utils`` for with the closures themselves."""
    for reader, samples in _samples(masking_utils):
        code = None
        try:
            for make in samples:
                fn = make()
                code = fn.__code__
                _readers[code] = reader
                pattern = reader(_closure(fn))
                if pattern is None or not torch.equal(_pairs(fn), _pairs(pattern.allows)):
                    raise ValueError(f"{fn.__qualname__} means something else")
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):  # gone, or built in another way
            _readers.pop(code, None)  # type: ignore[arg-type]


def _samples(made_by: ModuleType) -> Iterator[tuple[Reader, Sequence[Callable[[], MaskFunction]]]]:
    """Each reader, and functions of ``transformers.masking_utils`` that it is for; what is read inside others comes
    first."""
    ids, positions = torch.tensor([[0, 0, 0, 1, 1, 1, 1]] * 2), torch.tensor([[0, 1, 2, 0, 1, 2, 3]] * 2)
    real = torch.tensor([[True] * 5 + [False] * 2, [False, True, True, False, True, True, True]])
    yield lambda closure: Pattern(right=0), [lambda: made_by.causal_mask_function]
    yield lambda closure: Pattern(), [lambda: made_by.bidirectional_mask_function]
    yield _read_window, [lambda: made_by.sliding_window_overlay(3)]
    yield _read_window_both_ways, [lambda: made_by.sliding_window_bidirectional_overlay(2)]
    yield _read_chunks, [lambda: made_by.chunked_overlay(3, torch.tensor([0, 2]))]
    yield _read_padding, [lambda: made_by.padding_mask_function(real)]
    causal, window = made_by.causal_mask_function, made_by.sliding_window_overlay(2)
    yield (
        _read_and,
        [
            lambda: made_by.and_masks(causal, window),
            lambda: made_by.packed_sequence_compatibility_function(window, positions, ids),
        ],
    )


def _pairs(fn: MaskFunction) -> Tensor:
    """A mask function over a grid: 2 sequences, 7 positions."""
    b, at = torch.arange(2), torch.arange(7)
    pairs = fn(b[:, None, None, None], b[None, :1, None, None], at[None, None, :, None], at[None, None, None])
    return pairs.expand(2, 1, 7, 7)

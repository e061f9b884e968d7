"""A mask without its tensors: what a kernel is selected by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from undivided.masks._parts import Chunk, Dense, Documents, Field, Lengths, Part
from undivided.masks._predicate import Predicate


class Structure(NamedTuple):
    """What a mask is made of, without its tensors: hashable, equal for masks that a kernel treats alike."""

    align: str | None
    left: int | None
    right: int | None
    kinds: frozenset[str]
    detail: tuple[tuple[str | int | None, ...], ...]


def kinds_of(band: tuple[int | None, int | None], parts: Sequence[Part]) -> frozenset[str]:
    """``Mask.kinds`` of a band and parts."""
    names = [part.name for part in parts]
    if band != (None, None):
        names.append("causal" if band == (None, 0) else "window")
    for part in parts:
        if isinstance(part, Lengths):
            names += ["q_lengths"] if part.q is not None else []
            names += ["starts"] if part.kv_start is not None or part.q_start is not None else []
        elif isinstance(part, Documents) and (part.padded_q is not None or part.padded_kv is not None):
            names.append("padded")
    return frozenset(names)


def detail_of(part: Part) -> tuple[str | int | None, ...]:
    """What tells parts of one kind apart for a kernel: sizes in the mask, and which tensors it has."""
    if isinstance(part, Dense):
        return (part.name, *(min(size, 2) for size in part.tensor.shape[:2]))
    if isinstance(part, Chunk):  # an offset moves at every decoding step and changes no kernel
        return (part.name, part.size)
    if isinstance(part, Predicate):
        return (part.name,)
    return (part.name, *(_kept(part, value) for value in part.fields()))


def _kept(part: Part, value: Field) -> str | int | None:
    if isinstance(value, Tensor):
        return "tensor"
    return None if isinstance(part, Documents) else value

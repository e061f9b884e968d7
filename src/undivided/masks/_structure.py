"""A mask without its tensors, by which a kernel is selected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from undivided.masks._parts import Chunk, Dense, Documents, Field, GlobalBand, Lengths, Part, Prefix
from undivided.masks._predicate import Predicate


class Structure(NamedTuple):
    """A mask without its tensors: hashable, and equal for masks that a kernel treats alike.

    Args:
        align: "top_left", "bottom_right" or None.
        left, right: keys of the band before and after the query's own; None: unbounded.
        kinds: names of what the mask contains, see ``Mask.kinds``.
        detail: per part its name, its sizes, and which tensors it has.

    >>> from undivided import masks
    >>> masks.causal().structure == masks.causal().structure
    True
    >>> masks.lengths([2, 3]).structure == masks.lengths([4, 1]).structure
    True
    >>> masks.prefix(3).structure == masks.prefix(4).structure
    True
    """

    align: str | None
    left: int | None
    right: int | None
    kinds: frozenset[str]
    detail: tuple[tuple[str | int | None, ...], ...]


def mask_kinds(band: tuple[int | None, int | None], parts: Sequence[Part]) -> frozenset[str]:
    """``Mask.kinds`` for a band and parts."""
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


def part_detail(part: Part) -> tuple[str | int | None, ...]:
    """The properties of a part that matter to a kernel: sizes, and which tensors it has."""
    if isinstance(part, Dense):
        return (part.name, *(min(size, 2) for size in part.tensor.shape[:2]))
    if isinstance(part, Chunk):  # an offset changes at every decoding step, and no kernel depends on it
        return (part.name, part.size)
    if isinstance(part, Predicate):
        return (part.name,)
    if isinstance(part, Prefix):  # as an offset: each length would be a problem of its own
        return (part.name, _length_kind(part.length))
    if isinstance(part, GlobalBand):
        return (part.name, part.left, part.right, _length_kind(part.prefix))
    return (part.name, *(_field_detail(part, value) for value in part.fields()))


def _length_kind(length: object) -> str:
    return "tensor" if isinstance(length, Tensor) else "number"


def _field_detail(part: Part, value: Field) -> str | int | None:
    if isinstance(value, Tensor):
        return "tensor"
    return None if isinstance(part, Documents) else value

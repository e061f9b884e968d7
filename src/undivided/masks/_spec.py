"""Masks as a constant string and tensors, and back, for operators that take no Python objects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from undivided.masks._alignment import Align
from undivided.masks._parts import (
    Blocks,
    Chunk,
    Dense,
    DocumentIds,
    Documents,
    Field,
    GlobalBand,
    Lengths,
    Origin,
    Part,
    Prefix,
    Tree,
)
from undivided.masks._predicate import Predicate, find_predicate

Band = tuple[int | None, int | None]

_PARTS: dict[str, Callable[..., Part]] = {
    kind.name: kind
    for kind in (Lengths, Documents, DocumentIds, Prefix, GlobalBand, Chunk, Dense, Tree, Blocks, Origin)
}

TAKEN_NAMES = frozenset(
    {"causal", "window", "band", "q_lengths", "starts", "padded", "ranges", Predicate.name, *_PARTS}
)
"""The names that `Mask.take` accepts."""


def write(
    align: Align | None, band: Band, parts: Sequence[Part], tensors: Sequence[Tensor], numbers: list[int] | None = None
) -> str:
    """The string: alignment, band, then the name and fields of each part; ``t0`` is the first of the tensors. A list
    for numbers receives those of the band and of the parts, of which ``n0`` is the first; otherwise they are in the
    string."""
    left, right = (_write_field(side, tensors, numbers) for side in band)
    words = [f"{align}", f"{left},{right}"]
    for part in parts:
        words.append(",".join([part.name, *[_write_field(value, tensors, numbers) for value in part.fields()]]))
    return ";".join(words)


def _write_field(value: Field, tensors: Sequence[Tensor], numbers: list[int] | None) -> str:
    if isinstance(value, Tensor):
        return next(f"t{n}" for n, tensor in enumerate(tensors) if tensor is value)
    if numbers is None or value is None:
        return f"{value}"
    numbers.append(value)
    return f"n{len(numbers) - 1}"


def names_tensors(spec: str) -> bool:
    """Whether the string of `write` names a tensor."""
    return ",t" in spec  # names of parts and alignments follow no comma


def read(
    spec: str, tensors: Sequence[Tensor], numbers: Sequence[int] = ()
) -> tuple[Align | None, Band, tuple[Part, ...]]:
    """Alignment, band and parts from the string, tensors and numbers of `write`."""
    align, band, *words = spec.split(";")
    left, right = (_parse(field, tensors, numbers) for field in band.split(","))
    parts: list[Part] = []
    for word in words:
        name, *fields = word.split(",")
        values = [_parse(field, tensors, numbers) for field in fields]
        parts.append(find_predicate(values[0]) if name == Predicate.name else _PARTS[name](*values))
    return None if align == "None" else align, (left, right), tuple(parts)  # type: ignore[return-value]


def _parse(field: str, tensors: Sequence[Tensor], numbers: Sequence[int]) -> Any:
    if field == "None":
        return None
    if field.startswith("n"):
        return numbers[int(field[1:])]
    return tensors[int(field[1:])] if field.startswith("t") else int(field)

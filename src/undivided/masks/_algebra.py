"""Intersection, union and removal of parts of masks."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import SymInt, Tensor

from undivided.errors import InputError
from undivided.masks._alignment import Align
from undivided.masks._fields import MaskFields
from undivided.masks._parts import Dense, Documents, GlobalBand, Lengths, Origin, Part, Prefix
from undivided.masks._predicate import Predicate

M = TypeVar("M", bound=MaskFields)

_FIRST_KEYS = ((None, None), (None, 0))  # the bands of prefix(n) and of sinks(n)


def intersection(a: M, b: object) -> M:
    """The mask ``a & b``."""
    b = _operand("&", b)
    both = a.parts + tuple(part for part in b.parts if not any(_are_equal(part, mine) for mine in a.parts))
    if sum(isinstance(part, Lengths | Documents) for part in both) > 1:
        raise InputError(
            "mask", "describe its sequences once", f"{a!r} & {b!r}", "keep one of lengths(...) and documents(...)"
        )
    if sum(isinstance(part, Origin) for part in both) > 1:
        raise InputError("mask", "have one first head", f"{a!r} & {b!r}", "call with_first_head on the joined mask")
    align, left, right = _common_align(a, b, "&"), _smaller(a.left, b.left), _smaller(a.right, b.right)
    return type(a)(align, left, right, both)


def _are_equal(a: Part, b: Part) -> bool:
    """Whether they are one part, or describe the sequences by the same tensors."""
    if a is b or not isinstance(a, Lengths | Documents) or type(a) is not type(b):
        return a is b
    return all(x is y or (isinstance(x, int | SymInt) and x == y) for x, y in zip(a.fields(), b.fields(), strict=True))


def _union_hint(a: MaskFields, b: MaskFields) -> str:
    if {"tree", "blocks"} & (a.kinds | b.kinds):
        return "a tree and chosen blocks are joined to other masks by `&` alone; masks.predicate takes any rule"
    if any(isinstance(part, Prefix) for part in (*a.parts, *b.parts)):
        return "`&` binds tighter than `|`: write (causal() | prefix(n)) & lengths(kv)"
    return "`&` restricts causal to documents; a union of other masks is masks.dense(a.to_dense(...) | b.to_dense(...))"


def union(a: M, b: object) -> M:
    """The mask ``a | b``: one of the two is a band, the other a prefix or sinks."""
    b = _operand("|", b)
    band, first = (b, a) if b.is_band else (a, b)
    bare = len(first.parts) == 1 and isinstance(first.parts[0], Prefix) and first.band in _FIRST_KEYS
    if not bare or not band.is_band:
        raise InputError(
            "mask", "join causal or window to a bare prefix or sinks with `|`", f"{a!r} | {b!r}", _union_hint(a, b)
        )
    align = _common_align(a, b, "|")
    if band.left is None and first.right == 0:  # the causal band contains the sinks
        return type(a)(align, None, band.right)
    if band.is_full:
        return type(a)(align)
    length = first.parts[0].fields()[0]
    assert isinstance(length, int | SymInt | Tensor)
    # Sinks after the query's own key are in the window or nowhere: the right side of the band bounds both.
    right = band.right if first.right == 0 else None
    return type(a)(align, None, right, (GlobalBand(band.left, band.right, length),))


def split(mask: M, name: str) -> tuple[Any, M]:
    """The part called ``name`` (None if there is none), and the mask without it."""
    if name in ("causal", "window", "band"):
        if (mask.left is None and mask.right is None) or (name != "band" and name not in mask.kinds):
            return None, mask
        return (True if name == "causal" else mask.band), type(mask)(mask.align, None, None, mask.parts)
    taken = tuple(part for part in mask.parts if part.name == name)
    if not taken:
        return None, mask
    rest = type(mask)(mask.align, mask.left, mask.right, tuple(part for part in mask.parts if part.name != name))
    if isinstance(taken[0], Lengths | Documents):
        return taken[0], rest
    return tuple(_content(part) for part in taken), rest


def _content(part: Part) -> object:
    if isinstance(part, Dense):
        return part.tensor
    return part.fn if isinstance(part, Predicate) else part


def _operand(sign: str, other: object) -> MaskFields:
    if isinstance(other, MaskFields):
        return other
    hint = "masks.dense(tensor) turns a boolean tensor into a mask" if isinstance(other, Tensor) else None
    raise InputError("mask", f"be joined to another mask by `{sign}`", type(other).__name__, hint)


def _common_align(a: MaskFields, b: MaskFields, sign: str) -> Align | None:
    if a.align is not None and b.align is not None and a.align != b.align:
        raise InputError(
            "mask", "have one alignment", f"{a!r} {sign} {b!r}", "pass the same align to both, or to only one of them"
        )
    return b.align if a.align is None else a.align


def _smaller(a: int | None, b: int | None) -> int | None:
    if a is None or b is None:
        return b if a is None else a
    return min(a, b)

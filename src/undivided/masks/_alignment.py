"""Alignment: whether top-left and bottom-right agree for a call, and which of the two a mask requests.

Alignment matters if a sequence has different numbers of keys and queries. Reading lengths on a GPU would make the host
wait, so on a GPU the two agree only if one tensor was passed for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from undivided.arguments.checks import INT32_MAX, as_integer
from undivided.arguments.tensors import readable
from undivided.errors import InputError, did_you_mean
from undivided.masks._parts import Documents, Lengths, Part

Align = Literal["top_left", "bottom_right"]


def resolve(align: Align | None, parts: Sequence[Part], q_len: int, kv_len: int, full: bool) -> str:
    """The alignment of a call: "both" if the two agree, otherwise ``align``; InputError if it is None.

    Args:
        align: the alignment of the mask.
        parts: the parts of the mask, with its lengths or documents.
        q_len, kv_len: sizes of the call.
        full: whether nothing is masked, so that only ALiBi needs an alignment.
    """
    agree = _alignments_agree(parts, q_len, kv_len)
    if agree:
        return "both"
    if align is not None:
        return align
    sizes = f"query length {q_len}, key length {kv_len}"
    hint = "write align='top_left' or align='bottom_right' in causal, window, chunks or predicate"
    if full:
        hint = "for ALiBi without a mask: masks.window(None, None, align='top_left' or 'bottom_right')"
    for part in parts:
        if isinstance(part, Lengths):
            sizes = f"lengths with q={'None' if part.q is None else 'other values than kv'} at {sizes}"
            if part.q is None:
                hint += "; for a padded self-attention batch pass the lengths of the queries too: lengths(n, n)"
        elif isinstance(part, Documents):
            sizes = "documents whose cu_seqlens_q and cu_seqlens_kv are different"
    if agree is None:
        hint += "; values on a GPU are not compared, so pass one tensor for both if they are equal"
    raise InputError(
        "align",
        "be given if top-left and bottom-right differ (queries and keys of unequal length)",
        f"None for {sizes}",
        hint,
    )


def _alignments_agree(parts: Sequence[Part], q_len: int, kv_len: int) -> bool | None:
    """Whether every sequence has as many keys as queries; None if the values are on a GPU."""
    for part in parts:
        if isinstance(part, Lengths | Documents):
            q, kv = (part.q, part.kv) if isinstance(part, Lengths) else (part.cu_seqlens_q, part.cu_seqlens_kv)
            if q is kv:
                return True
            if not readable(q, kv):
                return None
            return bool((kv == q_len).all()) if q is None else bool((q == kv).all())
    return q_len == kv_len


def checked_align(align: object) -> Align | None:
    """The alignment; InputError if it is another value."""
    if align is None or (isinstance(align, str) and align in ("top_left", "bottom_right")):
        return align  # type: ignore[return-value]
    hint = did_you_mean(align, ("top_left", "bottom_right"))
    raise InputError("align", 'be "top_left", "bottom_right" or None', repr(align), hint)


def checked_side(argument: str, value: int | None) -> int | None:
    """The keys of a band before or after the query's own; None if unbounded; InputError if it is another value."""
    if value is None:
        return None
    side = as_integer(argument, value)
    if side < -1:
        hint = "window(3, 0) is the query's own key and the 3 keys before it"
        raise InputError(argument, "be at least 0, or None (or -1) for an unbounded side", side, hint)
    return None if side == -1 else min(side, INT32_MAX)

"""Where queries stand on keys: whether top-left and bottom-right agree for a call, and which of them a mask means.

Alignment matters where a sequence has another number of keys than of queries. Reading that from lengths on a GPU
would wait for it, so there only structure is looked at: one tensor given for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from undivided._tensors import readable
from undivided.errors import InputError
from undivided.masks._parts import Documents, Lengths, Part

Align = Literal["top_left", "bottom_right"]


def resolve(align: Align | None, parts: Sequence[Part], q_len: int, kv_len: int, full: bool) -> str:
    """Give "both" where the two agree, else the one that was given; InputError where none was.

    Args:
        align: what the mask says.
        parts: where its lengths or documents are.
        q_len, kv_len: sizes of the call.
        full: nothing is masked, so that the alignment is ALiBi's alone.
    """
    agree = _agree(parts, q_len, kv_len)
    if agree:
        return "both"
    if align is not None:
        return align
    sizes = f"query length {q_len}, key length {kv_len}"
    hint = "write align='top_left' or align='bottom_right' in causal, window or chunks"
    if full:
        hint = "for ALiBi without a mask: masks.window(None, None, align='top_left' or 'bottom_right')"
    for part in parts:
        if isinstance(part, Lengths):
            sizes = f"lengths with q={'None' if part.q is None else 'other values than kv'} at {sizes}"
            if part.q is None:
                hint += "; for a padded self-attention batch give the queries' lengths as well: lengths(n, n)"
        elif isinstance(part, Documents):
            sizes = "documents whose cu_seqlens_q and cu_seqlens_kv are different"
    if agree is None:
        hint += "; values on a GPU are not compared, so pass one tensor for both where they are equal"
    raise InputError(
        "align",
        "be given where top-left and bottom-right differ (queries and keys of unequal length)",
        f"None for {sizes}",
        hint,
    )


def _agree(parts: Sequence[Part], q_len: int, kv_len: int) -> bool | None:
    """Whether every sequence has as many keys as queries; None where only a GPU knows."""
    for part in parts:
        if isinstance(part, Lengths | Documents):
            q, kv = (part.q, part.kv) if isinstance(part, Lengths) else (part.cu_seqlens_q, part.cu_seqlens_kv)
            if q is kv:
                return True
            if not readable(q, kv):
                return None
            return bool((kv == q_len).all()) if q is None else bool((q == kv).all())
    return q_len == kv_len

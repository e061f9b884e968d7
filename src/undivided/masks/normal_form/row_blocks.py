"""Blocks of query rows, and the keys that their ranges reach: pairs are evaluated there if a mask is not ranges."""

from __future__ import annotations

from collections.abc import Iterator

from undivided.masks.normal_form.intervals import NormalForm

MIN_ROWS = 32
"""Smallest number of query rows in a block: a panel of the widest instruction set."""

MIN_SAVED_PAIRS = 1 << 17
"""A block is halved if its halves have more than so many pairs less: each block costs some calls of a kernel."""


def row_blocks_by_reach(form: NormalForm, q_len: int, max_pairs: int) -> Iterator[slice]:
    """All query rows in blocks of at most `max_pairs` pairs of a row and a reached key, or of `MIN_ROWS` rows."""
    pending = [slice(0, q_len)]
    while pending:
        rows = pending.pop()
        count = length(rows)
        middle = rows.start + max(count // 2 // MIN_ROWS, 1) * MIN_ROWS
        if count > MIN_ROWS:
            pairs, halves = _pairs(form, rows), (slice(rows.start, middle), slice(middle, rows.stop))
            if pairs > max_pairs or pairs - sum(_pairs(form, half) for half in halves) > MIN_SAVED_PAIRS:
                pending += reversed(halves)
                continue
        yield rows


def reached_keys(form: NormalForm, rows: slice) -> slice:
    """The keys that the ranges of some rows reach, or one key if there is none."""
    start, stop = form.hull(slice(0, form.batch), rows)
    return slice(start, max(stop, min(start + 1, form.kv_len)))


def length(part: slice) -> int:
    """The number of rows or keys of a slice."""
    return int(part.stop) - int(part.start)


def _pairs(form: NormalForm, rows: slice) -> int:
    return length(rows) * length(reached_keys(form, rows))

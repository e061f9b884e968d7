"""Masks that neither ranges nor one boolean tensor express: their pairs are evaluated for blocks of query rows.

Of a block they are evaluated for the keys that the ranges of its rows reach, so that the work is proportional to the
ranges.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from undivided.masks.normal_form import NormalForm
from undivided.masks.normal_form.pairs import all_pairs
from undivided.request.problem import Problem

MASK_PAIRS = 1 << 24
"""Pairs of a block, at most, over all batch elements and heads: 16 MiB of bool."""

MIN_ROWS = 32
"""Smallest number of query rows in a block: a panel of the widest instruction set."""

MIN_SAVED_PAIRS = 1 << 17
"""A block is halved if its halves have more than so many pairs less: each block costs a call of the kernel."""


def row_blocks(form: NormalForm, problem: Problem) -> Iterator[slice]:
    """The query rows of each kernel call."""
    limit = MASK_PAIRS // max(problem.batch * problem.heads, 1)
    pending = [slice(0, problem.q_len)]
    while pending:
        rows = pending.pop()
        count = _length(rows)
        middle = rows.start + max(count // 2 // MIN_ROWS, 1) * MIN_ROWS
        if count > MIN_ROWS:
            pairs, halves = _pairs(form, rows), (slice(rows.start, middle), slice(middle, rows.stop))
            if pairs > limit or pairs - sum(_pairs(form, half) for half in halves) > MIN_SAVED_PAIRS:
                pending += reversed(halves)
                continue
        yield rows


def _pairs(form: NormalForm, rows: slice) -> int:
    keys = _keys(form, rows)
    return _length(rows) * _length(keys)


def _length(part: slice) -> int:
    return int(part.stop) - int(part.start)


def _keys(form: NormalForm, rows: slice) -> slice:
    """The keys that the ranges of some rows reach, or one key if there is none."""
    start, stop = form.hull(slice(0, form.batch), rows)
    return slice(start, max(stop, min(start + 1, form.kv_len)))


def evaluate(form: NormalForm, problem: Problem, rows: slice) -> tuple[Tensor, Tensor | None]:
    """The pairs of some rows that the extras of the mask allow, bool [B, H, rows, keys], and the first of these keys.

    The latter is repeated for each row, int32 [rows]; None if the pairs are those of all keys.
    """
    keys = _keys(form, rows)
    count, width = _length(rows), _length(keys)
    pairs = all_pairs(form.extras, slice(0, problem.batch), slice(0, problem.heads), rows, keys)
    first = None if width == problem.kv_len else torch.full((count,), keys.start, dtype=torch.int32)
    return pairs.expand(problem.batch, problem.heads, count, width), first

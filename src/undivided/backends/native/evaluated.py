"""Masks that neither ranges nor one boolean tensor express: their pairs are evaluated for blocks of query rows.

For each block they are evaluated only over the keys that the ranges of its rows reach, so that the work is proportional
to the ranges.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from undivided.masks.normal_form import NormalForm
from undivided.masks.normal_form.pairs import all_pairs
from undivided.masks.normal_form.row_blocks import length, reached_keys, row_blocks_by_reach
from undivided.request.problem import Problem

MASK_PAIRS = 1 << 24
"""Pairs of a block, at most, over all batch elements and heads: 16 MiB of bool."""


def row_blocks(form: NormalForm, problem: Problem) -> Iterator[slice]:
    """The query rows of each kernel call."""
    return row_blocks_by_reach(form, problem.q_len, MASK_PAIRS // max(problem.batch * problem.heads, 1))


def evaluate(form: NormalForm, problem: Problem, rows: slice) -> tuple[Tensor, Tensor | None]:
    """The pairs of some rows that the extras of the mask allow, bool [B, H, rows, keys], and the first of these keys.

    The latter is repeated for each row, int32 [rows]; None if the pairs are those of all keys.
    """
    keys = reached_keys(form, rows)
    count, width = length(rows), length(keys)
    pairs = all_pairs(form.extras, slice(0, problem.batch), slice(0, problem.heads), rows, keys)
    first = None if width == problem.kv_len else torch.full((count,), keys.start, dtype=torch.int32)
    return pairs.expand(problem.batch, problem.heads, count, width), first

"""Blocks of rows for which a mask is evaluated, if neither ranges nor a tensor of the caller express it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from undivided.masks import NormalForm
from undivided.masks.normal_form import DensePairs
from undivided.request.problem import Problem

MASK_PAIRS = 1 << 28
"""Pairs of a mask that ranges cannot express are evaluated in blocks of at most this many: 256 MiB of bool."""


@dataclass(frozen=True, eq=False)
class Rows:
    """A block of rows (all rows, or as many as the mask is evaluated for at once) and its dense mask [B|1, H|1, R, Sk],
    None if there is none."""

    span: slice
    dense: Tensor | None


def rows_of(problem: Problem, form: NormalForm | None, reads_tree: bool) -> Iterator[Rows]:
    """All rows at once if the mask is ranges or one dense tensor; otherwise blocks of at most MASK_PAIRS pairs.

    Args:
        problem: the problem of the call.
        form: its mask; None if every pair is allowed.
        reads_tree: the kernel reads a draft tree itself.
    """
    everything = slice(0, problem.q_len)
    if form is None or form.exact or (reads_tree and form.tree is not None):
        yield Rows(everything, None)
    elif len(form.extras) == 1 and isinstance(extra := form.extras[0], DensePairs) and form.row_index is None:
        yield Rows(everything, extra.tensor)
    else:
        step = max(MASK_PAIRS // max(problem.batch * problem.heads * problem.kv_len, 1) // 128 * 128, 128)
        for start in range(0, problem.q_len, step):
            rows = slice(start, min(start + step, problem.q_len))
            yield Rows(rows, form.allowed(slice(None), rows, slice(0, problem.kv_len), slice(None)))

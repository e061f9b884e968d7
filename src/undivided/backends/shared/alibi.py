"""The ALiBi slope of each query row, and the gradient of slopes from one number per row.

Legend: B batch, S queries, H query heads.
"""

from __future__ import annotations

from torch import Tensor

from undivided.masks import NormalForm
from undivided.request.problem import Problem


def slope_index(q_sequence: Tensor, slopes: Tensor) -> Tensor:
    """The row of slopes [sequences, H] for each query, int64, from its sequence; any row for queries of no sequence."""
    return q_sequence.clamp(0, slopes.shape[0] - 1).long()


def row_slopes(slopes: Tensor, problem: Problem, form: NormalForm) -> Tensor:
    """The slope of every row, [B, H, S]; a view if every sequence has the same slopes."""
    rows = slopes[None, :, None] if slopes.dim() == 1 else slopes[slope_index(form.q_sequence, slopes)].transpose(1, 2)
    return rows.expand(problem.batch, problem.heads, problem.q_len)


def sum_of_sequences(rows_BHS: Tensor, slopes: Tensor, form: NormalForm) -> Tensor:
    """The sum of a number per row over the rows of each sequence and head, in the shape of slopes [sequences, H]."""
    index = slope_index(form.q_sequence, slopes).expand(rows_BHS.shape[0], -1).reshape(-1)
    return rows_BHS.new_zeros(slopes.shape).index_add_(0, index, rows_BHS.transpose(1, 2).flatten(0, 1))

"""Gradients of rows whose scores are so large that their log-sum-exp does not determine the weights.

Kernels compute the weights of the backward as ``exp(score - lse)``. If a bias moves all scores of a row to -1e9 or to
the lowest number of its dtype, as models do with rows in the padding, fp32 has no digits left for the logarithm of the
sum: lse is the largest score, and n equal weights become 1 instead of 1/n. The gradients of such rows are computed by
the reference, from the scores alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from undivided.arguments import layout
from undivided.backends import reference
from undivided.backends._base import Gradients
from undivided.request.call import Call
from undivided.request.request import Tensors
from undivided.request.result import Result

LIMIT = 2.0**16
"""The largest magnitude of a log-sum-exp that kernels use: its rounding in fp32 changes weights by 2**-8 or less."""


def rows_beyond(call: Call, tensors: Tensors, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None) -> Tensor | None:
    """Rows [B, H, Sq] beyond the limit that have a gradient; None if there are none. lse is [B, H, Sq].

    Only a bias moves all scores of a row. On a GPU the query would wait for the kernels, so it is not made there. The
    log-sum-exp of a partial result is that of other keys too.
    """
    if tensors.bias is None or not lse.is_cpu or lse.dtype is torch.float64 or "partial" in call.problem.features:
        return None
    if not lse.numel():
        return None
    lowest, highest = lse.aminmax()  # a tenth of the time of what follows; NaN if there is one
    if lowest.item() >= -LIMIT and highest.item() <= LIMIT:
        return None
    rows = (lse.abs() > LIMIT) & lse.isfinite()
    if not rows.any():
        return None
    has_gradient = (layout.heads_first(grad_out, call.problem.layout) != 0).any(-1)
    if grad_lse is not None:
        has_gradient |= grad_lse != 0
    rows &= has_gradient
    return rows if rows.any() else None


def without_rows(grad: Tensor, rows: Tensor, call: Call) -> Tensor:
    """grad, in the caller's layout, with 0 in the rows [B, H, Sq]."""
    return grad.masked_fill(layout.from_heads_first(rows.unsqueeze(-1), call.problem.layout), 0.0)


def add_rows(
    gradients: Gradients,
    rows: Tensor,
    call: Call,
    tensors: Tensors,
    result: Result,
    grad_out: Tensor,
    grad_lse: Tensor | None,
) -> Gradients:
    """The gradients of the other rows plus those of the rows [B, H, Sq], which the reference computes."""
    others = ~rows
    of_rows = reference.BACKEND.backward(
        call,
        tensors,
        result,
        without_rows(grad_out, others, call),
        None if grad_lse is None else grad_lse.masked_fill(others, 0.0),
        rows,
    )
    return [_sum(a, b) for a, b in zip(gradients, of_rows, strict=True)]


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b

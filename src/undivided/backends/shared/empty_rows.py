"""Rows without keys, and tokens outside of all documents, in the results and gradients of GPU kernels.

For a row without keys, kernels write a log-sum-exp of +inf, of -inf, or nothing. The specification requires output 0
and lse = -inf.

Legend: B batch, S sequence (Sq queries, Sk keys), H query heads, D head size, T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from undivided.arguments import layout
from undivided.masks import NormalForm
from undivided.request.call import Call
from undivided.request.problem import Problem
from undivided.request.request import Tensors
from undivided.request.result import Result, lse_dtype


def has_rows_without_keys(problem: Problem) -> bool:
    """Whether a row may have no key: not under a full mask, nor under a causal mask that always allows one key."""
    if problem.mask.kinds - {"causal", "window"}:
        return True
    return (problem.align == "bottom_right" and problem.q_len > problem.kv_len) or "window" in problem.mask.kinds


def result_without_keys(problem: Problem, like: Tensor) -> Result:
    """A new result of rows without keys: out [B, Sq, H, D], contiguous in the problem's layout, and lse."""
    out = layout.empty(problem.layout, (problem.batch, problem.q_len, problem.heads, problem.v_dim), like, zero=True)
    rows = problem.batch, problem.heads, problem.q_len
    return Result(out, torch.full(rows, -torch.inf, dtype=lse_dtype(problem.dtype), device=like.device))


def fix_empty_rows(call: Call, tensors: Tensors, out_BSHD: Tensor, lse_BHS: Tensor) -> Result:
    """The result with output 0 and lse = -inf in rows without keys, whatever the kernel wrote there. In place for
    `out`. If every row has a key, an lse that nobody reads stays as it is."""
    has_empty_rows = has_rows_without_keys(call.problem)
    if has_empty_rows or call.problem.lse_is_read:
        lse_BHS = lse_BHS.masked_fill(lse_BHS == torch.inf, -torch.inf)
    if not has_empty_rows:
        return Result(out_BSHD, lse_BHS)
    return blank_rows(out_BSHD, lse_BHS, rows_without_keys(call.normal_form(tensors.q)))


def rows_without_keys(form: NormalForm) -> Tensor:
    """Rows that may attend to nothing, bool [1|B, 1|H, Sq]."""
    empty = ~form.rows_allowed
    return empty if empty.dim() == 3 else empty.unsqueeze(1)


def blank_rows(out_BSHD: Tensor, lse_BHS: Tensor, empty_BHS: Tensor) -> Result:
    """The result with output 0 and lse = -inf in these rows, bool [1|B, 1|H, Sq]. In place for `out`."""
    out_BSHD.masked_fill_(_over_rows(empty_BHS), 0.0)
    return Result(out_BSHD, lse_BHS.masked_fill(empty_BHS, -torch.inf))


def closed_rows(call: Call, tensors: Tensors) -> Tensor:
    """Rows whose bias is -inf for every key that the mask allows, bool [1|B, 1|H, Sq].

    For calls without a mask, and for masks whose ranges begin at key 0.
    """
    problem = call.problem
    assert tensors.bias is not None
    is_open = tensors.bias > -torch.inf
    first = torch.where(is_open.any(-1), is_open.to(torch.uint8).argmax(-1), problem.kv_len)
    if not problem.mask.kinds:
        return first == problem.kv_len
    return first >= call.normal_form(tensors.q).ranges[..., 1].unsqueeze(1)


def clear_rows(rows_BSHD: Tensor, form: NormalForm) -> Tensor:
    """A copy with 0 in the rows that have no key."""
    return rows_BSHD.masked_fill(_over_rows(rows_without_keys(form)), 0.0)


def clear_rows_(rows_BSHD: Tensor, form: NormalForm) -> Tensor:
    """0, in place, in the rows that have no key: kernels do not write their gradients."""
    return rows_BSHD.masked_fill_(_over_rows(rows_without_keys(form)), 0.0)


def _over_rows(marked_BHS: Tensor) -> Tensor:
    return marked_BHS.transpose(1, 2).unsqueeze(-1)


def clear_tail_(grad: Tensor, cu_seqlens: Tensor) -> Tensor:
    """0, in place, for tokens after the last document, which kernels do not write: [.., T, H, D]."""
    tail = torch.arange(grad.shape[-3], device=grad.device) >= cu_seqlens[-1]
    return grad.masked_fill_(tail[:, None, None], 0.0)

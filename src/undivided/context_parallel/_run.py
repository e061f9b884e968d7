"""One rank's attention: the schedule's forward, under autograd.

Rows are traded for heads; for every round its keys arrive, the next ones are asked for, each piece is one call of its
backend, and results are merged in fp32; rows are traded back.

Sinks are left out of the pieces and applied when all keys have been seen.

Legend: B batch, R rows of a share, H query heads, N key heads, K keys of a round, D head size; tensors are [B, S, H, D].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from undivided import _autograd, _layout
from undivided._result import Result, lse_dtype, merge
from undivided.context_parallel._backward import Backward
from undivided.context_parallel._call import Call, arrivals, operands_of, traded, within_share
from undivided.context_parallel._pieces import Piece


def run(call: Call, inputs: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
    """(out in the caller's layout, lse [B, H, Sq] or [H, T]) of this rank; inputs in the order of `differentiable`."""
    if any(call.operands.needs):
        outputs: tuple[Tensor, Tensor] = _Attention.apply(call, *inputs)  # type: ignore[no-untyped-call]
        return outputs
    with torch.no_grad():
        return _forward(call, inputs)[0]


class _Attention(torch.autograd.Function):
    """The schedule's forward and backward."""

    @staticmethod
    def forward(ctx: Any, call: Call, *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        (out, lse), kept = _forward(call, inputs)
        ctx.save_for_backward(*kept)
        ctx.call, ctx.state = call, _autograd._state(call.operands)
        ctx.shapes = [None if t is None else torch.empty_like(t, device="meta") for t in inputs]
        ctx.set_materialize_grads(False)
        if "lse" not in call.problem.features:
            ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        _autograd._check_unchanged(ctx.call.operands, ctx.state)
        return (None, *Backward(ctx.call, ctx.saved_tensors, ctx.shapes).run(grad_out, grad_lse))


def _forward(
    call: Call, inputs: Sequence[Tensor | None]
) -> tuple[tuple[Tensor, Tensor], list[Tensor | None]]:
    """((out, lse) as the caller gets them, what the backward needs: see `Backward`)."""
    schedule, problem = call.schedule, call.problem
    shares, k, v = traded(call, inputs)
    merged = [_Merged(share.q, problem.v_dim, problem.dtype) for share in shares]
    for index, round_, k_r, v_r in arrivals(call, k, v):
        for piece, (backend, part) in zip(round_.pieces, call.runs[index], strict=True):
            operands = operands_of(call, shares[piece.share], round_, piece, k_r, v_r)
            merged[piece.share].add(
                piece, within_share(call, piece), _autograd.forward(backend, part, operands)
            )
            call.ring.traffic.pairs += piece.pairs
    results = [m.finish(share.sinks, problem.dtype) for m, share in zip(merged, shares, strict=True)]
    q = inputs[0]
    assert q is not None
    batch, rows, heads, _ = _layout.sizes(q.shape, problem.layout)
    likes = [
        q.new_empty((batch, rows, heads, problem.v_dim)),
        q.new_empty((batch, rows, heads, 1), dtype=lse_dtype(problem.dtype)),
    ]
    rows_of_lse = [r.lse.transpose(1, 2).unsqueeze(-1) for r in results]
    out, lse = schedule.queries.from_shares(
        call.heads, [[r.out, lse] for r, lse in zip(results, rows_of_lse, strict=True)], likes
    )()
    lse = lse.squeeze(-1).transpose(1, 2).contiguous()  # [B, H, Sq]
    kept = [k, v, *(t for s, r in zip(shares, results, strict=True) for t in (*s, *r))]
    return (
        _layout.restore(out, problem.layout).contiguous(),
        lse.squeeze(0) if problem.packed else lse,
    ), kept


class _Merged:
    """The result of a share as its pieces come in: out [B, R, H, Dv] and lse [B, H, R], in the precision of the softmax."""

    def __init__(self, q: Tensor, v_dim: int, dtype: torch.dtype) -> None:
        batch, rows, heads, _ = q.shape
        precision = lse_dtype(dtype)
        self._out = torch.zeros((batch, rows, heads, v_dim), dtype=precision, device=q.device)
        self._lse = torch.full((batch, heads, rows), -torch.inf, dtype=precision, device=q.device)
        self._begun: set[int] = set()

    def add(self, piece: Piece, heads: slice, part: Result) -> None:
        """Merge a piece's result into the rows and heads that it is about."""
        out, lse = self._out[:, piece.rows, heads], self._lse[:, heads, piece.rows]
        if heads.start in self._begun:
            part = Result(*merge([out, part.out.to(out.dtype)], [lse, part.lse], layout="bshd"))
        self._begun.add(heads.start)
        out.copy_(part.out)
        lse.copy_(part.lse)

    def finish(self, sinks: Tensor | None, dtype: torch.dtype) -> Result:
        """With the sinks, rounded once."""
        if sinks is not None:
            self._out, _ = merge([self._out], [self._lse], sinks, layout="bshd")
        return Result(self._out.to(dtype), self._lse)

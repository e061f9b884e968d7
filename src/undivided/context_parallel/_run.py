"""One rank's attention: the schedule's forward, under autograd.

Rows are traded for heads; for every round its keys arrive, the next ones are asked for, each piece is one call of its
backend, and results are merged in fp32; rows are traded back.

Sinks are left out of the pieces and applied when all keys have been seen.

Legend: B batch, R rows of a share, H query heads, N key heads, K keys of a round, D head size; tensors are [B, S, H,
    D].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from undivided import _autograd, _layout
from undivided._result import Result, lse_dtype, merge_into, sink_factor
from undivided.context_parallel._backward import Backward
from undivided.context_parallel._call import RankCall, arrivals, piece_call, piece_tensors, traded, within_share
from undivided.context_parallel._index import count
from undivided.context_parallel._pieces import Piece
from undivided.context_parallel.strategies.all_to_all import Wanted


def run(call: RankCall, inputs: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
    """(out in the caller's layout, lse [B, H, Sq] or [H, T]) of this rank; inputs in the order of `Tensors`."""
    if any(call.whole.needs):
        outputs: tuple[Tensor, Tensor] = _Attention.apply(call, *inputs)  # type: ignore[no-untyped-call]
        return outputs
    with torch.no_grad():
        return _forward(call, inputs)[0]


class _Attention(torch.autograd.Function):
    """The schedule's forward and backward."""

    @staticmethod
    def forward(ctx: Any, call: RankCall, *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        (out, lse), kept = _forward(call, inputs)
        ctx.save_for_backward(*kept)
        ctx.call, ctx.state = call, _autograd.state(call.whole)
        ctx.shapes = [None if t is None else torch.empty_like(t, device="meta") for t in inputs]
        ctx.set_materialize_grads(False)
        if "lse" not in call.problem.features:
            ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        _autograd.check_unchanged(ctx.call.whole, ctx.state)
        return (None, *Backward(ctx.call, ctx.saved_tensors, ctx.shapes).run(grad_out, grad_lse))


def _forward(call: RankCall, inputs: Sequence[Tensor | None]) -> tuple[tuple[Tensor, Tensor], list[Tensor | None]]:
    """((out, lse) as the caller gets them, what the backward needs: see `Backward`)."""
    schedule, problem = call.schedule, call.problem
    shares, k, v = traded(call, inputs)
    merged = [_Merged(call, number, share.q) for number, share in enumerate(shares)]
    for index, round_, k_r, v_r in arrivals(call, k, v):
        for piece, (backend, part) in zip(round_.pieces, call.runs[index], strict=True):
            tensors = piece_tensors(call, shares[piece.share], round_, piece, k_r, v_r)
            merged[piece.share].add(piece, _autograd.forward(backend, piece_call(call, piece, part), tensors))
            call.ring.traffic.pairs += piece.pairs
            del tensors
        del k_r, v_r
    results = [merged.pop(0).finish(share.sinks) for share in shares]
    q = inputs[0]
    assert q is not None
    batch, rows, heads, _ = _layout.sizes(q.shape, problem.layout)
    wanted = [
        Wanted((batch, rows, heads, problem.v_dim), problem.dtype, q.device, problem.layout),
        Wanted((batch, rows, heads, 1), lse_dtype(problem.dtype), q.device, "bhsd"),
    ]
    of_shares = [[r.out, r.lse.transpose(1, 2).unsqueeze(-1)] for r in results]
    out, lse = schedule.queries.from_shares(call.heads, of_shares, wanted)()
    lse = lse.squeeze(-1).transpose(1, 2).contiguous()  # [B, H, Sq]
    kept = [k, v, *(t for s, r in zip(shares, results, strict=True) for t in (*s, *r))]
    return (_layout.restore(out, problem.layout).contiguous(), lse.squeeze(0) if problem.packed else lse), kept


class _Merged:
    """The result of a share as its pieces come in: out [B, R, H, Dv] and lse [B, H, R].

    A share that is one piece has that piece's result. Where no head has two, they are put beside one another in the
    dtype of the inputs; else they are added up in the precision of the softmax.
    """

    def __init__(self, call: RankCall, number: int, q: Tensor) -> None:
        self._call, self._number, self._q = call, number, q
        pieces = [p for round_ in call.schedule.rounds for p in round_.pieces if p.share == number]
        heads = {piece.heads.start for piece in pieces}
        self._alone = len(pieces) == 1 and (count(pieces[0].heads), count(pieces[0].rows)) == q.shape[2:0:-1]
        self._several = len(heads) < len(pieces)
        self._begun: set[int] = set()
        self._total: Result | None = None

    def add(self, piece: Piece, part: Result) -> None:
        """Merge a piece's result into the rows and heads that it is about."""
        if self._alone:
            self._total = part
            return
        heads, (out, lse) = within_share(self._call, piece), self._result()
        mine = Result(out[:, piece.rows, heads], lse[:, heads, piece.rows])
        if heads.start in self._begun:
            merge_into(mine, part)
        else:
            self._begun.add(heads.start)
            mine.out.copy_(part.out)
            mine.lse.copy_(part.lse)

    def _result(self) -> Result:
        """What there is so far: at first, rows without keys."""
        if self._total is None:
            batch, rows, heads, _ = self._q.shape
            problem, precision = self._call.problem, lse_dtype(self._call.problem.dtype)
            layout = problem.layout if self._call.heads.world == 1 else "bshd"
            like = self._q.new_empty(0, dtype=precision if self._several else problem.dtype)
            out = _layout.empty(layout, (batch, rows, heads, problem.v_dim), like, zero=True)
            self._total = Result(out, self._q.new_full((batch, heads, rows), -torch.inf, dtype=precision))
        return self._total

    def finish(self, sinks: Tensor | None) -> Result:
        """With the sinks, rounded once."""
        out, lse = self._result()
        if sinks is not None:
            out.mul_(sink_factor(lse, sinks).transpose(1, 2).unsqueeze(-1))
        return Result(out.to(self._call.problem.dtype), lse)

"""One rank's attention: the forward pass of its schedule, under autograd.

1. All-to-all: rows are exchanged for heads.
2. For every round: its keys arrive, the exchange of the next round is posted, each piece is one backend call, and the
   results are merged in fp32.
3. All-to-all: rows return to their owners.

The pieces run without sinks, which are applied once, after the last round.

Legend: B batch, R rows of a share, H query heads, N key heads, K keys of a round, D head size; tensors are
[B, S, H, D].
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from undivided.arguments import layout as _layout
from undivided.context_parallel._backward import Backward
from undivided.context_parallel._call import RankCall, arrivals, piece_call, piece_tensors, to_shares
from undivided.context_parallel._index import count, within
from undivided.context_parallel._pieces import Piece
from undivided.context_parallel.exchange.profiles import profiled_round
from undivided.context_parallel.strategies.all_to_all import TensorSpec
from undivided.errors import InputError
from undivided.request.result import Result, lse_dtype, merge_into, sink_factor
from undivided.run import autograd
from undivided.run.batches import map_hidden_batch
from undivided.run.flop_counter import counted_attention


def run(call: RankCall, inputs: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
    """(out in the caller's layout, lse [B, H, Sq] or [H, T]) of this rank.

    inputs: (q, k, v, bias, sinks, slopes), in the order of `Tensors`.
    """
    if any(call.whole.needs):
        outputs: tuple[Tensor, Tensor] = _Attention.apply(call, *inputs)  # type: ignore[no-untyped-call]
        return outputs
    with torch.no_grad():
        return _forward(call, inputs)[0]


class _Attention(torch.autograd.Function):
    """Forward and backward of the schedule."""

    @staticmethod
    def forward(ctx: Any, call: RankCall, *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        (out, lse), saved = _forward(call, inputs)
        ctx.save_for_backward(*saved)
        ctx.prepared = call, autograd.unsaved_state(call.whole)
        ctx.shapes = [None if t is None else torch.empty_like(t, device="meta") for t in inputs]
        ctx.set_materialize_grads(False)
        if "lse" not in call.problem.features:
            ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            hint = "attention without context_parallel has second derivatives"
            must = "be False under context parallelism, whose gradients have no derivative"
            raise InputError("create_graph", must, True, hint=hint)
        saved = ctx.saved_tensors  # raises PyTorch's error if the graph was freed
        call, before = ctx.prepared
        autograd.check_unchanged(call.whole, before)

        def gradients(*upstream: Tensor | None) -> Sequence[Tensor | None]:
            with _counted(call, ctx.shapes[0], is_backward=True):
                return Backward(call, saved, ctx.shapes).run(*upstream)

        found = map_hidden_batch(gradients, grad_out, grad_lse)
        autograd.free_prepared(ctx)
        return (None, *found)


def _counted(call: RankCall, q: Tensor, is_backward: bool = False) -> AbstractContextManager[None]:
    """A context that PyTorch's FLOP counters count as this rank's queries with the keys of all ranks, whatever the
    mask."""
    batch, rows, heads, _ = _layout.sizes(q.shape, call.problem.layout)
    return counted_attention(call.problem, batch * heads * rows * call.problem.kv_len, is_backward=is_backward)


def _forward(call: RankCall, inputs: Sequence[Tensor | None]) -> tuple[tuple[Tensor, Tensor], list[Tensor | None]]:
    """((out, lse) as the caller gets them, the tensors that `Backward` needs)."""
    q = inputs[0]
    assert q is not None
    with _counted(call, q):
        return _run_schedule(call, q, inputs)


def _run_schedule(
    call: RankCall, q: Tensor, inputs: Sequence[Tensor | None]
) -> tuple[tuple[Tensor, Tensor], list[Tensor | None]]:
    """`_forward`. q: the first of the inputs."""
    schedule, problem = call.schedule, call.problem
    shares, k, v = to_shares(call, inputs)
    share_results = [_ShareResult(call, number, share.q) for number, share in enumerate(shares)]
    for index, round_, k_r, v_r in arrivals(call, k, v):
        for piece, (backend, piece_problem) in zip(round_.pieces, call.backends[index], strict=True):
            tensors = piece_tensors(call, shares[piece.share], round_, piece, k_r, v_r)
            with profiled_round("attend", index):
                own_call = piece_call(call, piece, piece_problem)
                share_results[piece.share].add(piece, autograd.forward(backend, own_call, tensors))
            call.ring_axis.traffic.pairs += piece.pairs
            del tensors
        del k_r, v_r
    results = [share_results.pop(0).finish(share.sinks) for share in shares]
    batch, rows, heads, _ = _layout.sizes(q.shape, problem.layout)
    outputs = [
        TensorSpec((batch, rows, heads, problem.v_dim), problem.dtype, q.device, problem.layout),
        TensorSpec((batch, rows, heads, 1), lse_dtype(problem.dtype), q.device, "bhsd"),
    ]
    share_outputs = [[r.out, r.lse.transpose(1, 2).unsqueeze(-1)] for r in results]
    out, lse = schedule.queries.from_shares(call.heads_axis, share_outputs, outputs)()
    lse = lse.squeeze(-1).transpose(1, 2).contiguous()  # [B, H, Sq]
    saved = [k, v, *(t for s, r in zip(shares, results, strict=True) for t in (*s, *r))]
    return (_layout.from_canonical(out, problem.layout).contiguous(), lse.squeeze(0) if problem.packed else lse), saved


class _ShareResult:
    """The result of a share, accumulated piece by piece: out [B, R, H, Dv] and lse [B, H, R].

    A share of a single piece uses that piece's result directly. If no head has two pieces, results are written side by
    side in the dtype of the inputs; otherwise they are merged in the precision of the softmax.
    """

    def __init__(self, call: RankCall, number: int, q: Tensor) -> None:
        self._call, self._heads, self._q = call, call.schedule.shares[number].heads, q
        pieces = [p for round_ in call.schedule.rounds for p in round_.pieces if p.share == number]
        heads = {piece.heads.start for piece in pieces}
        self._is_one_piece = len(pieces) == 1 and (count(pieces[0].heads), count(pieces[0].rows)) == q.shape[2:0:-1]
        self._merges = len(heads) < len(pieces)
        self._written_heads: set[int] = set()
        self._total: Result | None = None

    def add(self, piece: Piece, partial: Result) -> None:
        """Merge the result of a piece into its rows and heads."""
        if self._is_one_piece:
            self._total = partial
            return
        heads, (out, lse) = within(piece.heads, self._heads), self._result()
        target = Result(out[:, piece.rows, heads], lse[:, heads, piece.rows])
        if heads.start in self._written_heads:
            merge_into(target, partial)
        else:
            self._written_heads.add(heads.start)
            target.out.copy_(partial.out)
            target.lse.copy_(partial.lse)

    def _result(self) -> Result:
        """The result so far; before the first piece, that of rows without keys."""
        if self._total is None:
            batch, rows, heads, _ = self._q.shape
            problem, precision = self._call.problem, lse_dtype(self._call.problem.dtype)
            layout = problem.layout if self._call.heads_axis.world == 1 else "bshd"
            like = self._q.new_empty(0, dtype=precision if self._merges else problem.dtype)
            out = _layout.empty(layout, (batch, rows, heads, problem.v_dim), like, zero=True)
            self._total = Result(out, self._q.new_full((batch, heads, rows), -torch.inf, dtype=precision))
        return self._total

    def finish(self, sinks: Tensor | None) -> Result:
        """The result with the sinks applied, rounded once to the dtype of the inputs."""
        out, lse = self._result()
        if sinks is not None:
            out.mul_(sink_factor(lse, sinks).transpose(1, 2).unsqueeze(-1))
        return Result(out.to(self._call.problem.dtype), lse)

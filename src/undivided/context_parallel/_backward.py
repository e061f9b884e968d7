"""The gradients of one rank's call.

The same rounds as in the forward. A piece's gradients follow from the whole's out and lse (feature "partial"), so that
no partial result is kept; gradients of keys return to the ranks that hold them while the next round is computed.

Sinks only move the normaliser: weights are exp(score - lse'), where lse' = log(exp(lse) + exp(sink)).

Legend: B batch, R rows of a share, H query heads, N key heads, K keys of a round, D head size; tensors are [B, S, H,
    D].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from undivided import _autograd, _layout
from undivided._layout import Layout
from undivided._result import Result, lse_dtype
from undivided.context_parallel._call import (
    RankCall,
    Run,
    ShareTensors,
    arrivals,
    heads_of,
    piece_call,
    piece_tensors,
    within_share,
)
from undivided.context_parallel._index import Index, add, count, is_on_its_own, on_its_own, take, unless_broadcast
from undivided.context_parallel._pieces import Piece, Round
from undivided.context_parallel.exchange.collectives import Wait
from undivided.context_parallel.strategies.all_to_all import Wanted


class Backward:
    """From what the forward kept: k, v, then of every share (q, bias, slopes, sinks, out, lse)."""

    def __init__(self, call: RankCall, kept: Sequence[Tensor | None], shapes: Sequence[Tensor | None]) -> None:
        self.call, self.shapes = call, shapes
        k, v, *rest = kept
        assert k is not None and v is not None
        self.k, self.v = k, v
        step = len(ShareTensors._fields) + 2
        parts = [rest[n : n + step] for n in range(0, len(rest), step)]
        self.shares = [ShareTensors(*part[:-2]) for part in parts]  # type: ignore[arg-type]
        self.results = [Result(*part[-2:]) for part in parts]  # type: ignore[arg-type]
        self.precision = lse_dtype(call.problem.dtype)
        needs = call.whole.needs
        rounds = call.schedule.rounds
        pieces = [piece.share for round_ in rounds for piece in round_.pieces]
        alone = len(pieces) == 1 and not any(round_.sends for round_ in rounds)
        self.dk, self.dv = (Total(t, alone) if needed else None for t, needed in ((k, needs[1]), (v, needs[2])))
        self.dq = [Total(share.q, pieces.count(n) == 1) if needs[0] else None for n, share in enumerate(self.shares)]
        self.dbias = [self._zeros(share.bias) if needs[3] else None for share in self.shares]
        self.dsinks, self.dslopes = (
            torch.zeros(t.shape, dtype=self.precision, device=k.device) if t is not None and needed else None
            for t, needed in zip(shapes[4:], needs[4:], strict=True)
        )

    def _zeros(self, tensor: Tensor | None) -> Tensor:
        assert tensor is not None
        return torch.zeros(tensor.shape, dtype=self.precision, device=tensor.device)

    def run(self, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients in the order of `Tensors`."""
        if grad_out is None and grad_lse is None:
            return (None,) * len(self.shapes)
        upstream = self._upstream(grad_out, grad_lse)
        returning: Wait = lambda: None  # noqa: E731
        for index, round_, k_r, v_r in arrivals(self.call, self.k, self.v):
            one = len(round_.pieces) == 1
            found = [None if total is None else Total(t, one) for total, t in ((self.dk, k_r), (self.dv, v_r))]
            for piece, run in zip(round_.pieces, self.call.runs[index], strict=True):
                self._piece(round_, piece, run, (k_r, v_r), found, upstream[piece.share])
            del k_r, v_r
            returning()
            returning = self._give_back(round_, *found)
            found.clear()
        returning()
        upstream.clear()
        return self._finish()

    def _upstream(self, grad_out: Tensor | None, grad_lse: Tensor | None) -> list[tuple[Tensor, Result, Tensor | None]]:
        """Of every share: grad_out, (out, lse') that its weights follow from, and the gradient of lse'."""
        problem, q = self.call.problem, self.shapes[0]
        assert q is not None
        if grad_out is None:
            grad_out = torch.zeros((*q.shape[:-1], problem.v_dim), dtype=q.dtype, device=self.k.device)
        grads = [_layout.canonical(grad_out, problem.layout)]
        if grad_lse is not None:
            grad_lse = grad_lse.unsqueeze(0) if problem.packed else grad_lse
            grads.append(grad_lse.transpose(1, 2).unsqueeze(-1))
        found = []
        traded = self.call.schedule.queries.to_shares(self.call.heads, grads)()
        for number, (share, result, (grad, *more)) in enumerate(zip(self.shares, self.results, traded, strict=True)):
            for_lse = more[0].squeeze(-1).transpose(1, 2) if more else None
            if share.sinks is not None:
                result, for_lse = self._with_sinks(number, share.sinks, result, grad, for_lse)
            found.append((grad, result, for_lse))
        return found

    def _with_sinks(
        self, number: int, sinks: Tensor, result: Result, grad: Tensor, for_lse: Tensor | None
    ) -> tuple[Result, Tensor | None]:
        """(out, lse with the sinks in it), and the gradient of that lse; the sinks' own gradient is added up on the
        way."""
        sink, empty = sinks.to(result.lse.dtype)[:, None], result.lse == -torch.inf
        lse = torch.logaddexp(result.lse, sink).masked_fill(empty, -torch.inf)
        if self.dsinks is not None:
            along = (grad.to(self.precision) * result.out.to(self.precision)).sum(-1).transpose(1, 2)
            share_of_sink = torch.exp(sink - lse)
            lost = (along * share_of_sink).masked_fill(empty, 0.0)
            self.dsinks[self.call.schedule.shares[number].heads] -= lost.sum((0, 2))
        if for_lse is not None:
            for_lse = (for_lse * torch.exp(lse - result.lse)).masked_fill(empty, 0.0)
        return Result(result.out, lse), for_lse

    def _piece(
        self,
        round_: Round,
        piece: Piece,
        run: Run,
        keys: tuple[Tensor, Tensor],
        totals: Sequence[Total | None],
        upstream: tuple[Tensor, Result, Tensor | None],
    ) -> None:
        """One backward call of a backend, its gradients added where they belong."""
        backend, problem = run
        share, heads = self.shares[piece.share], within_share(self.call, piece)
        tensors = piece_tensors(self.call, share, round_, piece, *keys)
        grad, (out, lse), for_lse = upstream
        found = _autograd.backward(
            backend,
            piece_call(self.call, piece, problem),
            tensors,
            Result(out[:, piece.rows, heads], lse[:, heads, piece.rows]),
            grad[:, piece.rows, heads],
            None if for_lse is None else for_lse[:, heads, piece.rows],
        )
        dq, dk, dv, dbias, _, dslopes = found
        kv_heads = slice(piece.kv_heads.start - round_.kv_heads.start, piece.kv_heads.stop - round_.kv_heads.start)
        for sum_, part, rows, some in (
            (self.dq[piece.share], dq, piece.rows, heads),
            (totals[0], dk, piece.keys, kv_heads),
            (totals[1], dv, piece.keys, kv_heads),
        ):
            if sum_ is not None and part is not None:
                sum_.add(part, rows, some)
        if (total := self.dbias[piece.share]) is not None and dbias is not None:
            total = unless_broadcast(unless_broadcast(total, 1, heads), 2, piece.rows)
            add(total, 3, slice(0, 1) if total.shape[3] == 1 else piece.key_index, dbias)
        if self.dslopes is not None and dslopes is not None:
            self.dslopes[..., piece.heads] += dslopes

    def _give_back(self, round_: Round, dk_r: Total | None, dv_r: Total | None) -> Wait:
        """Send gradients of keys to the ranks that hold them; the result waits for what others found for this
        rank's."""
        heads = heads_of(self.call, round_)
        both = [(of, to) for of, to in ((dk_r, self.dk), (dv_r, self.dv)) if of is not None and to is not None]
        own, *theirs = round_.where if round_.own is not None else (slice(0, 0), *round_.where)
        dtype = self.call.problem.dtype
        arriving = {peer: [to.part(count(index), heads, dtype) for _, to in both] for peer, index in round_.sends}
        leaving = {
            peer: [on_its_own(take(of.so_far(), 1, where).to(dtype)) for of, _ in both]
            for (peer, _), where in zip(round_.receives, theirs, strict=True)
        }
        wait = self.call.ring.exchange(leaving, arriving)
        if round_.own is not None and round_.pieces:
            for of, to in both:
                to.add(take(of.so_far(), 1, own), round_.own, heads)
        totals = [to for _, to in both]

        def arrived() -> None:
            wait()
            for peer, index in round_.sends:
                for total in totals:
                    total.add(arriving[peer].pop(0), index, heads)

        return arrived

    def _finish(self) -> tuple[Tensor | None, ...]:
        """Trade back, and round once to the dtypes of the inputs."""
        problem, schedule, heads = self.call.problem, self.call.schedule, self.call.heads
        needs, layout = self.call.whole.needs, problem.layout
        q, k, v, bias = (
            None if t is None or not needed else t for t, needed in zip(self.shapes, needs[:4], strict=False)
        )
        of_rows = [] if q is None else [self._wanted(_layout.canonical(q, layout), layout)]
        by_row = bias is not None and self.call.by_row
        if by_row and bias is not None:
            of_rows.append(self._wanted(bias.transpose(1, 2), "bhsd"))
        of_keys = [self._wanted(_layout.canonical(t, layout), layout) for t in (k, v) if t is not None]
        shares = [
            [total.taken() for total in [self.dq[n]] if total is not None]
            + [t.transpose(1, 2) for t in [self.dbias[n]] if t is not None and by_row]
            for n in range(len(self.shares))
        ]
        of_kv = [total.taken() for total in (self.dk, self.dv) if total is not None]
        row_grads = schedule.queries.from_shares(heads, shares, of_rows)
        key_grads = schedule.keys.from_shares(heads, [of_kv], of_keys)
        found, of_k = row_grads(), key_grads()
        dq = None if q is None else _layout.restore(found[0], layout)
        dk, dv = (None if t is None else _layout.restore(of_k.pop(0), layout) for t in (k, v))
        dbias = found[-1].transpose(1, 2) if by_row else self._broadcast_bias()
        return dq, dk, dv, dbias, *map(_rounded, (self.dsinks, self.dslopes), self.shapes[4:])

    def _wanted(self, like: Tensor, layout: Layout) -> Wanted:
        batch, rows, heads, size = like.shape
        return Wanted((batch, rows, heads, size), like.dtype, self.k.device, layout)

    def _broadcast_bias(self) -> Tensor | None:
        """The gradient of a bias without rows of its own: this rank's share of it."""
        of_bias = self.shapes[3]
        if of_bias is None or not self.call.whole.needs[3]:
            return None
        total = torch.zeros(of_bias.shape, dtype=self.precision, device=self.k.device)
        for share, part in zip(self.call.schedule.shares, self.dbias, strict=True):
            unless_broadcast(total, 1, share.heads).add_(part)  # type: ignore[arg-type]
        return total.to(of_bias.dtype)


class Total:
    """A sum of gradients [B, S, H, X], in the precision of the softmax.

    A first part that is all of it is taken as it is, unless others follow that it is not wide enough for.
    """

    def __init__(self, like: Tensor, alone: bool) -> None:
        self._shape, self._like, self._alone = like.shape, like.new_empty(0), alone
        self._sum: Tensor | None = None

    def add(self, part: Tensor, rows: Index, heads: slice) -> None:
        """Add a part for these rows and heads."""
        wide_enough = self._alone or part.dtype == lse_dtype(part.dtype)
        if self._sum is None and part.shape == self._shape and wide_enough and is_on_its_own(part):
            self._sum = part
            return
        self._sum = self.so_far()
        add(self._sum[:, :, heads], 1, rows, part)

    def part(self, rows: int, heads: slice, dtype: torch.dtype) -> Tensor:
        """A buffer for a part of that many rows."""
        batch, _, _, size = self._shape
        return self._like.new_empty((batch, rows, heads.stop - heads.start, size), dtype=dtype)

    def so_far(self) -> Tensor:
        """The sum; zeros where nothing has been added."""
        if self._sum is None:
            return self._like.new_zeros(self._shape, dtype=lse_dtype(self._like.dtype))
        return self._sum

    def taken(self) -> Tensor:
        """The sum, which is no longer held here."""
        total, self._sum = self.so_far(), None
        return total


def _rounded(total: Tensor | None, like: Tensor | None) -> Tensor | None:
    return None if total is None or like is None else total.to(like.dtype)

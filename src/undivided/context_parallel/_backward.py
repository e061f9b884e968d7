"""The gradients of one rank's call.

The same rounds as in the forward. A piece's gradients follow from the whole's out and lse (feature "partial"), so that no
partial result is kept; gradients of keys return to the ranks that hold them while the next round is computed.

Sinks only move the normaliser: weights are exp(score - lse'), where lse' = log(exp(lse) + exp(sink)).

Legend: B batch, R rows of a share, H query heads, N key heads, K keys of a round, D head size; tensors are [B, S, H, D].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from undivided import _autograd, _layout
from undivided._result import Result, lse_dtype
from undivided.context_parallel._call import (
    Call,
    Run,
    ShareTensors,
    arrivals,
    heads_of,
    operands_of,
    within_share,
)
from undivided.context_parallel._index import add, count, unless_broadcast
from undivided.context_parallel._pieces import Piece, Round
from undivided.context_parallel.collectives import Wait


class Backward:
    """From what the forward kept: k, v, then of every share (q, bias, slopes, sinks, out, lse)."""

    def __init__(self, call: Call, kept: Sequence[Tensor | None], shapes: Sequence[Tensor | None]) -> None:
        self.call, self.shapes = call, shapes
        k, v, *rest = kept
        assert k is not None and v is not None
        self.k, self.v = k, v
        step = len(ShareTensors._fields) + 2
        parts = [rest[n : n + step] for n in range(0, len(rest), step)]
        self.shares = [ShareTensors(*part[:-2]) for part in parts]  # type: ignore[arg-type]
        self.results = [Result(*part[-2:]) for part in parts]  # type: ignore[arg-type]
        self.precision = lse_dtype(call.problem.dtype)
        needs = call.operands.needs
        self.dk, self.dv = (
            self._zeros(t) if needed else None for t, needed in ((k, needs[1]), (v, needs[2]))
        )
        self.dq = [self._zeros(share.q) if needs[0] else None for share in self.shares]
        self.dbias = [self._zeros(share.bias) if needs[3] else None for share in self.shares]
        self.dsinks, self.dslopes = (
            torch.zeros(t.shape, dtype=self.precision, device=k.device) if t is not None and needed else None
            for t, needed in zip(shapes[4:], needs[4:], strict=True)
        )

    def _zeros(self, tensor: Tensor | None) -> Tensor:
        assert tensor is not None
        return torch.zeros(tensor.shape, dtype=self.precision, device=tensor.device)

    def run(self, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients in the order of `Operands.differentiable`."""
        if grad_out is None and grad_lse is None:
            return (None,) * len(self.shapes)
        upstream = self._upstream(grad_out, grad_lse)
        returning: Wait = lambda: None  # noqa: E731
        for index, round_, k_r, v_r in arrivals(self.call, self.k, self.v):
            dk_r, dv_r = (
                None if total is None else self._zeros(t) for total, t in ((self.dk, k_r), (self.dv, v_r))
            )
            for piece, run in zip(round_.pieces, self.call.runs[index], strict=True):
                self._piece(round_, piece, run, (k_r, v_r), (dk_r, dv_r), upstream[piece.share])
            returning()
            returning = self._give_back(round_, dk_r, dv_r)
        returning()
        return self._finish()

    def _upstream(
        self, grad_out: Tensor | None, grad_lse: Tensor | None
    ) -> list[tuple[Tensor, Result, Tensor | None]]:
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
        for number, (share, result, (grad, *more)) in enumerate(
            zip(self.shares, self.results, traded, strict=True)
        ):
            for_lse = more[0].squeeze(-1).transpose(1, 2) if more else None
            if share.sinks is not None:
                result, for_lse = self._with_sinks(number, share.sinks, result, grad, for_lse)
            found.append((grad, result, for_lse))
        return found

    def _with_sinks(
        self, number: int, sinks: Tensor, result: Result, grad: Tensor, for_lse: Tensor | None
    ) -> tuple[Result, Tensor | None]:
        """(out, lse with the sinks in it), and the gradient of that lse; the sinks' own gradient is added up on the way."""
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
        self, round_: Round, piece: Piece, run: Run, keys: tuple[Tensor, Tensor],
        totals: tuple[Tensor | None, Tensor | None], upstream: tuple[Tensor, Result, Tensor | None],
    ) -> None:  # fmt: skip
        """One backward call of a backend, its gradients added where they belong."""
        backend, problem = run
        share, heads = self.shares[piece.share], within_share(self.call, piece)
        operands = operands_of(self.call, share, round_, piece, *keys)
        grad, (out, lse), for_lse = upstream
        found = _autograd.backward(
            backend, problem, operands, Result(out[:, piece.rows, heads], lse[:, heads, piece.rows]),
            grad[:, piece.rows, heads], None if for_lse is None else for_lse[:, heads, piece.rows],
        )  # fmt: skip
        dq, dk, dv, dbias, _, dslopes = found
        if (total := self.dq[piece.share]) is not None and dq is not None:
            total[:, piece.rows, heads] += dq
        kv_heads = slice(
            piece.kv_heads.start - round_.kv_heads.start, piece.kv_heads.stop - round_.kv_heads.start
        )
        for total, part in zip(totals, (dk, dv), strict=True):
            if total is not None and part is not None:
                total[:, piece.keys, kv_heads] += part
        if (total := self.dbias[piece.share]) is not None and dbias is not None:
            total = unless_broadcast(unless_broadcast(total, 1, heads), 2, piece.rows)
            add(total, 3, slice(0, 1) if total.shape[3] == 1 else piece.key_index, dbias)
        if self.dslopes is not None and dslopes is not None:
            self.dslopes[..., piece.heads] += dslopes

    def _give_back(self, round_: Round, dk_r: Tensor | None, dv_r: Tensor | None) -> Wait:
        """Send gradients of keys to the ranks that hold them; the result waits for what others found for this rank's."""
        heads = heads_of(self.call, round_)
        both = ((dk_r, self.dk), (dv_r, self.dv))
        pairs = [(part, total[:, :, heads]) for part, total in both if part is not None and total is not None]
        sizes = [0 if round_.own is None else count(round_.own), *(n for _, n in round_.receives)]
        split = [_as_arrived(part, round_.order).split(sizes, 1) for part, _ in pairs]
        dtype = self.call.problem.dtype
        arriving = {
            peer: [
                total.new_empty((total.shape[0], count(index), *total.shape[2:]), dtype=dtype)
                for _, total in pairs
            ]
            for peer, index in round_.sends
        }
        wait = self.call.ring.exchange(
            {peer: [parts[n + 1].to(dtype).contiguous() for parts in split] for n, (peer, _) in enumerate(round_.receives)},
            arriving,
        )  # fmt: skip
        if round_.own is not None:
            for (_, total), parts in zip(pairs, split, strict=True):
                add(total, 1, round_.own, parts[0])

        def arrived() -> None:
            wait()
            for peer, index in round_.sends:
                for (_, total), part in zip(pairs, arriving[peer], strict=True):
                    add(total, 1, index, part)

        return arrived

    def _finish(self) -> tuple[Tensor | None, ...]:
        """Trade back, and round once to the dtypes of the inputs."""
        layout, schedule, heads = self.call.problem.layout, self.call.schedule, self.call.heads
        needs, (q, k, v, bias, *_) = self.call.operands.needs, self.shapes
        rows, keys = [], []
        if q is not None and needs[0]:
            rows.append((self.dq, self._like(_layout.canonical(q, layout))))
        by_row = bias is not None and needs[3] and self.call.by_row
        if by_row and bias is not None:
            rows.append(
                (
                    [None if t is None else t.transpose(1, 2) for t in self.dbias],
                    self._like(bias.transpose(1, 2)),
                )
            )
        for total, like in ((self.dk, k), (self.dv, v)):
            if total is not None and like is not None:
                keys.append((total, self._like(_layout.canonical(like, layout))))
        shares = [[totals[n] for totals, _ in rows] for n in range(len(self.shares))]
        of_rows = schedule.queries.from_shares(heads, shares, [like for _, like in rows])  # type: ignore[arg-type]
        of_keys = schedule.keys.from_shares(heads, [[total for total, _ in keys]], [like for _, like in keys])
        row_grads, key_grads = of_rows(), iter(of_keys())
        dq = _layout.restore(row_grads[0], layout) if needs[0] else None
        dk, dv = (
            None if total is None else _layout.restore(next(key_grads), layout)
            for total in (self.dk, self.dv)
        )
        dbias = row_grads[-1].transpose(1, 2) if by_row else self._broadcast_bias()
        return dq, dk, dv, dbias, *map(_rounded, (self.dsinks, self.dslopes), self.shapes[4:])

    def _like(self, shape: Tensor) -> Tensor:
        return torch.empty(shape.shape, dtype=shape.dtype, device=self.k.device)

    def _broadcast_bias(self) -> Tensor | None:
        """The gradient of a bias without rows of its own: this rank's share of it."""
        of_bias = self.shapes[3]
        if of_bias is None or not self.call.operands.needs[3]:
            return None
        total = torch.zeros(of_bias.shape, dtype=self.precision, device=self.k.device)
        for share, part in zip(self.call.schedule.shares, self.dbias, strict=True):
            unless_broadcast(total, 1, share.heads).add_(part)  # type: ignore[arg-type]
        return total.to(of_bias.dtype)


def _as_arrived(tensor: Tensor, order: Tensor | None) -> Tensor:
    """Keys in ascending order as they came: own, then each peer's."""
    return tensor if order is None else torch.empty_like(tensor).index_copy_(1, order, tensor)


def _rounded(total: Tensor | None, like: Tensor | None) -> Tensor | None:
    return None if total is None or like is None else total.to(like.dtype)

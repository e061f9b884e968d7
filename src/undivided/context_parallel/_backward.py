"""The gradients of one rank's call.

The rounds are those of the forward pass. The gradients of a piece follow from the final out and lse (feature
"partial"), so no partial result is saved. Gradients of keys return to the ranks that own the keys while the next round
is computed.

Sinks only change the normaliser: weights are exp(score - lse'), with lse' = log(exp(lse) + exp(sink)).

Legend: B batch, R rows of a share, H query heads, N key heads, K keys of a round, D head size; tensors are
[B, S, H, D].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from undivided.arguments import layout as _layout
from undivided.arguments.layout import Layout
from undivided.context_parallel._call import PieceBackend, RankCall, ShareTensors, arrivals, piece_call, piece_tensors
from undivided.context_parallel._index import (
    Index,
    add,
    count,
    owns_storage,
    take,
    take_unless_broadcast,
    with_own_storage,
    within,
)
from undivided.context_parallel._pieces import Piece, Round
from undivided.context_parallel.exchange.collectives import Wait
from undivided.context_parallel.exchange.profiles import profiled_round
from undivided.context_parallel.strategies.all_to_all import TensorSpec
from undivided.request.result import Result, lse_dtype
from undivided.run import autograd


class Backward:
    """The backward pass of one call.

    saved: k, v, then (q, bias, slopes, sinks, out, lse) of every share. shapes: the inputs as tensors without contents.
    """

    def __init__(self, call: RankCall, saved: Sequence[Tensor | None], shapes: Sequence[Tensor | None]) -> None:
        self.call, self.shapes = call, shapes
        k, v, *rest = saved
        assert k is not None and v is not None
        self.k, self.v = k, v
        step = len(ShareTensors._fields) + 2
        shares = [rest[n : n + step] for n in range(0, len(rest), step)]
        self.shares = [ShareTensors(*share[:-2]) for share in shares]  # type: ignore[arg-type]
        self.results = [Result(*share[-2:]) for share in shares]  # type: ignore[arg-type]
        self.precision = lse_dtype(call.problem.dtype)
        needs = call.whole.needs
        rounds = call.schedule.rounds
        piece_shares = [piece.share for round_ in rounds for piece in round_.pieces]
        is_only = len(piece_shares) == 1 and not any(round_.sends for round_ in rounds)
        self.dk, self.dv = (GradientSum(t, is_only) if needed else None for t, needed in ((k, needs[1]), (v, needs[2])))
        self.dq = [
            GradientSum(share.q, piece_shares.count(n) == 1) if needs[0] else None
            for n, share in enumerate(self.shares)
        ]
        self.dbias = [self._zeros(share.bias) if needs[3] else None for share in self.shares]
        self.dsinks, self.dslopes = (
            torch.zeros(t.shape, dtype=self.precision, device=k.device) if t is not None and needed else None
            for t, needed in zip(shapes[4:], needs[4:], strict=True)
        )

    def _zeros(self, tensor: Tensor | None) -> Tensor:
        assert tensor is not None
        return torch.zeros(tensor.shape, dtype=self.precision, device=tensor.device)

    def run(self, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients, in the order of `Tensors`."""
        if grad_out is None and grad_lse is None:
            return (None,) * len(self.shapes)
        upstream = self._upstream(grad_out, grad_lse)
        wait: Wait = lambda: None  # noqa: E731
        for index, round_, k_r, v_r in arrivals(self.call, self.k, self.v):
            is_only = len(round_.pieces) == 1
            sums = [None if total is None else GradientSum(t, is_only) for total, t in ((self.dk, k_r), (self.dv, v_r))]
            for piece, backend in zip(round_.pieces, self.call.backends[index], strict=True):
                with profiled_round("gradients", index):
                    self._add_piece(round_, piece, backend, (k_r, v_r), sums, upstream[piece.share])
            del k_r, v_r
            if index:
                with profiled_round("wait for key gradients", index - 1):
                    wait()
            wait = self._return_key_gradients(round_, *sums)
            sums.clear()
        with profiled_round("wait for key gradients", len(self.call.schedule.rounds) - 1):
            wait()
        upstream.clear()
        return self._finish()

    def _upstream(self, grad_out: Tensor | None, grad_lse: Tensor | None) -> list[tuple[Tensor, Result, Tensor | None]]:
        """For every share: grad_out, the (out, lse') that its weights follow from, and the gradient of lse'."""
        problem, q = self.call.problem, self.shapes[0]
        assert q is not None
        if grad_out is None:
            grad_out = torch.zeros((*q.shape[:-1], problem.v_dim), dtype=q.dtype, device=self.k.device)
        grads = [_layout.canonical(grad_out, problem.layout)]
        queries = self.call.schedule.queries
        if grad_lse is not None:
            grad_lse = grad_lse.unsqueeze(0) if problem.packed else grad_lse
            grads.append(grad_lse.transpose(1, 2).unsqueeze(-1))
        elif "lse" in problem.features and len(queries.sends) > 1:  # the loss of another rank may use it
            grads.append(grads[0].new_zeros((*grads[0].shape[:-1], 1), dtype=self.precision))
        upstream = []
        share_grads = queries.to_shares(self.call.heads_axis, grads)()
        for number, (share, result, (grad, *rest)) in enumerate(
            zip(self.shares, self.results, share_grads, strict=True)
        ):
            share_grad_lse = rest[0].squeeze(-1).transpose(1, 2) if rest else None
            if share.sinks is not None:
                result, share_grad_lse = self._with_sinks(number, share.sinks, result, grad, share_grad_lse)
            upstream.append((grad, result, share_grad_lse))
        return upstream

    def _with_sinks(
        self, number: int, sinks: Tensor, result: Result, grad: Tensor, grad_lse: Tensor | None
    ) -> tuple[Result, Tensor | None]:
        """(out, lse with the sinks in it), and the gradient of that lse; adds to the gradient of the sinks."""
        sink, empty = sinks.to(result.lse.dtype)[:, None], result.lse == -torch.inf
        lse = torch.logaddexp(result.lse, sink).masked_fill(empty, -torch.inf)
        if self.dsinks is not None:
            delta = (grad.to(self.precision) * result.out.to(self.precision)).sum(-1).transpose(1, 2)
            sink_weight = torch.exp(sink - lse)
            decrease = (delta * sink_weight).masked_fill(empty, 0.0)
            self.dsinks[self.call.schedule.shares[number].heads] -= decrease.sum((0, 2))
        if grad_lse is not None:
            grad_lse = (grad_lse * torch.exp(lse - result.lse)).masked_fill(empty, 0.0)
        return Result(result.out, lse), grad_lse

    def _add_piece(
        self,
        round_: Round,
        piece: Piece,
        piece_backend: PieceBackend,
        keys: tuple[Tensor, Tensor],
        key_sums: Sequence[GradientSum | None],
        upstream: tuple[Tensor, Result, Tensor | None],
    ) -> None:
        """Run the backward of one piece on its backend, and add its gradients to the sums."""
        backend, problem = piece_backend
        share = self.shares[piece.share]
        heads = within(piece.heads, self.call.schedule.shares[piece.share].heads)
        tensors = piece_tensors(self.call, share, round_, piece, *keys)
        grad, (out, lse), grad_lse = upstream
        gradients = autograd.backward(
            backend,
            piece_call(self.call, piece, problem),
            tensors,
            Result(out[:, piece.rows, heads], lse[:, heads, piece.rows]),
            grad[:, piece.rows, heads],
            None if grad_lse is None else grad_lse[:, heads, piece.rows],
        )
        dq, dk, dv, dbias, _, dslopes = gradients
        kv_heads = within(piece.kv_heads, round_.kv_heads)
        for gradient_sum, gradient, rows, piece_heads in (
            (self.dq[piece.share], dq, piece.rows, heads),
            (key_sums[0], dk, piece.keys, kv_heads),
            (key_sums[1], dv, piece.keys, kv_heads),
        ):
            if gradient_sum is not None and gradient is not None:
                gradient_sum.add(gradient, rows, piece_heads)
        if (total := self.dbias[piece.share]) is not None and dbias is not None:
            total = take_unless_broadcast(take_unless_broadcast(total, 1, heads), 2, piece.rows)
            add(total, 3, slice(0, 1) if total.shape[3] == 1 else piece.key_index, dbias)
        if self.dslopes is not None and dslopes is not None:
            self.dslopes[..., piece.heads] += dslopes

    def _return_key_gradients(self, round_: Round, dk_r: GradientSum | None, dv_r: GradientSum | None) -> Wait:
        """Send gradients of keys to the ranks that own the keys; the result waits for those of this rank's own keys."""
        heads = within(round_.kv_heads, self.call.schedule.kv_heads)
        pairs = [(src, dst) for src, dst in ((dk_r, self.dk), (dv_r, self.dv)) if src is not None and dst is not None]
        own_slots, *peer_slots = round_.slots if round_.own is not None else (slice(0, 0), *round_.slots)
        dtype = self.call.problem.dtype
        received = {peer: [dst.buffer(count(index), heads, dtype) for _, dst in pairs] for peer, index in round_.sends}
        sent = {
            peer: [with_own_storage(take(src.value(), 1, slots).to(dtype)) for src, _ in pairs]
            for (peer, _), slots in zip(round_.receives, peer_slots, strict=True)
        }
        wait = self.call.ring_axis.exchange(sent, received, "the return of the gradients of keys")
        if round_.own is not None and round_.pieces:
            for src, dst in pairs:
                dst.add(take(src.value(), 1, own_slots), round_.own, heads)
        totals = [dst for _, dst in pairs]

        def add_received() -> None:
            wait()
            for peer, index in round_.sends:
                for total in totals:
                    total.add(received[peer].pop(0), index, heads)

        return add_received

    def _finish(self) -> tuple[Tensor | None, ...]:
        """The gradients after the all-to-all exchange back, rounded once to the dtypes of the inputs."""
        problem, schedule, axis = self.call.problem, self.call.schedule, self.call.heads_axis
        needs, layout = self.call.whole.needs, problem.layout
        q, k, v, bias = (
            None if t is None or not needed else t for t, needed in zip(self.shapes, needs[:4], strict=False)
        )
        row_specs = [] if q is None else [self._spec(_layout.canonical(q, layout), layout)]
        bias_has_rows = bias is not None and self.call.bias_has_rows
        if bias_has_rows and bias is not None:
            row_specs.append(self._spec(bias.transpose(1, 2), "bhsd"))
        key_specs = [self._spec(_layout.canonical(t, layout), layout) for t in (k, v) if t is not None]
        row_sums = [self._pop_row_gradients(n, bias_has_rows) for n in range(len(self.shares))]
        key_sums = [total.pop() for total in (self.dk, self.dv) if total is not None]
        wait_rows = schedule.queries.from_shares(axis, row_sums, row_specs)
        wait_keys = schedule.keys.from_shares(axis, [key_sums], key_specs)
        row_grads, key_grads = wait_rows(), wait_keys()
        dq = None if q is None else _layout.from_canonical(row_grads[0], layout)
        dk, dv = (None if t is None else _layout.from_canonical(key_grads.pop(0), layout) for t in (k, v))
        dbias = row_grads[-1].transpose(1, 2) if bias_has_rows else self._broadcast_bias_gradient()
        return dq, dk, dv, dbias, *map(_round_to, (self.dsinks, self.dslopes), self.shapes[4:])

    def _pop_row_gradients(self, share: int, bias_has_rows: bool) -> list[Tensor]:
        """The gradients of a share that return to the owners of its rows: of q and of the bias, if they are needed."""
        dq, dbias = self.dq[share], self.dbias[share]
        gradients = [] if dq is None else [dq.pop()]
        return gradients if dbias is None or not bias_has_rows else [*gradients, dbias.transpose(1, 2)]

    def _spec(self, like: Tensor, layout: Layout) -> TensorSpec:
        batch, rows, heads, size = like.shape
        return TensorSpec((batch, rows, heads, size), like.dtype, self.k.device, layout)

    def _broadcast_bias_gradient(self) -> Tensor | None:
        """This rank's part of the gradient of a bias with one row for all queries."""
        bias = self.shapes[3]
        if bias is None or not self.call.whole.needs[3]:
            return None
        total = torch.zeros(bias.shape, dtype=self.precision, device=self.k.device)
        for share, gradient in zip(self.call.schedule.shares, self.dbias, strict=True):
            take_unless_broadcast(total, 1, share.heads).add_(gradient)  # type: ignore[arg-type]
        return total.to(bias.dtype)


class GradientSum:
    """A sum of gradients [B, S, H, X], in the precision of the softmax.

    like: a tensor of that shape. is_only: nothing is added to the first gradient. Then, or if that gradient is in the
    precision of the softmax already, it becomes the sum without a copy, provided that it has the full shape.
    """

    def __init__(self, like: Tensor, is_only: bool) -> None:
        self._shape, self._like, self._is_only = like.shape, like.new_empty(0), is_only
        self._sum: Tensor | None = None

    def add(self, gradient: Tensor, rows: Index, heads: slice) -> None:
        """Add a gradient for these rows and heads."""
        is_precise = self._is_only or gradient.dtype == lse_dtype(gradient.dtype)
        if self._sum is None and gradient.shape == self._shape and is_precise and owns_storage(gradient):
            self._sum = gradient
            return
        self._sum = self.value()
        add(self._sum[:, :, heads], 1, rows, gradient)

    def buffer(self, rows: int, heads: slice, dtype: torch.dtype) -> Tensor:
        """An empty buffer for a gradient of that many rows."""
        batch, _, _, size = self._shape
        return self._like.new_empty((batch, rows, count(heads), size), dtype=dtype)

    def value(self) -> Tensor:
        """The sum; zeros if nothing has been added."""
        if self._sum is None:
            return self._like.new_zeros(self._shape, dtype=lse_dtype(self._like.dtype))
        return self._sum

    def pop(self) -> Tensor:
        """The sum, to which this object then holds no reference."""
        total, self._sum = self.value(), None
        return total


def _round_to(total: Tensor | None, like: Tensor | None) -> Tensor | None:
    return None if total is None or like is None else total.to(like.dtype)

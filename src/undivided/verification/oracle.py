"""What is right, and how wrong plain arithmetic is: attention by its definition, dense, in any precision.

Two evaluations of one formula, neither of which shares code with a backend:

- the oracle: fp64, gradients by torch's autograd;
- the plain reference: entirely in the input's own precision, the backward written out as every fused kernel computes
it, by
  recomputation from the rounded output: ``dS = P * (dP - rowsum(dO * O))``. It can be asked to sum over keys and head
  entries in other orders, which changes nothing but the rounding: that is how its error is sampled, and what stands in
  for a lower precision where the inputs are fp64 themselves.

Rows are worked on in pieces, so that no table is larger than `PAIRS`; a row's keys are never split.

Legend: B batch, H query heads, N key/value heads, R query rows of a piece, K keys, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from undivided import _layout
from undivided._call import Call
from undivided._problem import Problem
from undivided._request import Tensors
from undivided.kernels import philox

__all__ = [
    "NAMES",
    "Piece",
    "Upstream",
    "kv_heads_of",
    "oracle",
    "oracle_of",
    "plain",
    "plain_of",
    "reachable_of",
    "unreachable",
]

PAIRS = 1 << 22
"""Scores worked on at once: 32 MiB in fp64, and about a dozen such tables live at a time."""

NAMES = ("q", "k", "v", "bias", "sinks", "alibi_slopes")
"""The differentiable arguments, in the order of `Tensors`; the gradient of ``x`` is called ``dx``."""

Quantities = dict[str, Tensor]


class Upstream(NamedTuple):
    """Gradients of what attention returns, in its shapes: out as the caller gets it, lse [B, H, Sq] or None."""

    out: Tensor
    lse: Tensor | None = None


class Piece(NamedTuple):
    """A part of a problem that is right or wrong by itself: query rows of some heads of some sequences, and all of
    their keys.

    heads are whole groups, or lie within one.
    """

    batch: slice
    heads: slice
    rows: slice


class _Tables(NamedTuple):
    """What is known of every pair of a piece, [B, H, R, K] or broadcastable to it; None where nothing is asked."""

    allowed: Tensor
    distance: Tensor | None
    kept: Tensor | None


class _Leaves(NamedTuple):
    """The piece of every input: q [B, H, R, D], k, v [B, N, K, D], bias 4-D, sinks [H], slopes [B|1, H, R|1, 1]."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    sinks: Tensor | None
    alibi_slopes: Tensor | None


def oracle(call: Call, tensors: Tensors, upstream: Upstream) -> Quantities:
    """The right answer in fp64: out [B, H, Sq, Dv], lse [B, H, Sq], and the gradient of every input.

    dq, dk, dv are [B, heads, S, D]; dbias, dsinks and dalibi_slopes are shaped as the tensors.
    """
    problem = call.problem
    totals = _zeros(call, tensors)
    for piece in _pieces(problem):
        _add(totals, piece, call, tensors, oracle_of(piece, call, tensors, upstream))
    return totals


def oracle_of(piece: Piece, call: Call, tensors: Tensors, upstream: Upstream | None) -> Quantities:
    """The right answer for one piece: out, lse and, with an upstream, what its rows add to every gradient."""
    problem = call.problem
    tables = _tables(piece, call, tensors)
    with torch.enable_grad():
        leaves = _leaves(piece, call, tensors, torch.float64)
        out, lse = _attend(leaves, tables, call, tensors)
        found = {"out": out.detach(), "lse": lse.detach()}
        if upstream is not None:
            grads = _upstream_of(piece, problem, upstream, tables, torch.float64)
            found |= _autograd_of(out, lse, leaves, *grads)
    return found


def plain(call: Call, tensors: Tensors, upstream: Upstream, precision: torch.dtype, order: int = 0) -> Quantities:
    """The same in low precision, with plain tensor operations; its error is what a kernel's is measured by.

    order: 0 sums as the tensors lie in memory, any other number in a random order of its own.
    """
    problem = call.problem
    totals = _zeros(call, tensors)
    for piece in _pieces(problem):
        found = plain_of(piece, call, tensors, upstream, precision, order)
        _add(totals, piece, call, tensors, found)
    return totals


def plain_of(
    piece: Piece, call: Call, tensors: Tensors, upstream: Upstream | None, precision: torch.dtype, order: int = 0
) -> Quantities:
    """`plain` for one piece; without an upstream only out and lse."""
    problem = call.problem
    tables = _tables(piece, call, tensors)
    leaves = _leaves(piece, call, tensors, precision)
    shuffle = _Shuffle(order, leaves)
    shuffled = shuffle.leaves(leaves)
    tables = _Tables(*(shuffle.keys(t, -1) for t in tables))  # type: ignore[arg-type]
    if upstream is None:
        with torch.no_grad():
            out, lse = _attend(shuffled, tables, call, tensors)
        return shuffle.undone({"out": out, "lse": lse})
    grad_out, grad_lse = _upstream_of(piece, problem, upstream, tables, precision)
    return shuffle.undone(_recomputed(shuffled, tables, call, tensors, shuffle.values(grad_out), grad_lse))


class _Shuffle:
    """Keys, the entries of query and key heads, and those of value heads, each in a random order; 0 leaves them as they
    are."""

    def __init__(self, order: int, like: _Leaves) -> None:
        generator = torch.Generator("cpu").manual_seed(order)

        def drawn(size: int) -> Tensor:
            indices = (
                torch.randperm(size, generator=generator, device="cpu") if order else torch.arange(size, device="cpu")
            )
            return indices.to(like.q.device)

        self._keys, self._entries, self._values = (
            drawn(n) for n in (like.k.shape[2], like.k.shape[3], like.v.shape[3])
        )

    def keys(self, x: Tensor | None, axis: int) -> Tensor | None:
        return x if x is None or x.shape[axis] != self._keys.numel() else x.index_select(axis, self._keys)

    def values(self, x: Tensor) -> Tensor:
        return x.index_select(-1, self._values)

    def leaves(self, leaves: _Leaves) -> _Leaves:
        """The same leaves in this order, as leaves of their own."""
        q, k, v, bias, *rest = (None if x is None else x.detach() for x in leaves)
        assert q is not None and k is not None and v is not None
        q, k = (x.index_select(-1, self._entries) for x in (q, k))
        found = (q, self.keys(k, -2), self.keys(self.values(v), -2), self.keys(bias, -1), *rest)
        return _Leaves(*(None if x is None else x.requires_grad_() for x in found))  # type: ignore[arg-type]

    def undone(self, found: Quantities) -> Quantities:
        """Results in the operands' order again."""
        keys, entries, values = (x.argsort() for x in (self._keys, self._entries, self._values))
        axes = {
            "out": [(-1, values)],
            "dq": [(-1, entries)],
            "dk": [(-2, keys), (-1, entries)],
            "dv": [(-2, keys), (-1, values)],
        }
        if "dbias" in found and found["dbias"].shape[-1] > 1:
            axes["dbias"] = [(-1, keys)]
        for name in axes.keys() & found.keys():
            for axis, indices in axes[name]:
                found[name] = found[name].index_select(axis, indices)
        return found


def unreachable(call: Call, tensors: Tensors) -> Mapping[str, Tensor]:
    """Where exact zeros are required, bool in the shape of each quantity: rows without a key, keys without a row,
    biases without an allowed pair."""
    problem = call.problem
    totals = _zeros(call, tensors)
    for piece in _pieces(problem):
        _add(totals, piece, call, tensors, reachable_of(piece, call, tensors))
    return {name: total == 0 for name, total in totals.items() if name not in ("dsinks", "dalibi_slopes")}


def reachable_of(piece: Piece, call: Call, tensors: Tensors) -> Quantities:
    """How many pairs reach each row, key and bias of a piece, broadcastable to each quantity; 0 is what matters."""
    problem = call.problem
    allowed = _tables(piece, call, tensors).allowed
    row = allowed.any(-1, keepdim=True).double()
    key = _per_kv_head(allowed.any(-2).double(), piece, problem).unsqueeze(-1)
    found = {"out": row, "lse": row.squeeze(-1), "dq": row, "dk": key, "dv": key}
    if tensors.bias is not None:
        found["dbias"] = _summed_to(allowed.double(), tensors.bias.shape)
    return found


def _attend(leaves: _Leaves, tables: _Tables, call: Call, tensors: Tensors) -> tuple[Tensor, Tensor]:
    """(out, lse) of a piece: the definition, with the sink as one more column of the softmax."""
    score = _score(leaves, tables, call, tensors)
    empty = _empty(tables)
    score = score.masked_fill(empty, 0.0)  # the softmax of nothing is NaN
    lse = torch.logsumexp(score, -1) if score.shape[-1] else score.sum(-1)
    column = score
    if leaves.sinks is not None:
        sink = leaves.sinks[None, :, None, None].expand(*score.shape[:-1], 1)
        column = torch.cat([score, sink.to(score.dtype)], -1)
    weights = torch.softmax(column, -1)[..., : score.shape[-1]].masked_fill(empty, 0.0)
    if tables.kept is not None:
        weights = weights * tables.kept * philox.survivor_scale(call.dropout_p)
    return weights @ _reachable(leaves.v, tables), lse.masked_fill(empty.squeeze(-1), -torch.inf)


def _score(leaves: _Leaves, tables: _Tables, call: Call, tensors: Tensors) -> Tensor:
    """``softcap(scale * q . k) - slope * distance + bias``, -inf where not allowed; [B, H, R, K] in the precision of
    q."""
    q = leaves.q.masked_fill(_empty(tables), 0.0)  # what the mask hides may be NaN, and 0 * NaN is NaN
    score = (q @ _reachable(leaves.k, tables).transpose(-1, -2)) * call.scale
    if call.softcap is not None:
        score = call.softcap * torch.tanh(score / call.softcap)
    if tables.distance is not None and leaves.alibi_slopes is not None:
        score = (score - leaves.alibi_slopes * tables.distance).to(q.dtype)
    if leaves.bias is not None:
        score = (score + leaves.bias).to(q.dtype)
    return score.masked_fill(~tables.allowed, -torch.inf)


def _recomputed(
    leaves: _Leaves, tables: _Tables, call: Call, tensors: Tensors, grad_out: Tensor, grad_lse: Tensor | None
) -> Quantities:
    """Out, lse and gradients of a piece as fused kernels compute them, but dense and in one precision.

    The backward has only out and lse of the forward. Its own scores are rounded otherwise (here: the forward takes the
    entries of a head backwards), which is most of the error where one key has almost all of the weight.
    """
    forward = leaves._replace(q=leaves.q.flip(-1), k=leaves.k.flip(-1))
    out, lse = (x.detach() for x in _attend(forward, tables, call, tensors))
    with torch.enable_grad():
        score = _score(leaves, tables, call, tensors)
    empty, precision = _empty(tables), leaves.q.dtype
    found = {"out": out, "lse": lse}
    lse = lse.unsqueeze(-1).masked_fill(empty, 0.0)
    alone = torch.exp(score.detach() - lse)  # weights without sinks
    sinks = None if leaves.sinks is None else leaves.sinks.detach()[None, :, None, None]
    weights = alone if sinks is None else alone * torch.sigmoid(lse - sinks).to(precision)
    survive = 1.0 if tables.kept is None else tables.kept.to(precision) * philox.survivor_scale(call.dropout_p)
    v = _reachable(leaves.v, tables).detach()
    delta = (grad_out * out).sum(-1, keepdim=True)
    grad_score = weights * ((grad_out @ v.transpose(-1, -2)) * survive - delta)
    if grad_lse is not None:
        grad_score = grad_score + alone * grad_lse.unsqueeze(-1)
    found |= _autograd_of(score, None, leaves, grad_score.to(precision), None)
    grad_v = (weights * survive).transpose(-1, -2) @ grad_out
    found["dv"] = grad_v.unflatten(1, (leaves.v.shape[1], -1)).sum(2)
    if sinks is not None:
        share = (1 - torch.sigmoid(lse - sinks)).masked_fill(empty, 0.0).to(precision)
        found["dsinks"] = -(share * delta).sum((0, 2, 3))
    return found


def _autograd_of(
    out: Tensor, lse: Tensor | None, leaves: _Leaves, grad_out: Tensor, grad_lse: Tensor | None
) -> Quantities:
    outputs, grads = [out], [grad_out]
    if lse is not None and grad_lse is not None:
        outputs, grads = [out, lse], [grad_out, grad_lse]
    wanted = {name: leaf for name, leaf in leaves._asdict().items() if leaf is not None}
    found = torch.autograd.grad(outputs, list(wanted.values()), grads, allow_unused=True)
    return {f"d{name}": grad for name, grad in zip(wanted, found, strict=True) if grad is not None}


def _empty(tables: _Tables) -> Tensor:
    """Rows without an allowed key, [B, H, R, 1]."""
    return ~tables.allowed.any(-1, keepdim=True)


def _reachable(x: Tensor, tables: _Tables) -> Tensor:
    """Keys or values for every query head, [B, H, K, D], with 0 for those that no row of the piece may see."""
    heads = tables.allowed.shape[1]
    return x.repeat_interleave(heads // x.shape[1], 1).masked_fill(~tables.allowed.any(-2).unsqueeze(-1), 0.0)


def _pieces(problem: Problem) -> Iterator[Piece]:
    """All rows at once where they fit; else one batch row and one head at a time, as many query rows as fit."""
    everything = problem.batch * problem.heads * problem.q_len * problem.kv_len
    if everything <= PAIRS:
        yield Piece(slice(0, problem.batch), slice(0, problem.heads), slice(0, problem.q_len))
        return
    step = max(1, PAIRS // problem.kv_len)
    for b in range(problem.batch):
        for h in range(problem.heads):
            for start in range(0, problem.q_len, step):
                rows = slice(start, min(start + step, problem.q_len))
                yield Piece(slice(b, b + 1), slice(h, h + 1), rows)


def _tables(piece: Piece, call: Call, tensors: Tensors) -> _Tables:
    problem = call.problem
    form = call.normal_form(tensors.q.device)
    keys = slice(0, problem.kv_len)
    shape = tuple(s.stop - s.start for s in (*piece, keys))
    allowed = form.allowed(piece.batch, piece.rows, keys, piece.heads).expand(shape)
    if tensors.bias is not None:
        allowed = allowed & (tensors.bias.detach()[_where(tensors.bias, piece)] != -torch.inf)
    row, key = _table(form.q_position, piece), _table(form.kv_position, piece._replace(rows=keys))
    row, key = row[:, None, :, None], key[:, None, None, :]
    distance = kept = None
    if tensors.alibi_slopes is not None:
        distance = (row + _table(form.shift, piece)[:, None, :, None] - key).abs()
    if call.dropout_p > 0:
        assert call.dropout_seed is not None
        head = torch.arange(piece.heads.start, piece.heads.stop, device=row.device)[None, :, None, None]
        sequence = _table(form.q_sequence, piece)[:, None, :, None]
        kept = philox.keep(call.dropout_seed, sequence, head, row, key, call.dropout_p).expand(shape)
    return _Tables(allowed, distance, kept)


def _table(table: Tensor, piece: Piece) -> Tensor:
    return table[piece.batch if table.shape[0] > 1 else slice(None), piece.rows]


def _where(tensor: Tensor, piece: Piece) -> tuple[slice, ...]:
    """Where a piece lies in a tensor that broadcasts to [B, H, Sq, Sk]."""
    spans = (*piece, slice(None))
    return tuple(s if size > 1 else slice(None) for s, size in zip(spans, tensor.shape, strict=True))


def kv_heads_of(piece: Piece, problem: Problem) -> slice:
    """The key/value heads that the query heads of a piece read."""
    group = problem.heads // problem.kv_heads
    return slice(piece.heads.start // group, (piece.heads.stop - 1) // group + 1)


def _leaves(piece: Piece, call: Call, tensors: Tensors, precision: torch.dtype) -> _Leaves:
    problem = call.problem
    q, k, v = tensors.without_pages(call.pages, call.problem.layout).heads_first(call.problem.layout)
    kv = (piece.batch, kv_heads_of(piece, problem))
    slopes, bias, sinks = tensors.alibi_slopes, tensors.bias, tensors.sinks
    row_slopes = None
    if slopes is not None and slopes.dim() == 1:
        row_slopes = slopes[piece.heads][None, :, None, None]
    elif slopes is not None:
        row_slopes = slopes[_sequence(piece, call, tensors), piece.heads].transpose(1, 2).unsqueeze(-1)

    def leaf(x: Tensor, precision: torch.dtype) -> Tensor:
        return x.detach().to(precision, copy=True).requires_grad_()

    extra = torch.promote_types(precision, torch.float32)  # bias, sinks and slopes are often fp32 beside half inputs
    others = [
        None if x is None else leaf(x, extra)
        for x in (
            None if bias is None else bias[_where(bias, piece)],
            None if sinks is None else sinks[piece.heads],
            row_slopes,
        )
    ]
    return _Leaves(leaf(q[piece], precision), leaf(k[kv], precision), leaf(v[kv], precision), *others)


def _sequence(piece: Piece, call: Call, tensors: Tensors) -> Tensor:
    """The sequence that each row belongs to, [B|1, R]."""
    assert tensors.alibi_slopes is not None
    sequence = _table(call.normal_form(tensors.q.device).q_sequence, piece)
    return sequence.clamp(0, max(tensors.alibi_slopes.shape[0] - 1, 0)).long()


def _upstream_of(
    piece: Piece, problem: Problem, upstream: Upstream, tables: _Tables, precision: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """The gradients of the piece's out and lse; 0 for rows without a key, whose output is a constant."""
    empty = _empty(tables)
    grad_out = _layout.heads_first(upstream.out, problem.layout)[piece].to(precision).masked_fill(empty, 0.0)
    if upstream.lse is None:
        return grad_out, None
    return grad_out, upstream.lse[piece].to(precision).masked_fill(empty.squeeze(-1), 0.0)


def _zeros(call: Call, tensors: Tensors) -> Quantities:
    problem = call.problem
    batch, heads = problem.batch, problem.heads
    shapes: dict[str, tuple[int, ...]] = {
        "out": (batch, heads, problem.q_len, problem.v_dim),
        "lse": (batch, heads, problem.q_len),
        "dq": (batch, heads, problem.q_len, problem.qk_dim),
        "dk": (batch, problem.kv_heads, problem.kv_len, problem.qk_dim),
        "dv": (batch, problem.kv_heads, problem.kv_len, problem.v_dim),
    }
    for name, tensor in zip(NAMES[3:], tensors[3:], strict=True):
        if tensor is not None:
            shapes[f"d{name}"] = tuple(tensor.shape)
    return {name: torch.zeros(shape, dtype=torch.float64, device=tensors.q.device) for name, shape in shapes.items()}


def _add(totals: Quantities, piece: Piece, call: Call, tensors: Tensors, found: Quantities) -> None:
    """Add what a piece found to where it belongs."""
    problem = call.problem
    kv = (piece.batch, kv_heads_of(piece, problem))
    for name, value in found.items():
        total, value = totals[name], value.double()
        if name in ("out", "lse", "dq"):
            total[piece] += value
        elif name in ("dk", "dv"):
            total[kv] += value
        elif name == "dbias":
            total[_where(total, piece)] += value
        elif name == "dsinks" or total.dim() == 1:
            total[piece.heads] += value if value.dim() == 1 else value.sum((0, 2, 3))
        else:
            sequence = _sequence(piece, call, tensors).expand(value.shape[0], -1)
            rows = value.squeeze(-1).transpose(1, 2)  # [B, R, H]
            total[:, piece.heads].index_add_(0, sequence.reshape(-1), rows.reshape(-1, rows.shape[-1]))


def _per_kv_head(x_BHK: Tensor, piece: Piece, problem: Problem) -> Tensor:
    kv_heads = kv_heads_of(piece, problem)
    summed: Tensor = x_BHK.unflatten(1, (kv_heads.stop - kv_heads.start, -1)).sum(2)
    return summed


def _summed_to(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Sum over the axes that are broadcast in `shape`."""
    axes = [axis for axis, size in enumerate(shape) if size == 1]
    return x.sum(axes, keepdim=True) if axes else x

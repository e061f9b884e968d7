"""Pieces of a problem: row blocks that are right or wrong by themselves, and their inputs and masks as dense tensors.

The oracle and the plain reference work on one piece at a time, so that no score matrix is larger than `MAX_PAIRS`. The
keys of a row are never split.

Legend: B batch, H query heads, N key/value heads, R query rows of a piece, K keys, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from undivided.arguments import layout
from undivided.kernels import philox
from undivided.request.call import Call
from undivided.request.problem import Problem
from undivided.request.request import Tensors

MAX_PAIRS = 1 << 22
"""Largest score matrix of a piece: 32 MiB in fp64, and about a dozen such tensors are alive at a time."""

NAMES = Tensors._fields
"""The differentiable arguments; the gradient of ``x`` is called ``dx``."""

Quantities = dict[str, Tensor]
"""Results by name: "out", "lse", and gradients "dq", "dk", "dv", "dbias", "dsinks", "dalibi_slopes"."""


class Upstream(NamedTuple):
    """The gradients of the outputs: out in the caller's layout, lse [B, H, Sq] or None."""

    out: Tensor
    lse: Tensor | None = None


class OraclePiece(NamedTuple):
    """Query rows of some heads of some sequences, with all of their keys.

    heads are whole head groups, or lie within one.
    """

    batch: slice
    heads: slice
    rows: slice


class PairTables(NamedTuple):
    """Values for every pair of a piece, [B, H, R, K] or broadcastable to it.

    allowed: bool. distance: of ALiBi, None without ALiBi. kept: by dropout, None without dropout.
    """

    allowed: Tensor
    distance: Tensor | None
    kept: Tensor | None

    @property
    def empty_rows(self) -> Tensor:
        """Rows without an allowed key, bool [B, H, R, 1]."""
        return ~self.allowed.any(-1, keepdim=True)


class Leaves(NamedTuple):
    """The inputs of a piece: q [B, H, R, D], k, v [B, N, K, D], bias 4-D, sinks and slopes [B, H, R, 1].

    Inputs that are one number per row or broadcast to it have a copy per row, so that each row has its own gradient.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    sinks: Tensor | None
    alibi_slopes: Tensor | None


def split(problem: Problem) -> Iterator[OraclePiece]:
    """The pieces of a problem: one if it has at most MAX_PAIRS, otherwise blocks of rows of one head."""
    pairs = problem.batch * problem.heads * problem.q_len * problem.kv_len
    if pairs <= MAX_PAIRS:
        yield OraclePiece(slice(0, problem.batch), slice(0, problem.heads), slice(0, problem.q_len))
        return
    step = max(1, MAX_PAIRS // problem.kv_len)
    for b in range(problem.batch):
        for h in range(problem.heads):
            for start in range(0, problem.q_len, step):
                rows = slice(start, min(start + step, problem.q_len))
                yield OraclePiece(slice(b, b + 1), slice(h, h + 1), rows)


def pair_tables(piece: OraclePiece, call: Call, tensors: Tensors) -> PairTables:
    """Which pairs of a piece are allowed, their ALiBi distances, and which of them dropout keeps."""
    problem = call.problem
    form = call.normal_form(tensors.q)
    keys = slice(0, problem.kv_len)
    shape = tuple(s.stop - s.start for s in (*piece, keys))
    allowed = form.allowed(piece.batch, piece.rows, keys, piece.heads).expand(shape)
    if tensors.bias is not None:
        allowed = allowed & (tensors.bias.detach()[span(tensors.bias, piece)] != -torch.inf)
    row, key = _table(form.q_position, piece), _table(form.kv_position, piece._replace(rows=keys))
    row, key = row[:, None, :, None], key[:, None, None, :]
    distance = kept = None
    if tensors.alibi_slopes is not None:
        distance = (row + _table(form.shift, piece)[:, None, :, None] - key).abs()
    if call.dropout_p > 0:
        assert call.dropout_seed is not None
        head = torch.arange(piece.heads.start, piece.heads.stop, device=row.device) + form.first_head
        head = head[None, :, None, None]
        sequence = _table(form.sequence_number, piece)[:, None, :, None]
        kept = philox.keep(call.dropout_seed, sequence, head, row, key, call.dropout_p).expand(shape)
    return PairTables(allowed, distance, kept)


def _table(table: Tensor, piece: OraclePiece) -> Tensor:
    """The rows of a piece in a table [B|1, S]."""
    return table[piece.batch if table.shape[0] > 1 else slice(None), piece.rows]


def span(tensor: Tensor, piece: OraclePiece) -> tuple[slice, ...]:
    """The slices of a piece in a tensor that broadcasts to [B, H, Sq, Sk]."""
    slices = (*piece, slice(None))
    return tuple(s if size > 1 else slice(None) for s, size in zip(slices, tensor.shape, strict=True))


def kv_span(piece: OraclePiece, problem: Problem) -> slice:
    """The key/value heads that serve the query heads of a piece."""
    group = problem.heads // problem.kv_heads
    return slice(piece.heads.start // group, (piece.heads.stop - 1) // group + 1)


def piece_leaves(piece: OraclePiece, call: Call, tensors: Tensors, precision: torch.dtype) -> Leaves:
    """Copies of the inputs of a piece in a precision, as leaves that require gradients."""
    problem = call.problem
    q, k, v = call.dense_tensors(tensors, precision).heads_first(problem.layout)
    kv = (piece.batch, kv_span(piece, problem))
    slopes, bias, sinks = tensors.alibi_slopes, tensors.bias, tensors.sinks
    rows = (*(s.stop - s.start for s in piece), 1)
    if slopes is not None and slopes.dim() == 1:
        slopes = _per_row(slopes[piece.heads], rows)
    elif slopes is not None:
        slopes = slopes[_sequence(piece, call, tensors), piece.heads].transpose(1, 2).unsqueeze(-1).expand(rows)
    if bias is not None:
        bias = bias[span(bias, piece)]
        bias = bias.expand(rows) if bias.shape[-1] == 1 else bias
    if sinks is not None:
        sinks = _per_row(sinks[piece.heads], rows)

    def leaf(x: Tensor, precision: torch.dtype) -> Tensor:
        return x.detach().to(precision, copy=True).requires_grad_()

    wide = torch.promote_types(precision, torch.float32)  # bias, sinks and slopes are often fp32 with half inputs
    others = [None if x is None else leaf(x, wide) for x in (bias, sinks, slopes)]
    return Leaves(leaf(q[piece], precision), leaf(k[kv], precision), leaf(v[kv], precision), *others)


def _per_row(x: Tensor, rows: tuple[int, ...]) -> Tensor:
    """One number per head, for every row of a piece: [H] as [B, H, R, 1]."""
    return x[None, :, None, None].expand(rows)


def _sequence(piece: OraclePiece, call: Call, tensors: Tensors) -> Tensor:
    """The sequence of each row, int64 [B|1, R]."""
    assert tensors.alibi_slopes is not None
    sequence = _table(call.normal_form(tensors.q).q_sequence, piece)
    return sequence.clamp(0, max(tensors.alibi_slopes.shape[0] - 1, 0)).long()


def piece_upstream(
    piece: OraclePiece, problem: Problem, upstream: Upstream, tables: PairTables, precision: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """The gradients of the out and lse of a piece; 0 for rows without a key, whose output is constant."""
    empty = tables.empty_rows
    grad_out = layout.heads_first(upstream.out, problem.layout)[piece].to(precision).masked_fill(empty, 0.0)
    if upstream.lse is None:
        return grad_out, None
    return grad_out, upstream.lse[piece].to(precision).masked_fill(empty.squeeze(-1), 0.0)


def zeros(call: Call, tensors: Tensors) -> Quantities:
    """Every quantity of a call, filled with zeros, in fp64."""
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


def per_row(name: str) -> str:
    """The name of the rows' shares of a gradient: a quantity [B, H, Sq], which sums up to the gradient."""
    return f"{name} per row"


def row_zeros(call: Call, tensors: Tensors) -> Quantities:
    """Zeros for the rows' shares of each gradient that is one number per row or is broadcast to it."""
    bias, sinks, slopes = tensors[3:]
    names = {"dbias": bias is not None and bias.shape[-1] == 1, "dsinks": sinks is not None}
    names["dalibi_slopes"] = slopes is not None
    shape = (call.problem.batch, call.problem.heads, call.problem.q_len)
    zero = torch.zeros(shape, dtype=torch.float64, device=tensors.q.device)
    return {per_row(name): zero.clone() for name, is_row_sum in names.items() if is_row_sum}


def sum_to(x: Tensor, shape: Sequence[int]) -> Tensor:
    """The sum over the axes that are broadcast in `shape`."""
    axes = [axis for axis, size in enumerate(shape) if size == 1]
    return x.sum(axes, keepdim=True) if axes else x


def add(totals: Quantities, piece: OraclePiece, call: Call, tensors: Tensors, own: Quantities) -> None:
    """Add the quantities of a piece to those of the problem; sums over rows are in the precision of the piece."""
    problem = call.problem
    kv = (piece.batch, kv_span(piece, problem))
    for name, value in own.items():
        total = totals[name]
        if per_row(name) in totals:
            totals[per_row(name)][piece] += value.squeeze(-1).double()
        if name in ("out", "lse", "dq"):
            total[piece] += value
        elif name in ("dk", "dv"):
            total[kv] += value
        elif name == "dbias":
            total[span(total, piece)] += sum_to(value, total.shape)
        elif total.dim() == 1:
            total[piece.heads] += value.sum((0, 2, 3))
        else:
            sequence = _sequence(piece, call, tensors).expand(value.shape[0], -1)
            rows = value.double().squeeze(-1).transpose(1, 2)  # [B, R, H]
            total[:, piece.heads].index_add_(0, sequence.reshape(-1), rows.reshape(-1, rows.shape[-1]))

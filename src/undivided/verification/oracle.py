"""Attention by its definition: dense, without code of any backend, and in fp64 the right answer (the oracle).

Gradients come from torch's autograd. `plain_attention` uses the same definition in low precision.

Legend: B batch, H query heads, N key/value heads, R query rows of a piece, K keys, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from undivided.kernels import philox
from undivided.request.call import Call
from undivided.request.problem import Problem
from undivided.request.request import Tensors
from undivided.verification.pieces import (
    NAMES,
    Leaves,
    OraclePiece,
    PairTables,
    Quantities,
    Upstream,
    add,
    kv_span,
    pair_tables,
    piece_leaves,
    piece_upstream,
    row_zeros,
    split,
    sum_to,
    zeros,
)

__all__ = ["NAMES", "Upstream", "oracle", "piece_oracle", "piece_reach", "unreachable"]


def oracle(call: Call, tensors: Tensors, upstream: Upstream) -> Quantities:
    """The right answer in fp64: out [B, H, Sq, Dv], lse [B, H, Sq], and the gradient of every input.

    dq, dk, dv are [B, heads, S, D]; dbias, dsinks and dalibi_slopes have the shapes of the tensors. The rows' shares of
    gradients that are sums over rows have the names of `per_row`.
    """
    totals = zeros(call, tensors) | row_zeros(call, tensors)
    for piece in split(call.problem):
        add(totals, piece, call, tensors, piece_oracle(piece, call, tensors, upstream))
    return totals


def piece_oracle(piece: OraclePiece, call: Call, tensors: Tensors, upstream: Upstream | None) -> Quantities:
    """The right answer for one piece: out, lse and, with an upstream, what its rows contribute to every gradient."""
    tables = pair_tables(piece, call, tensors)
    with torch.enable_grad():
        leaves = piece_leaves(piece, call, tensors, torch.float64)
        out, lse = attend(leaves, tables, call)
        quantities = {"out": out.detach(), "lse": lse.detach()}
        if upstream is not None:
            grads = piece_upstream(piece, call.problem, upstream, tables, torch.float64)
            quantities |= input_gradients(out, lse, leaves, *grads)
    return quantities


def unreachable(call: Call, tensors: Tensors) -> Mapping[str, Tensor]:
    """Where exact zeros are required, bool in the shape of each quantity.

    These are rows without a key, keys without a row, and entries of the bias without an allowed pair.
    """
    totals = zeros(call, tensors)
    for piece in split(call.problem):
        add(totals, piece, call, tensors, piece_reach(piece, call, tensors))
    return {name: total == 0 for name, total in totals.items() if name not in ("dsinks", "dalibi_slopes")}


def piece_reach(piece: OraclePiece, call: Call, tensors: Tensors) -> Quantities:
    """The number of pairs that reach each row, key and bias of a piece, broadcastable to each quantity."""
    allowed = pair_tables(piece, call, tensors).allowed
    row = allowed.any(-1, keepdim=True).double()
    key = _per_kv_head(allowed.any(-2).double(), piece, call.problem).unsqueeze(-1)
    counts = {"out": row, "lse": row.squeeze(-1), "dq": row, "dk": key, "dv": key}
    if tensors.bias is not None:
        counts["dbias"] = sum_to(allowed.double(), tensors.bias.shape)
    return counts


def attend(
    leaves: Leaves, tables: PairTables, call: Call, multiply: Callable[[Tensor, Tensor], Tensor] = torch.matmul
) -> tuple[Tensor, Tensor]:
    """(out, lse) of a piece by the definition, with the sink as one more column of the softmax.

    multiply: the matrix product of queries and keys.
    """
    score = scores(leaves, tables, call, multiply)
    empty = tables.empty_rows
    score = score.masked_fill(empty, 0.0)  # the softmax of nothing is NaN
    lse = torch.logsumexp(score, -1) if score.shape[-1] else score.sum(-1)
    columns = score
    if leaves.sinks is not None:
        columns = torch.cat([score, leaves.sinks.to(score.dtype)], -1)
    weights = torch.softmax(columns, -1)[..., : score.shape[-1]].masked_fill(empty, 0.0)
    if tables.kept is not None:
        weights = weights * tables.kept * philox.survivor_scale(call.dropout_p)
    return weights @ reachable(leaves.v, tables), lse.masked_fill(empty.squeeze(-1), -torch.inf)


def scores(
    leaves: Leaves, tables: PairTables, call: Call, multiply: Callable[[Tensor, Tensor], Tensor] = torch.matmul
) -> Tensor:
    """softcap(scale * q . k) - slope * distance + bias, [B, H, R, K] in the precision of q; -inf if not allowed."""
    q = leaves.q.masked_fill(tables.empty_rows, 0.0)  # hidden values may be NaN, and 0 * NaN is NaN
    score = multiply(q, reachable(leaves.k, tables).transpose(-1, -2)) * call.scale
    if call.softcap is not None:
        score = call.softcap * torch.tanh(score / call.softcap)
    if tables.distance is not None and leaves.alibi_slopes is not None:
        score = (score - leaves.alibi_slopes * tables.distance).to(q.dtype)
    if leaves.bias is not None:
        score = (score + leaves.bias).to(q.dtype)
    return score.masked_fill(~tables.allowed, -torch.inf)


def input_gradients(
    out: Tensor, lse: Tensor | None, leaves: Leaves, grad_out: Tensor, grad_lse: Tensor | None
) -> Quantities:
    """The gradients of the leaves, by name, from the gradients of out and of lse."""
    outputs, grads = [out], [grad_out]
    if lse is not None and grad_lse is not None:
        outputs, grads = [out, lse], [grad_out, grad_lse]
    named = {name: leaf for name, leaf in leaves._asdict().items() if leaf is not None}
    grads_in = torch.autograd.grad(outputs, list(named.values()), grads, allow_unused=True)
    return {f"d{name}": grad for name, grad in zip(named, grads_in, strict=True) if grad is not None}


def reachable(x: Tensor, tables: PairTables) -> Tensor:
    """Keys or values for every query head, [B, H, K, D]; 0 if no row of the piece may attend to them."""
    heads = tables.allowed.shape[1]
    return x.repeat_interleave(heads // x.shape[1], 1).masked_fill(~tables.allowed.any(-2).unsqueeze(-1), 0.0)


def _per_kv_head(x_BHK: Tensor, piece: OraclePiece, problem: Problem) -> Tensor:
    """The sums over the query heads of each key head, [B, N, K]."""
    kv_heads = kv_span(piece, problem)
    summed: Tensor = x_BHK.unflatten(1, (kv_heads.stop - kv_heads.start, -1)).sum(2)
    return summed

"""Generation over a cache that is spread over ranks: queries everywhere, keys in one place each, partial results merged.

The new tokens are few and the cached keys many, so nothing of the keys is sent: every rank attends to the keys that it holds,
the outputs and their log-sum-exps are gathered, and merged as parts over disjoint keys always are (`undivided.merge`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from undivided import _autograd, _layout, _problem
from undivided._machine import Machine
from undivided._policy import Policy
from undivided._problem import Operands, Problem
from undivided._result import Result, lse_dtype, merge
from undivided._selection import select
from undivided.context_parallel._call import piece_problem
from undivided.context_parallel._index import as_index, unless_broadcast
from undivided.context_parallel._pieces import Piece, in_simple_words
from undivided.context_parallel._request import SEQUENCE_AXIS, check_own
from undivided.context_parallel.collectives import Communicator, gather_all
from undivided.errors import InputError
from undivided.masks import Mask
from undivided.masks._parts import Ranges


def decode(
    axes: Sequence[Communicator], q: Tensor, k: Tensor, v: Tensor, positions: Tensor, kv_len: int,
    arguments: dict[str, Any], allowed: Policy,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse) of queries that every rank has; see `ContextParallel.decode`."""
    check_own(q, k, v, arguments)
    layout = arguments["layout"]
    _check_positions(positions, k.shape[SEQUENCE_AXIS[layout]], kv_len)
    problem, operands = _whole(q, k, v, kv_len, arguments)
    form = operands.mask.normal_form(problem.batch, problem.heads, problem.q_len, kv_len, q.device)
    rows = torch.arange(problem.q_len, device=q.device)
    part = form.shard(rows, positions.to(q.device))
    mask = Mask(parts=(Ranges(part),)) if arguments["alibi_slopes"] is not None else in_simple_words(part)
    count = positions.numel()
    heads, kv_heads = slice(0, problem.heads), slice(0, problem.kv_heads)
    piece = Piece(0, heads, kv_heads, slice(0, problem.q_len), slice(0, count), part, mask)
    result = _own(q, k, v, piece, problem, operands, arguments, allowed)
    outs = gather_all(axes, result.out.to(result.lse.dtype).contiguous())
    lses = gather_all(axes, result.lse.contiguous())
    out, lse = merge(outs, lses, arguments["sinks"], layout="bshd")
    return _layout.restore(out.to(q.dtype), layout).contiguous(), lse.squeeze(0) if layout == "thd" else lse


def _own(
    q: Tensor, k: Tensor, v: Tensor, piece: Piece, problem: Problem, operands: Operands, arguments: dict[str, Any],
    allowed: Policy,
) -> Result:  # fmt: skip
    """Attention over the keys of this rank."""
    q, k, v = (_layout.canonical(t, problem.layout) for t in (q, k, v))
    batch, rows, heads, _ = q.shape
    if not piece.form.kv_len:
        empty = q.new_full((batch, heads, rows), -torch.inf, dtype=lse_dtype(q.dtype))
        return Result(q.new_zeros((batch, rows, heads, v.shape[-1])), empty)
    bias = arguments["bias"]
    if bias is not None:
        assert piece.form.key_index is not None
        bias = unless_broadcast(bias[(None,) * (4 - bias.dim())], 3, as_index(piece.form.key_index))
    part = piece_problem(problem, piece)
    q, k, v = (t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous() for t in (q, k, v))
    mine = dataclasses.replace(
        operands, q=q, k=k, v=v, layout="bshd", mask=piece.mask, bias=bias, sinks=None,
        alibi_slopes=arguments["alibi_slopes"], bound=None,
    )  # fmt: skip
    return _autograd.forward(select(part, Machine.this(q.device), allowed).backend, part, mine)


def _whole(
    q: Tensor, k: Tensor, v: Tensor, kv_len: int, arguments: dict[str, Any]
) -> tuple[Problem, Operands]:
    """The request over all keys, without contents."""
    axis, sized = SEQUENCE_AXIS[arguments["layout"]], []
    for tensor, length in ((q, None), (k, kv_len), (v, kv_len)):
        shape = list(tensor.shape)
        shape[axis] = shape[axis] if length is None else length
        sized.append(torch.empty(shape, dtype=tensor.dtype, device="meta"))
    given: dict[str, Any] = {
        name: torch.empty_like(value, device="meta") if isinstance(value, Tensor) else value
        for name, value in arguments.items()
    }
    return _problem.normalise(*sized, **given, device=q.device.type, needs=(False,) * 6)


def _check_positions(positions: Tensor, keys: int, kv_len: int) -> None:
    if not isinstance(positions, Tensor) or positions.dtype != torch.int64 or positions.shape != (keys,):
        got = (
            f"{positions.dtype} {list(positions.shape)}"
            if isinstance(positions, Tensor)
            else type(positions).__name__
        )
        raise InputError("positions", f"be int64 [{keys}], one for each key that this rank holds", got)
    if positions.device.type != "cpu" or not keys:
        return
    if bool((positions.diff() <= 0).any()) or int(positions[0]) < 0 or int(positions[-1]) >= kv_len:
        raise InputError("positions", f"ascend from 0 to below kv_len ({kv_len})", positions.tolist()[:8])

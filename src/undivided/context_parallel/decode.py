"""Generation over a cache that is spread over ranks: split-KV decoding, one split per rank.

Every rank has the new queries, every cached key is on one rank. There are few new tokens and many cached keys, so no
keys are sent: every rank attends to the keys that it holds, and the partial results (outputs and log-sum-exps) are sent
and merged. There are two ways to merge them; with n bytes per partial result and W ranks, a rank sends

    all_gather   its result to all ranks, in one exchange: (W - 1) n bytes
    ring         1 / W of the rows to each rank, which merges them and sends the sums: two exchanges, 2 (W - 1) n / W

Results are merged in the order of the ranks, so all ranks get the same bits.

Source: the second is an all-reduce (Patarasuk and Yuan 2009) whose sum is the merge of attention, in two exchanges
    instead of 2 (W - 1) steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from undivided import _autograd, _layout, _problem
from undivided._machine import Machine
from undivided._policy import Policy
from undivided._problem import Operands, Problem
from undivided._result import Result, lse_dtype, merge_into, sink_factor
from undivided.context_parallel._call import Run, piece_problem
from undivided.context_parallel._index import as_index, take_unless_broadcast
from undivided.context_parallel._pieces import Piece, simplest_mask
from undivided.context_parallel._request import check_local, check_values, resized_meta, select_backend
from undivided.context_parallel._shards import SEQUENCE_AXIS
from undivided.context_parallel.exchange.collectives import Communicator, gather_uneven
from undivided.context_parallel.exchange.handshake import SharedArguments, describe_mask
from undivided.errors import InputError
from undivided.masks import Mask
from undivided.masks._parts import Ranges

MergeMethod = Literal["all_gather", "ring"]


class Step(NamedTuple):
    """One rank's part of a step of generation.

    problem: over the keys of all ranks. local: what this rank computes over its own keys; None if it has none.
    """

    problem: Problem
    q: Tensor
    sinks: Tensor | None
    local: tuple[Run, Operands] | None


def prepare_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    kv_len: int,
    arguments: dict[str, Any],
    allowed: Policy,
    by: MergeMethod,
) -> tuple[Step, SharedArguments]:
    """This rank's part, validated, and the values that all ranks must share; see `ContextParallel.decode`."""
    check_values(q)
    check_local(q, k, v, arguments)
    if by not in ("all_gather", "ring"):
        raise InputError("by", "be 'all_gather' or 'ring'", repr(by))
    layout = arguments["layout"]
    _check_positions(positions, k.shape[SEQUENCE_AXIS[layout]], kv_len)
    problem, operands = _global_request(q, k, v, kv_len, arguments)
    form = operands.mask.normal_form(problem.batch, problem.heads, problem.q_len, kv_len, q.device)
    rows = torch.arange(problem.q_len, device=q.device)
    part = form.shard(rows, positions.to(q.device))
    mask = Mask(parts=(Ranges(part),)) if arguments["alibi_slopes"] is not None else simplest_mask(part)
    count = positions.numel()
    heads, kv_heads = slice(0, problem.heads), slice(0, problem.kv_heads)
    piece = Piece(0, heads, kv_heads, slice(0, problem.q_len), slice(0, count), part, mask)
    local = _local_work(q, k, v, piece, problem, operands, arguments, allowed) if count else None
    shared: SharedArguments = {
        "q": (layout, problem.batch, problem.q_len, problem.heads, problem.qk_dim, problem.dtype),
        "k": (problem.kv_heads, problem.v_dim),
        "kv_len": kv_len,
        "mask": describe_mask(operands.mask),
        "scale": operands.scale,
        "softcap": operands.softcap,
        "by": by,
        "features": sorted(problem.features),
    }
    return Step(problem, _layout.canonical(q, layout), arguments["sinks"], local), shared


def decode(axes: Sequence[Communicator], step: Step, by: MergeMethod) -> tuple[Tensor, Tensor]:
    """(out, lse) over all keys, merged from the partial results of all ranks."""
    problem, (batch, rows, heads, _) = step.problem, step.q.shape
    dtype = lse_dtype(problem.dtype)
    if step.local is None:
        partial = step.q.new_zeros((batch * rows * heads, problem.v_dim + 1), dtype=dtype)
        partial[:, -1] = -torch.inf
    else:
        (backend, part), operands = step.local
        out, lse = _autograd.forward(backend, part, operands)
        partial = torch.cat([out.to(dtype), lse.transpose(1, 2).unsqueeze(-1)], -1).flatten(0, 2)
    for comm in reversed(axes):
        partial = _merge_ranks(comm, partial, by)
    merged = partial.view(batch, rows, heads, -1)
    out, lse = merged[..., :-1], merged[..., -1].transpose(1, 2).contiguous()  # [B, H, Sq]
    if step.sinks is not None:
        out = out * sink_factor(lse, step.sinks).transpose(1, 2).unsqueeze(-1)
    out = _layout.restore(out.to(problem.dtype), problem.layout).contiguous()
    return out, lse.squeeze(0) if problem.packed else lse


def _merge_ranks(comm: Communicator, partial: Tensor, by: MergeMethod) -> Tensor:
    """The rows [n, Dv + 1] merged over all ranks; the last column is the log-sum-exp."""
    if comm.world == 1:
        return partial
    if by == "all_gather":
        return _merge(gather_uneven(comm, partial, [len(partial)] * comm.world))
    chunks = partial.tensor_split(comm.world)
    sizes, own = [len(chunk) for chunk in chunks], chunks[comm.rank]
    others = [rank for rank in range(comm.world) if rank != comm.rank]
    parts = [own if rank == comm.rank else torch.empty_like(own) for rank in range(comm.world)]
    comm.exchange({rank: [chunks[rank]] for rank in others}, {rank: [parts[rank]] for rank in others})()
    return torch.cat(gather_uneven(comm, _merge(parts), sizes))


def _merge(parts: Sequence[Tensor]) -> Tensor:
    """Parts over disjoint keys, merged in order; `merge_into` sees each (row, head) as a sequence of one row."""
    total = parts[0].clone()
    for part in parts[1:]:
        merge_into(_as_result(total), _as_result(part))
    return total


def _as_result(rows: Tensor) -> Result:
    return Result(rows[None, :, None, :-1], rows[None, None, :, -1])


def _local_work(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    piece: Piece,
    problem: Problem,
    operands: Operands,
    arguments: dict[str, Any],
    allowed: Policy,
) -> tuple[Run, Operands]:
    """(backend and problem, operands) of the attention over this rank's keys."""
    q, k, v = (_layout.canonical(t, problem.layout) for t in (q, k, v))
    bias = arguments["bias"]
    if bias is not None:
        assert piece.form.key_index is not None
        bias = take_unless_broadcast(bias[(None,) * (4 - bias.dim())], 3, as_index(piece.form.key_index))
    part = piece_problem(problem, piece)
    q, k, v = (t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous() for t in (q, k, v))
    local = dataclasses.replace(
        operands,
        q=q,
        k=k,
        v=v,
        layout="bshd",
        mask=piece.mask,
        bias=bias,
        sinks=None,
        alibi_slopes=arguments["alibi_slopes"],
        bound=None,
    )
    return select_backend(part, Machine.this(q.device), allowed), local


def _global_request(
    q: Tensor, k: Tensor, v: Tensor, kv_len: int, arguments: dict[str, Any]
) -> tuple[Problem, Operands]:
    """The problem and operands over the keys of all ranks; the tensors have sizes and no contents."""
    axis = SEQUENCE_AXIS[arguments["layout"]]
    sized = [resized_meta(tensor, axis, n) for tensor, n in ((q, q.shape[axis]), (k, kv_len), (v, kv_len))]
    meta_arguments: dict[str, Any] = {
        name: torch.empty_like(value, device="meta") if isinstance(value, Tensor) else value
        for name, value in arguments.items()
    }
    return _problem.normalise(*sized, **meta_arguments, device=q.device.type, needs=(False,) * 6)


def _check_positions(positions: Tensor, keys: int, kv_len: int) -> None:
    if not isinstance(positions, Tensor) or positions.dtype != torch.int64 or positions.shape != (keys,):
        got = (
            f"{positions.dtype} {list(positions.shape)}" if isinstance(positions, Tensor) else type(positions).__name__
        )
        raise InputError("positions", f"be int64 [{keys}], one for each key of this rank", got)
    if positions.device.type != "cpu" or not keys:
        return
    if bool((positions.diff() <= 0).any()) or int(positions[0]) < 0 or int(positions[-1]) >= kv_len:
        raise InputError("positions", f"ascend and lie in [0, kv_len={kv_len})", positions.tolist()[:8])

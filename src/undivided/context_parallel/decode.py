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

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from undivided.arguments import layout as _layout
from undivided.arguments.checks import check_tensor, checked_choice
from undivided.arguments.layout import SEQUENCE_AXIS
from undivided.arguments.tensors import with_contiguous_rows
from undivided.backends._base import Backend
from undivided.context_parallel._call import piece_problem
from undivided.context_parallel._index import take_unless_broadcast
from undivided.context_parallel._pieces import Piece, piece_mask
from undivided.context_parallel._request import (
    check_local,
    check_values,
    policy_over_ranks,
    select_backend,
    whole_call,
    with_four_bias_axes,
)
from undivided.context_parallel.exchange.collectives import Communicator, gather_uneven, swap
from undivided.context_parallel.exchange.handshake import (
    CALL,
    SharedArguments,
    describe_mask,
    describe_queries,
    describe_sizes,
)
from undivided.context_parallel.sharding import check_length
from undivided.errors import InputError
from undivided.machine import Machine
from undivided.request.call import Call
from undivided.request.problem import Problem
from undivided.request.request import Request, Tensors
from undivided.request.result import Result, lse_dtype, merge_into, sink_factor
from undivided.run import autograd
from undivided.run.flop_counter import counted_attention
from undivided.selection.policy import Policy

MergeMethod = Literal["all_gather", "ring"]


class DecodeStep(NamedTuple):
    """One rank's part of a step of generation.

    problem: over the keys of all ranks. local: what this rank computes over its own keys; None if it has none.
    """

    problem: Problem
    q: Tensor
    sinks: Tensor | None
    local: tuple[Backend, Call, Tensors] | None


def prepare_step(
    request: Request, positions: Tensor, kv_len: int, by: MergeMethod
) -> tuple[DecodeStep, SharedArguments]:
    """This rank's part, validated, and the values that all ranks must share; see `ContextParallel.decode`."""
    policy = policy_over_ranks(request)
    q, k, v = autograd.cast_under_autocast(*request.tensors[:3])
    request = request._replace(tensors=request.tensors._replace(q=q, k=k, v=v))
    (q, k, _, _, sinks, slopes), layout = request.tensors, request.options.layout
    check_values(q)
    check_local(request)
    check_merge_method(by)
    check_length("kv_len", kv_len)
    axis = SEQUENCE_AXIS[layout]
    _check_positions(positions, k.shape[axis], kv_len)
    whole = whole_call(request, q.shape[axis], kv_len, (False,) * 6, resize_bias=False)
    problem = whole.problem
    form = whole.mask.normal_form(problem.batch, problem.heads, problem.q_len, kv_len, q.device)
    rows = torch.arange(problem.q_len, device=q.device)
    own_form = form.shard(rows, positions.to(q.device))
    mask = piece_mask(own_form, slopes is not None)
    count = positions.numel()
    heads, kv_heads = slice(0, problem.heads), slice(0, problem.kv_heads)
    piece = Piece(0, heads, kv_heads, slice(0, problem.q_len), slice(0, count), own_form, mask)
    local = _local_work(request.tensors, piece, whole, policy) if count else None
    shared: SharedArguments = {
        CALL: "ContextParallel.decode()",
        "q": describe_queries(problem),
        "k": describe_sizes(heads=problem.kv_heads, value_size=problem.v_dim),
        "kv_len": kv_len,
        "mask": describe_mask(whole.mask),
        "scale": whole.scale,
        "softcap": whole.softcap,
        "by": by,
        "features": sorted(problem.features),
    }
    return DecodeStep(problem, _layout.canonical(q, layout), sinks, local), shared


def check_merge_method(by: object) -> None:
    """InputError unless it is a `MergeMethod`."""
    checked_choice("by", by, ("all_gather", "ring"))


def decode(axes: Sequence[Communicator], step: DecodeStep, by: MergeMethod) -> tuple[Tensor, Tensor]:
    """(out, lse) over all keys, merged from the partial results of all ranks."""
    problem, (batch, rows, heads, _) = step.problem, step.q.shape
    if step.local is None:
        dtype = lse_dtype(problem.dtype)
        out = step.q.new_zeros((batch, rows, heads, problem.v_dim), dtype=dtype)
        partial = Result(out, step.q.new_full((batch, heads, rows), -torch.inf, dtype=dtype))
    else:
        partial = attend_own_keys(*step.local)
    return merge_ranks(axes, partial, step.sinks, problem, by)


def attend_own_keys(backend: Backend, call: Call, tensors: Tensors) -> Result:
    """The attention over this rank's keys, which PyTorch's FLOP counters count with all queries, whatever the mask."""
    problem = call.problem
    with counted_attention(problem, problem.batch * problem.heads * problem.q_len * problem.kv_len):
        return autograd.forward(backend, call, tensors)


def merge_ranks(
    axes: Sequence[Communicator],
    partial: Result,
    sinks: Tensor | None,
    problem: Problem,
    by: MergeMethod,
    rows: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) for the caller, from the results of all ranks over their own keys, without sinks.

    partial: out [B, S, H, Dv] and lse [B, H, S] of this rank. problem: with the caller's layout and dtype. rows: the
    rows of each rank, if it needs no others; `by` then has no effect unless the mesh has two axes.
    """
    dtype = lse_dtype(problem.dtype)
    merged = torch.cat([partial.out.to(dtype), partial.lse.transpose(1, 2).unsqueeze(-1)], -1)
    divided_axes = [comm for comm in axes if comm.world > 1]
    if rows is not None and len(divided_axes) == 1:
        merged = _merge_own_rows(divided_axes[0], [merged.index_select(1, own) for own in rows])
    else:
        for comm in reversed(axes):
            merged = _merge_axis(comm, merged.flatten(0, 2), by).view(merged.shape)
        if rows is not None:
            ring, heads = axes
            merged = merged.index_select(1, rows[ring.rank * heads.world + heads.rank])
    out, lse = merged[..., :-1], merged[..., -1].transpose(1, 2).contiguous()  # [B, H, Sq]
    if sinks is not None:
        out = out * sink_factor(lse, sinks).transpose(1, 2).unsqueeze(-1)
    out = _layout.from_canonical(out.to(problem.dtype), problem.layout).contiguous()
    return out, lse.squeeze(0) if problem.packed else lse


def _merge_axis(comm: Communicator, partial: Tensor, by: MergeMethod) -> Tensor:
    """The rows [n, Dv + 1] merged over the ranks of one axis of the mesh; the last column is the log-sum-exp."""
    if comm.world == 1:
        return partial
    if by == "all_gather":
        return _merge(gather_uneven(comm, partial, [len(partial)] * comm.world))
    chunks = partial.tensor_split(comm.world)
    return torch.cat(gather_uneven(comm, _merge_own_rows(comm, chunks), [len(chunk) for chunk in chunks]))


def _merge_own_rows(comm: Communicator, chunks: Sequence[Tensor]) -> Tensor:
    """This rank's chunk of [.., Dv + 1], merged over all ranks; chunk r goes to rank r."""
    own = chunks[comm.rank]
    results = [own if rank == comm.rank else torch.empty_like(own) for rank in range(comm.world)]
    swap(comm, chunks, results, "the exchange of partial results")
    return _merge([result.flatten(0, -2) for result in results]).view(own.shape)


def _merge(results: Sequence[Tensor]) -> Tensor:
    """Results over disjoint keys, merged in order; `merge_into` sees each (row, head) as a sequence of one row."""
    total = results[0].clone()
    for partial in results[1:]:
        merge_into(_as_result(total), _as_result(partial))
    return total


def _as_result(rows: Tensor) -> Result:
    return Result(rows[None, :, None, :-1], rows[None, None, :, -1])


def _local_work(tensors: Tensors, piece: Piece, whole: Call, policy: Policy) -> tuple[Backend, Call, Tensors]:
    """The backend, call and tensors of the attention over this rank's keys."""
    q, k, v = (with_contiguous_rows(_layout.canonical(t, whole.problem.layout)) for t in tensors[:3])
    bias = with_four_bias_axes(tensors).bias
    if bias is not None:
        bias = take_unless_broadcast(bias, 3, piece.key_index)
    backend, problem = select_backend(piece_problem(whole.problem, piece), Machine.this(q.device), policy)
    call = whole.with_problem(problem, mask=piece.mask, checked_mask=None)
    return backend, call, Tensors(q, k, v, bias, None, tensors.alibi_slopes)


def _check_positions(positions: Tensor, keys: int, kv_len: int) -> None:
    if not isinstance(positions, Tensor) or positions.dtype != torch.int64 or positions.shape != (keys,):
        got = (
            f"{positions.dtype} {list(positions.shape)}" if isinstance(positions, Tensor) else type(positions).__name__
        )
        raise InputError("positions", f"be int64 [{keys}], one for each key of this rank", got)
    check_tensor("positions", positions)
    if positions.is_meta:
        raise InputError("positions", "hold values", "a meta tensor")
    if positions.device.type != "cpu" or not keys:
        return
    if bool((positions.diff() <= 0).any()) or int(positions[0]) < 0 or int(positions[-1]) >= kv_len:
        raise InputError("positions", f"ascend and lie in [0, kv_len={kv_len})", positions.tolist()[:8])

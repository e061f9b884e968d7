"""Generation over a cache that is spread over ranks: queries everywhere, keys in one place each, partial results
merged.

The new tokens are few and the cached keys many, so nothing of the keys is sent: every rank attends to the keys that it
holds, and what travels are outputs and their log-sum-exps, merged as parts over disjoint keys always are. Two ways to
bring them together; n bytes of a partial result, W ranks:

    all_gather   each rank sends its own to all, one exchange: (W - 1) n
    ring         each rank adds up 1 / W of the rows for all, then all send theirs: two exchanges, 2 (W - 1) n / W

Parts are added up in the order of the ranks, so that all ranks get the same bits.

Source: the second is a ring all-reduce (Patarasuk and Yuan 2009) with attention's merge for a sum, without its W - 1
    hops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from undivided import _autograd, _layout
from undivided._call import Call
from undivided._machine import Machine
from undivided._normalise import normalise
from undivided._policy import Policy
from undivided._problem import Problem
from undivided._request import Request, Tensors
from undivided._result import Result, lse_dtype, merge_into, sink_factor
from undivided.backends._base import Backend
from undivided.context_parallel._call import piece_problem
from undivided.context_parallel._index import as_index, unless_broadcast
from undivided.context_parallel._pieces import Piece, in_simple_words
from undivided.context_parallel._request import check_own, check_values, decided
from undivided.context_parallel._shards import SEQUENCE_AXIS
from undivided.context_parallel.exchange.collectives import Communicator, gather_uneven
from undivided.context_parallel.exchange.handshake import Said, mask_words
from undivided.errors import InputError
from undivided.masks import Mask
from undivided.masks.normal_form import Ranges

By = Literal["all_gather", "ring"]


class Step(NamedTuple):
    """One rank's part of a step of generation: the whole's problem, and what it computes itself, None without keys."""

    problem: Problem
    q: Tensor
    sinks: Tensor | None
    own: tuple[Backend, Call, Tensors] | None


def prepared(request: Request, positions: Tensor, kv_len: int, allowed: Policy, by: By) -> tuple[Step, Said]:
    """This rank's part, validated, and what must be the same on every rank; see `ContextParallel.decode`."""
    (q, k, _, _, sinks, slopes), layout = request.tensors, request.options.layout
    check_values(q)
    check_own(request)
    if by not in ("all_gather", "ring"):
        raise InputError("by", "be 'all_gather' or 'ring'", repr(by))
    _check_positions(positions, k.shape[SEQUENCE_AXIS[layout]], kv_len)
    whole = _whole(request, kv_len)
    problem = whole.problem
    form = whole.mask.normal_form(problem.batch, problem.heads, problem.q_len, kv_len, q.device)
    rows = torch.arange(problem.q_len, device=q.device)
    part = form.shard(rows, positions.to(q.device))
    mask = Mask(parts=(Ranges(part),)) if slopes is not None else in_simple_words(part)
    count = positions.numel()
    heads, kv_heads = slice(0, problem.heads), slice(0, problem.kv_heads)
    piece = Piece(0, heads, kv_heads, slice(0, problem.q_len), slice(0, count), part, mask)
    own = _own(request.tensors, piece, whole, allowed) if count else None
    words: Said = {
        "q": (layout, problem.batch, problem.q_len, problem.heads, problem.qk_dim, problem.dtype),
        "k": (problem.kv_heads, problem.v_dim),
        "kv_len": kv_len,
        "mask": mask_words(whole.mask),
        "scale": whole.scale,
        "softcap": whole.softcap,
        "by": by,
        "features": sorted(problem.features),
    }
    return Step(problem, _layout.canonical(q, layout), sinks, own), words


def decode(axes: Sequence[Communicator], step: Step, by: By) -> tuple[Tensor, Tensor]:
    """(out, lse) over all keys, from what each rank finds in its own."""
    problem, (batch, rows, heads, _) = step.problem, step.q.shape
    dtype = lse_dtype(problem.dtype)
    if step.own is None:
        mine = step.q.new_zeros((batch * rows * heads, problem.v_dim + 1), dtype=dtype)
        mine[:, -1] = -torch.inf
    else:
        out, lse = _autograd.forward(*step.own)
        mine = torch.cat([out.to(dtype), lse.transpose(1, 2).unsqueeze(-1)], -1).flatten(0, 2)
    for comm in reversed(axes):
        mine = _together(comm, mine, by)
    found = mine.view(batch, rows, heads, -1)
    out, lse = found[..., :-1], found[..., -1].transpose(1, 2).contiguous()  # [B, H, Sq]
    if step.sinks is not None:
        out = out * sink_factor(lse, step.sinks).transpose(1, 2).unsqueeze(-1)
    out = _layout.restore(out.to(problem.dtype), problem.layout).contiguous()
    return out, lse.squeeze(0) if problem.packed else lse


def _together(comm: Communicator, mine: Tensor, by: By) -> Tensor:
    """Of rows [n, Dv + 1] that every rank has its part of, the sums; the last column is the log-sum-exp."""
    if comm.world == 1:
        return mine
    if by == "all_gather":
        return _added(gather_uneven(comm, mine, [len(mine)] * comm.world))
    chunks = mine.tensor_split(comm.world)
    sizes, own = [len(chunk) for chunk in chunks], chunks[comm.rank]
    others = [rank for rank in range(comm.world) if rank != comm.rank]
    parts = [own if rank == comm.rank else torch.empty_like(own) for rank in range(comm.world)]
    comm.exchange({rank: [chunks[rank]] for rank in others}, {rank: [parts[rank]] for rank in others})()
    return torch.cat(gather_uneven(comm, _added(parts), sizes))


def _added(parts: Sequence[Tensor]) -> Tensor:
    """Parts over disjoint keys, merged one after another; a row and head is a sequence of one row to `merge_into`."""
    total = parts[0].clone()
    for part in parts[1:]:
        merge_into(_as_result(total), _as_result(part))
    return total


def _as_result(rows: Tensor) -> Result:
    return Result(rows[None, :, None, :-1], rows[None, None, :, -1])


def _own(tensors: Tensors, piece: Piece, whole: Call, allowed: Policy) -> tuple[Backend, Call, Tensors]:
    """Attention over the keys of this rank: what runs it, and on what."""
    q, k, v = (_layout.canonical(t, whole.problem.layout) for t in tensors[:3])
    bias = tensors.bias
    if bias is not None:
        assert piece.form.key_index is not None
        bias = unless_broadcast(bias[(None,) * (4 - bias.dim())], 3, as_index(piece.form.key_index))
    q, k, v = (t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous() for t in (q, k, v))
    backend, problem = decided(piece_problem(whole.problem, piece), Machine.this(q.device), allowed)
    call = whole.with_problem(problem, mask=piece.mask, checked_mask=None)
    return backend, call, Tensors(q, k, v, bias, None, tensors.alibi_slopes)


def _whole(request: Request, kv_len: int) -> Call:
    """The call over all keys, checked without contents."""
    axis, (q, k, v, *rest) = SEQUENCE_AXIS[request.options.layout], request.tensors
    sized = []
    for tensor, length in ((q, None), (k, kv_len), (v, kv_len)):
        shape = list(tensor.shape)
        shape[axis] = shape[axis] if length is None else length
        sized.append(torch.empty(shape, dtype=tensor.dtype, device="meta"))
    others = [None if t is None else torch.empty_like(t, device="meta") for t in rest]
    return normalise(request._replace(tensors=Tensors(*sized, *others)), q.device.type, (False,) * 6)[0]


def _check_positions(positions: Tensor, keys: int, kv_len: int) -> None:
    if not isinstance(positions, Tensor) or positions.dtype != torch.int64 or positions.shape != (keys,):
        got = (
            f"{positions.dtype} {list(positions.shape)}" if isinstance(positions, Tensor) else type(positions).__name__
        )
        raise InputError("positions", f"be int64 [{keys}], one for each key that this rank holds", got)
    if positions.device.type != "cpu" or not keys:
        return
    if bool((positions.diff() <= 0).any()) or int(positions[0]) < 0 or int(positions[-1]) >= kv_len:
        raise InputError("positions", f"ascend from 0 to below kv_len ({kv_len})", positions.tolist()[:8])

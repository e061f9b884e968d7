"""One rank's call: its tensors as shares and rounds, in the order that forward and backward both follow.

Legend: B batch, R rows of a share, H query heads, N key heads, K keys of a round, D head size; tensors are
[B, S, H, D].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from undivided.arguments import layout as _layout
from undivided.arguments.tensors import with_contiguous_rows
from undivided.backends._base import Backend
from undivided.context_parallel._index import count, join, take, take_unless_broadcast, within
from undivided.context_parallel._pieces import Piece, Round
from undivided.context_parallel._schedule import Schedule
from undivided.context_parallel.exchange.collectives import CountingCommunicator
from undivided.context_parallel.exchange.profiles import profiled_round
from undivided.request.call import Call
from undivided.request.problem import Problem
from undivided.request.request import Tensors

PieceBackend = tuple[Backend, Problem]
"""The backend of a piece, and the problem that it gets."""
PieceBackends = tuple[tuple[PieceBackend, ...], ...]
"""Those of all pieces, by round."""


@dataclass(frozen=True, eq=False)
class RankCall:
    """One rank's call.

    whole: the call over the tokens of all ranks, validated.
    ring_axis, heads_axis: this rank's communicators along the axes of the mesh.
    bias_has_rows: whether the bias has one row per query of this rank, instead of one row for all.
    """

    whole: Call
    schedule: Schedule
    backends: PieceBackends
    ring_axis: CountingCommunicator
    heads_axis: CountingCommunicator
    bias_has_rows: bool

    @property
    def problem(self) -> Problem:
        """The problem over the tokens of all ranks."""
        return self.whole.problem


class ShareTensors(NamedTuple):
    """The tensors of one share: q [B, R, H, Dk], bias [B|1, H|1, R|1, Sk|1], slopes [.., H], sinks [H]."""

    q: Tensor
    bias: Tensor | None
    slopes: Tensor | None
    sinks: Tensor | None


def to_shares(call: RankCall, inputs: Sequence[Tensor | None]) -> tuple[list[ShareTensors], Tensor, Tensor]:
    """The tensors of this rank's shares, and the keys and values of its heads, after the all-to-all exchange."""
    layout, schedule = call.problem.layout, call.schedule
    q, k, v = (with_contiguous_rows(_layout.canonical(t, layout)) for t in inputs[:3] if t is not None)
    bias, sinks, slopes = inputs[3:]
    row_tensors = [q] if bias is None or not call.bias_has_rows else [q, bias.transpose(1, 2)]
    wait_rows = schedule.queries.to_shares(call.heads_axis, row_tensors)
    wait_keys = schedule.keys.to_shares(call.heads_axis, [k, v])
    shares = []
    for share, (share_q, *rest) in zip(schedule.shares, wait_rows(), strict=True):
        if rest:
            share_bias: Tensor | None = rest[0].transpose(1, 2)
        else:
            share_bias = None if bias is None else take_unless_broadcast(bias, 1, share.heads)
        per_head = [None if t is None else t[..., share.heads] for t in (slopes, sinks)]
        shares.append(ShareTensors(share_q, share_bias, *per_head))
    ((k, v),) = wait_keys()
    return shares, k, v


def arrivals(call: RankCall, k: Tensor, v: Tensor) -> Iterator[tuple[int, Round, Tensor, Tensor]]:
    """(number, round, keys, values) of every round; those of the next round are in flight while the caller computes.

    The caller must ``del`` a round's keys and values before the next round, or both are alive at the same time.
    """
    rounds = call.schedule.rounds
    with profiled_round("post keys", 0):
        wait = _post_exchange(call, 0, k, v)
    for index, round_ in enumerate(rounds):
        with profiled_round("wait for keys", index):
            keys = wait()
        if index + 1 < len(rounds):
            with profiled_round("post keys", index + 1):
                wait = _post_exchange(call, index + 1, k, v)
        yield index, round_, keys.pop(0), keys.pop(0)


def _post_exchange(call: RankCall, index: int, k: Tensor, v: Tensor) -> Callable[[], list[Tensor]]:
    """Post the exchange of a round; the result waits and returns the keys and values, in ascending order."""
    round_ = call.schedule.rounds[index]
    own = [t[:, :, within(round_.kv_heads, call.schedule.kv_heads)] for t in (k, v)]
    received = {peer: [t.new_empty((t.shape[0], n, *t.shape[2:])) for t in own] for peer, n in round_.receives}
    wait = call.ring_axis.exchange(
        {peer: [take(t, 1, keys).contiguous() for t in own] for peer, keys in round_.sends},
        received,
        f"the exchange of keys and values for round {index + 1} of {len(call.schedule.rounds)}",
    )

    def keys_and_values() -> list[Tensor]:
        wait()
        joined = []
        for tensor in own:
            chunks = [] if round_.own is None else [take(tensor, 1, round_.own)]
            chunks += [tensors.pop(0) for tensors in received.values()]
            joined.append(join(chunks or [tensor[:, :0]], round_.slots))
        return joined

    return keys_and_values


def piece_call(call: RankCall, piece: Piece, problem: Problem) -> Call:
    """The call of a backend for one piece, without its tensors."""
    needs = call.whole.needs
    piece_needs = (*needs[:4], False, needs[5])
    return call.whole.with_problem(problem, mask=piece.mask, needs=piece_needs, checked_mask=None)


def piece_tensors(
    call: RankCall, share: ShareTensors, round_: Round, piece: Piece, k_r: Tensor, v_r: Tensor
) -> Tensors:
    """The tensors of one piece, [B, S, H, D]: views of the share's tensors and of the round's keys and values."""
    heads = within(piece.heads, call.schedule.shares[piece.share].heads)
    kv_heads = within(piece.kv_heads, round_.kv_heads)
    bias = share.bias
    if bias is not None:
        bias = take_unless_broadcast(take_unless_broadcast(bias, 1, heads), 2, piece.rows)
        bias = take_unless_broadcast(bias, 3, piece.key_index)
    slopes = None if share.slopes is None else share.slopes[..., heads]
    q, k, v = share.q[:, piece.rows, heads], k_r[:, piece.keys, kv_heads], v_r[:, piece.keys, kv_heads]
    return Tensors(q, k, v, bias, None, slopes)


def piece_problem(problem: Problem, piece: Piece) -> Problem:
    """The problem of one piece, from the problem over the tokens of all ranks."""
    heads, kv_heads = count(piece.heads), count(piece.kv_heads)
    dropped = {"sinks", "sinks_grad", "gqa"}
    added = {
        "lse": True,
        "gqa": heads != kv_heads,
        "partial": "backward" in problem.features,
        "some_heads": "dropout" in problem.features and piece.form.first_head > 0,
    }
    features = (problem.features - dropped) | {name for name, needed in added.items() if needed}
    q_len, kv_len = count(piece.rows), count(piece.keys)
    align = None if not piece.mask.kinds or "ranges" in piece.mask.kinds else "bottom_right"
    if align is not None and q_len == kv_len:
        align = "both"
    return problem._replace(
        layout="bshd",
        heads=heads,
        kv_heads=kv_heads,
        q_len=q_len,
        kv_len=kv_len,
        mask=piece.mask.structure,
        align=align,
        features=frozenset(features),
        documents=None,
    )

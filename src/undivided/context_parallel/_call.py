"""One rank's call: its tensors as shares and rounds, which forward and backward go through alike.

Legend: B batch, R rows of a share, H query heads, N key heads, K keys of a round, D head size; tensors are [B, S, H,
    D].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from undivided import _layout
from undivided._call import Call
from undivided._problem import Problem
from undivided._request import Tensors
from undivided.backends._base import Backend
from undivided.context_parallel._index import count, joined, take, unless_broadcast
from undivided.context_parallel._pieces import Piece, Round
from undivided.context_parallel._schedule import Schedule
from undivided.context_parallel.exchange.collectives import Counted

Run = tuple[Backend, Problem]


@dataclass(frozen=True, eq=False)
class RankCall:
    """One rank's call.

    whole: the call of all ranks' tokens, checked.
    runs: for every round and piece, what runs it. by_row: whether the bias has rows of its own for this rank's queries.
    """

    whole: Call
    schedule: Schedule
    runs: tuple[tuple[Run, ...], ...]
    ring: Counted
    heads: Counted
    by_row: bool

    @property
    def problem(self) -> Problem:
        """Of the whole."""
        return self.whole.problem


class ShareTensors(NamedTuple):
    """The tensors of one share: q [B, R, H, Dk], bias [B|1, H|1, R|1, Sk|1], slopes [.., H], sinks [H]."""

    q: Tensor
    bias: Tensor | None
    slopes: Tensor | None
    sinks: Tensor | None


def traded(call: RankCall, inputs: Sequence[Tensor | None]) -> tuple[list[ShareTensors], Tensor, Tensor]:
    """The tensors of this rank's shares, and the keys and values of its heads."""
    layout, schedule = call.problem.layout, call.schedule
    q, k, v = (_readable(_layout.canonical(t, layout)) for t in inputs[:3] if t is not None)
    bias, sinks, slopes = inputs[3:]
    rows = [q] if bias is None or not call.by_row else [q, bias.transpose(1, 2)]
    asked, keys = schedule.queries.to_shares(call.heads, rows), schedule.keys.to_shares(call.heads, [k, v])
    shares = []
    for of, (mine, *more) in zip(schedule.shares, asked(), strict=True):
        part = more[0].transpose(1, 2) if more else None if bias is None else unless_broadcast(bias, 1, of.heads)
        some = [None if t is None else t[..., of.heads] for t in (slopes, sinks)]
        shares.append(ShareTensors(mine, part, *some))
    ((k, v),) = keys()
    return shares, k, v


def _readable(tensor: Tensor) -> Tensor:
    """With rows that are contiguous, as problems of pieces promise."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def arrivals(call: RankCall, k: Tensor, v: Tensor) -> Iterator[tuple[int, Round, Tensor, Tensor]]:
    """Every round with its keys and values; the next round's are on their way while the caller computes.

    The caller must let go of a round's keys (``del``) before it asks for the next, or both are held at once.
    """
    rounds = call.schedule.rounds
    coming = _asked(call, rounds[0], k, v)
    for index, round_ in enumerate(rounds):
        keys = coming()
        if index + 1 < len(rounds):
            coming = _asked(call, rounds[index + 1], k, v)
        yield index, round_, keys.pop(0), keys.pop(0)


def _asked(call: RankCall, round_: Round, k: Tensor, v: Tensor) -> Callable[[], list[Tensor]]:
    """Post the exchange of a round; the result waits for its keys and values, in ascending order."""
    mine = [t[:, :, heads_of(call, round_)] for t in (k, v)]
    arriving = {peer: [t.new_empty((t.shape[0], n, *t.shape[2:])) for t in mine] for peer, n in round_.receives}
    wait = call.ring.exchange(
        {peer: [take(t, 1, index).contiguous() for t in mine] for peer, index in round_.sends}, arriving
    )

    def arrived() -> list[Tensor]:
        wait()
        found = []
        for tensor in mine:
            own = [] if round_.own is None else [take(tensor, 1, round_.own)]
            parts = own + [tensors.pop(0) for tensors in arriving.values()]
            found.append(joined(parts or [tensor[:, :0]], round_.where))
        return found

    return arrived


def heads_of(call: RankCall, round_: Round) -> slice:
    """A round's key heads among those of this rank."""
    first = call.schedule.kv_heads.start
    return slice(round_.kv_heads.start - first, round_.kv_heads.stop - first)


def within_share(call: RankCall, piece: Piece) -> slice:
    """A piece's query heads among those of its share."""
    first = call.schedule.shares[piece.share].heads.start
    return slice(piece.heads.start - first, piece.heads.stop - first)


def piece_call(call: RankCall, piece: Piece, problem: Problem) -> Call:
    """The call of a backend for one piece, without its tensors."""
    needs = call.whole.needs
    mine = (*needs[:4], False, needs[5])
    return call.whole.with_problem(problem, mask=piece.mask, needs=mine, checked_mask=None)


def piece_tensors(
    call: RankCall, share: ShareTensors, round_: Round, piece: Piece, k_r: Tensor, v_r: Tensor
) -> Tensors:
    """The tensors of one piece, [B, S, H, D], views."""
    heads = within_share(call, piece)
    kv_heads = slice(piece.kv_heads.start - round_.kv_heads.start, piece.kv_heads.stop - round_.kv_heads.start)
    bias = share.bias
    if bias is not None:
        bias = unless_broadcast(unless_broadcast(bias, 1, heads), 2, piece.rows)
        bias = unless_broadcast(bias, 3, piece.key_index)
    slopes = None if share.slopes is None else share.slopes[..., heads]
    q, k, v = share.q[:, piece.rows, heads], k_r[:, piece.keys, kv_heads], v_r[:, piece.keys, kv_heads]
    return Tensors(q, k, v, bias, None, slopes)


def piece_problem(problem: Problem, piece: Piece) -> Problem:
    """What a piece asks of a backend."""
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

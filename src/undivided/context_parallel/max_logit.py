"""The largest score of each head over all ranks: keys arrive in rounds, and only maxima are stored.

The rounds are those of the forward pass, so each pair is computed on one rank only. Values are not sent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from undivided.backends import reference
from undivided.context_parallel._call import RankCall, arrivals, piece_call, piece_tensors, to_shares
from undivided.context_parallel.exchange.collectives import gather_rows
from undivided.request.call import Call
from undivided.request.problem import Problem
from undivided.request.request import Tensors
from undivided.request.result import lse_dtype


def update_maxima(maxima: Tensor, call: Call, tensors: Tensors) -> None:
    """Raise `maxima` [H], in place, to the largest allowed score of each head of a call, computed block by block."""
    for block, score in reference.score_blocks(call, tensors):
        if score.shape[-1]:
            block_maxima = maxima[block.heads]
            torch.maximum(block_maxima, score.amax((0, 2, 3)), out=block_maxima)


def head_maxima(call: RankCall, problems: Sequence[Sequence[Problem]], inputs: Sequence[Tensor | None]) -> Tensor:
    """The largest allowed score of each head, [H], the same on every rank; see `ContextParallel.max_logit`.

    problems: for every round, the problems of its pieces. inputs: in the order of `Tensors`, with a v that has no
    columns.
    """
    shares, k, v = to_shares(call, inputs)
    maxima = k.new_full((call.problem.heads,), -torch.inf, dtype=lse_dtype(call.problem.dtype))
    for index, round_, k_r, v_r in arrivals(call, k, v):
        for piece, problem in zip(round_.pieces, problems[index], strict=True):
            tensors = piece_tensors(call, shares[piece.share], round_, piece, k_r, v_r)
            update_maxima(maxima[piece.heads], piece_call(call, piece, problem), tensors)
        del k_r, v_r
    axes = call.ring_axis, call.heads_axis
    all_maxima = gather_rows(axes, maxima[None], [1] * (call.ring_axis.world * call.heads_axis.world))
    return torch.cat(all_maxima).amax(0)

"""The largest score of each head over all ranks: keys come round by round, and only maxima are kept.

The rounds are those of the forward pass, so that a rank looks at no pair that another looks at; values are not sent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from undivided._problem import Problem
from undivided._result import lse_dtype
from undivided.backends import reference
from undivided.context_parallel._call import RankCall, arrivals, piece_call, piece_tensors, traded
from undivided.context_parallel.exchange.collectives import gather_rows


def largest(call: RankCall, parts: Sequence[Sequence[Problem]], inputs: Sequence[Tensor | None]) -> Tensor:
    """The largest allowed score of each head, [H], the same on every rank; see `ContextParallel.max_logit`.

    Args:
        parts: the problem of every round's pieces.
        inputs: in the order of `Tensors`; v has no columns.
    """
    shares, k, v = traded(call, inputs)
    found = k.new_full((call.problem.heads,), -torch.inf, dtype=lse_dtype(call.problem.dtype))
    for index, round_, k_r, v_r in arrivals(call, k, v):
        for piece, part in zip(round_.pieces, parts[index], strict=True):
            tensors = piece_tensors(call, shares[piece.share], round_, piece, k_r, v_r)
            for block, score in reference.score_blocks(piece_call(call, piece, part), tensors):
                if score.shape[-1]:
                    of_heads = found[piece.heads][block.heads]
                    torch.maximum(of_heads, score.amax((0, 2, 3)), out=of_heads)
        del k_r, v_r
    axes = call.ring, call.heads
    everywhere = gather_rows(axes, found[None], [1] * (call.ring.world * call.heads.world))
    return torch.cat(everywhere).amax(0)

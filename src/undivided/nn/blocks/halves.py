"""`both_halves`: the features of a gated activation, whose halves are multiplied, over tensor ranks.

The first map of a gated block has 2 f features, and rank r of n holds 2 f / n consecutive ones: most ranks have a part
of one half only. Cut into 2 n pieces, a rank holds pieces 2 r and 2 r + 1, and uses r and r + n. So it sends at most
two pieces, where a gather of all features would send 2 (n - 1).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from undivided.context_parallel.exchange.collectives import ProcessGroup
from undivided.nn.blocks.rank_calls import running_call
from undivided.nn.blocks.tensor_ranks import TensorRanks

_STEP = "the exchange of gated features"


def both_halves(x: Tensor, ranks: TensorRanks) -> Tensor:
    """This rank's part of both halves of the features, from its consecutive features; the gradient goes back.

    Args:
        x: [.., 2 f / ranks], features ``2 f / ranks * rank`` and the following ones.
        ranks: that have the other features.

    Returns:
        [.., 2 f / ranks]: features ``f / ranks * rank`` and the following ones, then the same of the second half.
    """
    if not torch.compiler.is_compiling():
        exchanged: Tensor = _PieceExchange.apply(x, ranks, f"{_STEP} in {running_call()}", False)  # type: ignore[no-untyped-call]
        return exchanged
    whole, width = ranks.gather_features(x), x.shape[-1] // 2
    pieces = (whole.narrow(-1, piece * width, width) for piece in _used_pieces(ranks.rank, ranks.size))
    return torch.cat(list(pieces), -1)


def _held_pieces(rank: int, size: int) -> tuple[int, int]:
    """The pieces that a rank holds of 2 size."""
    return 2 * rank, 2 * rank + 1


def _used_pieces(rank: int, size: int) -> tuple[int, int]:
    """The pieces that a rank multiplies."""
    return rank, rank + size


class _PieceExchange(torch.autograd.Function):
    """The used pieces from the held ones, or the held ones from the used ones: each is the gradient of the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks, step: str, back: bool) -> Tensor:
        """The pieces of this rank after the exchange, [.., 2 f / ranks]."""
        ctx.ranks, ctx.step, ctx.back = ranks, step, back
        before, after = (_used_pieces, _held_pieces) if back else (_held_pieces, _used_pieces)
        group = ProcessGroup(ranks.group)
        pieces = dict(zip(before(group.rank, group.world), (part.contiguous() for part in x.chunk(2, -1)), strict=True))
        arrived = {piece: torch.empty_like(next(iter(pieces.values()))) for piece in after(group.rank, group.world)}
        others = [rank for rank in range(group.world) if rank != group.rank]
        sends = {rank: [pieces[p] for p in after(rank, group.world) if p in pieces] for rank in others}
        receives = {rank: [arrived[p] for p in before(rank, group.world) if p in arrived] for rank in others}
        group.exchange(sends, receives, step)()
        return torch.cat([pieces.get(piece, arrived[piece]) for piece in arrived], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        """The gradient of the pieces before the exchange."""
        step = f"the gradient of {ctx.step.removeprefix('the gradient of ')}"
        return _PieceExchange.apply(gradient, ctx.ranks, step, not ctx.back), None, None, None  # type: ignore[no-untyped-call]

"""`both_halves`: the features of a gated activation, whose halves are multiplied, over tensor ranks.

The first map of a gated block has 2 f features, and rank r of n holds 2 f / n consecutive ones: most ranks have a part
of one half only. Cut into 2 n pieces, a rank holds pieces 2 r and 2 r + 1, and uses r and r + n. So it sends at most
two pieces, where a gather of all features would send 2 (n - 1).
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from undivided.context_parallel.exchange.collectives import ProcessGroup
from undivided.nn.blocks.exchanged import exchanged
from undivided.nn.blocks.tensor_ranks import TensorRanks


def both_halves(x: Tensor, ranks: TensorRanks) -> Tensor:
    """This rank's part of both halves of the features, from its consecutive features; the gradient goes back.

    Args:
        x: [.., 2 f / ranks], features ``2 f / ranks * rank`` and the following ones.
        ranks: that have the other features.

    Returns:
        [.., 2 f / ranks]: features ``f / ranks * rank`` and the following ones, then the same of the second half.
    """
    if not torch.compiler.is_compiling():
        exchanges = (functools.partial(_exchange_pieces, ranks, back) for back in (False, True))
        return exchanged(x, "the exchange of gated features", *exchanges)
    whole, width = ranks.gather_features(x), x.shape[-1] // 2
    pieces = (whole.narrow(-1, piece * width, width) for piece in _used_pieces(ranks.rank, ranks.size))
    return torch.cat(list(pieces), -1)


def _held_pieces(rank: int, size: int) -> tuple[int, int]:
    """The pieces that a rank holds of 2 size."""
    return 2 * rank, 2 * rank + 1


def _used_pieces(rank: int, size: int) -> tuple[int, int]:
    """The pieces that a rank multiplies."""
    return rank, rank + size


def _exchange_pieces(ranks: TensorRanks, back: bool, x: Tensor, step: str) -> Tensor:
    """The used pieces from the held ones, or back the held ones from the used ones, [.., 2 f / ranks]."""
    before, after = (_used_pieces, _held_pieces) if back else (_held_pieces, _used_pieces)
    group = ProcessGroup(ranks.group)
    pieces = dict(zip(before(group.rank, group.world), (part.contiguous() for part in x.chunk(2, -1)), strict=True))
    arrived = {piece: torch.empty_like(next(iter(pieces.values()))) for piece in after(group.rank, group.world)}
    others = [rank for rank in range(group.world) if rank != group.rank]
    sends = {rank: [pieces[p] for p in after(rank, group.world) if p in pieces] for rank in others}
    receives = {rank: [arrived[p] for p in before(rank, group.world) if p in arrived] for rank in others}
    group.exchange(sends, receives, step)()
    return torch.cat([pieces.get(piece, arrived[piece]) for piece in arrived], -1)

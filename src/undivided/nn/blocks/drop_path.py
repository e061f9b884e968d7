"""Stochastic depth: omit the output of a block for whole sequences, in training."""

from __future__ import annotations

import torch
from torch import Tensor

from undivided import masks
from undivided.arguments.graphs import outside_of_graphs
from undivided.arguments.layout import Layout
from undivided.context_parallel import ContextParallel
from undivided.nn.arguments import hidden_states as hidden
from undivided.nn.blocks.tensor_ranks import TensorRanks


def drop_path_scale(
    out: Tensor,
    rate: float,
    format: Layout,
    cu_seqlens: Tensor | None,
    ranks: TensorRanks | None = None,
    cp: ContextParallel | None = None,
) -> Tensor:
    """1 / (1 - rate) for each sequence that is kept and 0 for the others, broadcastable to `out`.

    Args:
        out: the output of the block, of which a rank has some tokens.
        rate: the probability of dropping a sequence.
        format: the format of `out`.
        cu_seqlens: the offsets of packed sequences in memory, over the tokens of all ranks.
        ranks: the tensor parallel ranks, whose generators have one state.
        cp: the context parallel ranks, which drop the same sequences although their generators differ.

    Source: Huang et al. 2016 (arXiv:1603.09382).
    """
    keep = 1 - rate
    count = hidden.sequence_count(out, format, cu_seqlens)
    drawn = torch.rand(count, device=out.device) if cp is None else _drawn_on_all_ranks(count, out.device, cp)
    scale = drawn.lt(keep).to(out.dtype) / max(keep, 1e-30)
    if format != "thd":
        return scale[None, :, None] if format == "sbhd" else scale[:, None, None]
    assert cu_seqlens is not None
    ends, token = cu_seqlens[1:].to(out.device).long(), _tokens(out, cu_seqlens, ranks, cp)
    return scale[torch.searchsorted(ends, token, right=True).clamp(max=count - 1)][:, None]


@outside_of_graphs
def _drawn_on_all_ranks(count: int, device: torch.device, cp: ContextParallel) -> Tensor:
    """Uniform numbers that are the same on all context parallel ranks."""
    return torch.rand(count, device=device, generator=torch.Generator(device).manual_seed(cp.seed()))


def _tokens(out: Tensor, cu_seqlens: Tensor, ranks: TensorRanks | None, cp: ContextParallel | None) -> Tensor:
    """The indices of the packed tokens that this rank has: those of its context rank, or a consecutive part of them."""
    own = out.shape[0]
    size, rank = (1, 0) if ranks is None or ranks.sequence_axis is None else (ranks.size, ranks.rank)
    if cp is None:
        return torch.arange(own, device=out.device) + rank * own
    tokens = cp.placed(own * size, own * size, masks.documents(cu_seqlens)).rows("q")[cp.rank]
    return tokens[rank * own : (rank + 1) * own].to(out.device)

"""Stochastic depth: omit the output of a block for whole sequences, in training."""

from __future__ import annotations

import torch
from torch import Tensor

from undivided.arguments.layout import Layout
from undivided.nn.arguments import hidden_states as hidden


def drop_path_scale(
    out: Tensor, rate: float, format: Layout, cu_seqlens: Tensor | None, first_token: int = 0
) -> Tensor:
    """1 / (1 - rate) for each sequence that is kept and 0 for the others, broadcastable to `out`.

    With packed sequences, `first_token` is the index of the first row of `out`.

    Source: Huang et al. 2016 (arXiv:1603.09382).
    """
    keep = 1 - rate
    count = hidden.sequences(out, format, cu_seqlens)
    scale = torch.rand(count, device=out.device).lt(keep).to(out.dtype) / max(keep, 1e-30)
    if format != "thd":
        return scale[None, :, None] if format == "sbhd" else scale[:, None, None]
    assert cu_seqlens is not None
    ends, token = cu_seqlens[1:].to(out.device).long(), torch.arange(out.shape[0], device=out.device) + first_token
    return scale[torch.searchsorted(ends, token, right=True).clamp(max=count - 1)][:, None]

"""Context parallelism in the modules: TransformerEngine's arguments, global sizes, and positions of a rank's tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from undivided import masks
from undivided.arguments import layout
from undivided.arguments.checks import checked_choice
from undivided.arguments.layout import Layout
from undivided.context_parallel import ContextParallel
from undivided.context_parallel.sharding import Side
from undivided.errors import InputError
from undivided.nn.arguments.formats import QKV, with_length
from undivided.nn.rotary.checks import check_rows

STRATEGIES = {"p2p": "ring", "all_gather": "all_gather", "a2a": "all_to_all", "a2a+p2p": "ring+all_to_all"}


def context_parallel_group(
    cp_group: Any, cp_global_ranks: Any, cp_stream: Any, cp_comm_type: str
) -> ContextParallel | None:
    """The ranks; None without a group. A `ContextParallel` is used unchanged, with its own strategy."""
    strategy = STRATEGIES[checked_choice("cp_comm_type", cp_comm_type, tuple(STRATEGIES))]
    if cp_group is None:
        for name, value in (("cp_global_ranks", cp_global_ranks), ("cp_stream", cp_stream)):
            if value is not None:
                raise InputError(name, "be None without cp_group", repr(value))
        return None
    cp = cp_group if isinstance(cp_group, ContextParallel) else ContextParallel(cp_group, strategy)  # type: ignore[arg-type]
    if cp_global_ranks is not None and len(cp_global_ranks) != cp.world:
        raise InputError("cp_global_ranks", f"be the {cp.world} ranks of cp_group", repr(cp_global_ranks))
    return cp


def global_inputs(inputs: QKV, cp: ContextParallel, cu_seqlens: tuple[Tensor | None, Tensor | None]) -> QKV:
    """The inputs with the sizes of all ranks together, without memory: masks describe the whole sequences."""
    format = inputs.format
    placement = cp.placed(inputs.q_len(), inputs.kv_len(), _documents(format, *cu_seqlens))
    q_len, kv_len = placement.length("q"), placement.length("kv")
    k, v = (with_length(tensor, kv_len, format) for tensor in (inputs.k, inputs.v))
    return QKV(with_length(inputs.q, q_len, format), k, v, format)


def rank_freqs(
    freqs: Tensor, t: Tensor, format: Layout, cp: ContextParallel, offsets: Tensor | None, side: Side
) -> Tensor:
    """The rows of freqs for this rank's tokens, one row per token."""
    length = layout.sizes(t.shape, format)[1]
    placement = cp.placed(length, length, _documents(format, offsets, offsets))
    rows = placement.rows(side)[cp.rank].to(freqs.device)
    if rows.numel() != length:
        raise InputError("hidden_states", f"have rank {cp.rank}'s {rows.numel()} tokens", length)
    positions = placement.length(side)  # of all ranks, which must not wait for one that refuses its own
    if format == "thd" and offsets is not None:
        starts = offsets.to(rows.device, torch.int64)
        positions = int(starts.diff().max()) if starts.numel() > 1 else 0
        rows = rows - starts[(torch.searchsorted(starts, rows, right=True) - 1).clamp(min=0)]
        rows = rows.clamp(max=freqs.shape[0] - 1)  # rows of padding after the last sequence, which are unused
    check_rows(freqs, None, positions)
    return freqs.index_select(0, rows)


def _documents(format: Layout, q: Tensor | None, kv: Tensor | None) -> masks.Mask:
    if format != "thd" or q is None:
        return masks.FULL
    return masks.documents(q, q if kv is None else kv)

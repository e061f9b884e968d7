"""All-gather: a rank gathers all the keys that it needs, one group of heads at a time, and attends to them in one call.

One softmax covers all keys, so nothing is merged; but the keys of a group of heads must fit into memory. The keys of
the next group arrive during the computation of one. As in the ring, a rank receives only keys that some row of its own
may attend to, and their gradients return to their owners, which sum them in fp32 (a reduce-scatter).

Source: Llama 3 (arXiv:2407.21783, section 3.3.2) gathers keys and values in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from undivided.context_parallel._index import as_index, count, merged_slots
from undivided.context_parallel._pieces import Round, Share, build_pieces, needed_keys, union_of_rows
from undivided.masks import NormalForm

HEAD_GROUPS = 4
"""Groups of key heads that are gathered one after another: a quarter of the memory, and three quarters of the transfer
hidden behind computation."""


def rounds(
    form: NormalForm,
    rank: int,
    shares: Sequence[Sequence[Share]],
    keys: Sequence[Tensor],
    kv_heads: slice,
    with_positions: bool,
) -> tuple[Round, ...]:
    """One round for every group of key heads; the arguments are those of `ring.rounds`."""
    own_rows = union_of_rows(shares[rank])
    peers = [peer for peer in range(len(keys)) if peer != rank]
    sent = {peer: as_index(needed_keys(form, union_of_rows(shares[peer]), keys[rank])) for peer in peers}
    used = {peer: needed_keys(form, own_rows, keys[peer]) for peer in (rank, *peers)}
    gathered = {peer: keys[peer][index] for peer, index in used.items()}
    all_keys = torch.cat(list(gathered.values())).sort().values
    slots = merged_slots([positions for peer, positions in gathered.items() if peer == rank or positions.numel()])
    own = as_index(used[rank])
    return tuple(
        Round(
            group,
            tuple((peer, index) for peer, index in sent.items() if count(index)),
            tuple((peer, gathered[peer].numel()) for peer in peers if gathered[peer].numel()),
            own,
            slots,
            build_pieces(form, shares[rank], all_keys, group, with_positions),
        )
        for group in head_groups(kv_heads)
    )


def head_groups(kv_heads: slice) -> list[slice]:
    """The key heads, cut into at most HEAD_GROUPS consecutive groups.

    >>> head_groups(slice(0, 6))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 6, None)]
    """
    step = max(1, -(-(kv_heads.stop - kv_heads.start) // HEAD_GROUPS))
    starts = range(kv_heads.start, kv_heads.stop, step)
    return [slice(start, min(start + step, kv_heads.stop)) for start in starts]

"""All-gather: every key that a rank needs is brought together, some heads at a time, and attended to in one call.

One softmax over all keys, so nothing is merged; in exchange the keys of a group of heads must fit in memory. The next
group arrives while one is attended to. As in the ring a rank gets only keys that some row of its own may attend to, and
their gradients go back to their owners, who add them up in fp32 (a reduce-scatter).

Source: Llama 3 (arXiv:2407.21783, section 3.3.2) gathers keys and values in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from undivided.context_parallel._index import as_index, count, places
from undivided.context_parallel._pieces import Round, Share, needed, pieces, union_of_rows
from undivided.masks import NormalForm

HEAD_GROUPS = 4
"""Groups of key heads gathered one after another: a quarter of the memory, and all but the first quarter hidden behind
work."""


def rounds(
    form: NormalForm,
    rank: int,
    shares: Sequence[Sequence[Share]],
    keys: Sequence[Tensor],
    kv_heads: slice,
    with_positions: bool,
) -> tuple[Round, ...]:
    """One round for every group of key heads; arguments as for the ring's."""
    mine = union_of_rows(shares[rank])
    others = [peer for peer in range(len(keys)) if peer != rank]
    asked = {peer: as_index(needed(form, union_of_rows(shares[peer]), keys[rank])) for peer in others}
    has = {peer: needed(form, mine, keys[peer]) for peer in (rank, *others)}
    wanted = {peer: keys[peer][index] for peer, index in has.items()}
    together = torch.cat(list(wanted.values())).sort().values
    where = places([part for peer, part in wanted.items() if peer == rank or part.numel()])
    own = as_index(has[rank])
    found = []
    for group in head_groups(kv_heads):
        found.append(
            Round(
                group,
                tuple((peer, index) for peer, index in asked.items() if count(index)),
                tuple((peer, wanted[peer].numel()) for peer in others if wanted[peer].numel()),
                own,
                where,
                pieces(form, shares[rank], together, group, with_positions),
            )
        )
    return tuple(found)


def head_groups(kv_heads: slice) -> list[slice]:
    """The key heads in at most HEAD_GROUPS runs.

    >>> head_groups(slice(0, 6))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 6, None)]
    """
    step = max(1, -(-(kv_heads.stop - kv_heads.start) // HEAD_GROUPS))
    starts = range(kv_heads.start, kv_heads.stop, step)
    return [slice(start, min(start + step, kv_heads.stop)) for start in starts]

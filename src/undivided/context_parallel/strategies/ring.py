"""Ring: keys come to the queries that need them, a rank's at a time, while the ones before are being attended to.

In round t rank r attends to keys of rank r - t. It gets them from that rank itself, and only the keys that some row of
its own may attend to: under a causal mask that is three quarters of them (zigzag), under a window the few at the edges
of its stretches, whatever the length of the sequence. A round without an allowed pair sends nothing and computes
nothing. Results of rounds are merged in fp32 (`undivided.merge`); gradients of keys go straight back to the rank that
holds them.

The rounds are a shift of the ranks by t, so that every rank sends to one and receives from one, as on a ring; but
nothing travels by way of others, which would have to carry what they do not need.

Source: Liu et al. 2023, Ring Attention with Blockwise Transformers (arXiv:2310.01889).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from undivided.context_parallel._index import as_index
from undivided.context_parallel._pieces import Round, Share, needed, pieces, union_of_rows
from undivided.masks import NormalForm


def rounds(
    form: NormalForm,
    rank: int,
    shares: Sequence[Sequence[Share]],
    keys: Sequence[Tensor],
    kv_heads: slice,
    with_positions: bool,
) -> tuple[Round, ...]:
    """One round for every rank of the ring, its own keys first.

    Args:
        form: the mask of the whole.
        rank: this one's place on the ring.
        shares, keys: of every rank on the ring: what it computes, and which global positions it holds.
        kv_heads: the key heads that travel.
        with_positions: see `pieces`.
    """
    world = len(keys)
    mine = union_of_rows(shares[rank])
    found = []
    for step in range(world):
        source, target = (rank - step) % world, (rank + step) % world
        if step == 0:
            own = slice(0, keys[rank].numel())
            parts = pieces(form, shares[rank], keys[rank], kv_heads, with_positions)
            found.append(Round(kv_heads, (), (), own, (own,), parts))
            continue
        wanted = keys[source][needed(form, mine, keys[source])]
        asked = needed(form, union_of_rows(shares[target]), keys[rank])
        found.append(
            Round(
                kv_heads,
                ((target, as_index(asked)),) if asked.numel() else (),
                ((source, wanted.numel()),) if wanted.numel() else (),
                None,
                (slice(0, wanted.numel()),) if wanted.numel() else (),
                pieces(form, shares[rank], wanted, kv_heads, with_positions),
            )
        )
    return tuple(found)

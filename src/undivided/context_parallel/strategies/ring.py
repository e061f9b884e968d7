"""Ring: the keys of one rank arrive per round, during the computation of the previous round.

In round t, rank r attends to keys of rank r - t. It receives them from that rank directly, and only those that some row
of its own may attend to: three quarters of them under a causal mask (zigzag), the few at the edges of its rows under a
window, whatever the sequence length. A round without an allowed pair sends nothing and computes nothing. Results of
rounds are merged in fp32 (`undivided.merge`); gradients of keys go directly to the rank that owns the keys.

Each round shifts the ranks by t, so every rank sends to one rank and receives from one, as on a ring. Keys are not
forwarded through other ranks, which would have to carry keys that they do not need.

Source: Liu et al. 2023, Ring Attention with Blockwise Transformers (arXiv:2310.01889).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from undivided.context_parallel._index import as_index
from undivided.context_parallel._pieces import Round, Share, build_pieces, needed_keys, union_of_rows
from undivided.masks import NormalForm


def rounds(
    form: NormalForm,
    rank: int,
    shares: Sequence[Sequence[Share]],
    keys: Sequence[Tensor],
    kv_heads: slice,
    with_positions: bool,
) -> tuple[Round, ...]:
    """One round for every rank of the ring, the rank's own keys first.

    Args:
        form: the mask of the whole sequence.
        rank: this rank's position on the ring.
        shares, keys: of every rank on the ring: what it computes, and the global positions of its keys.
        kv_heads: the key heads that are sent.
        with_positions: see `build_pieces`.
    """
    world = len(keys)
    own_rows = union_of_rows(shares[rank])
    result = []
    for step in range(world):
        source, target = (rank - step) % world, (rank + step) % world
        if step == 0:
            own = slice(0, keys[rank].numel())
            pieces = build_pieces(form, shares[rank], keys[rank], kv_heads, with_positions)
            result.append(Round(kv_heads, (), (), own, (own,), pieces))
            continue
        received = keys[source][needed_keys(form, own_rows, keys[source])]
        sent = needed_keys(form, union_of_rows(shares[target]), keys[rank])
        result.append(
            Round(
                kv_heads,
                ((target, as_index(sent)),) if sent.numel() else (),
                ((source, received.numel()),) if received.numel() else (),
                None,
                (slice(0, received.numel()),) if received.numel() else (),
                build_pieces(form, shares[rank], received, kv_heads, with_positions),
            )
        )
    return tuple(result)

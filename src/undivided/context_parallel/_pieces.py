"""What one rank computes: shares of the queries, rounds of keys, and a piece for every visible pair of the two.

    Share   some query heads of some rows, computed by one rank
    Round   the keys that are on a rank at one time: its own, and those that other ranks sent
    Piece   the rows of a share against the keys of a round: one backend call, under the mask cut to these rows and keys

Nothing here communicates. Positions are global, ascending, and on the device of the normal form of the mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from undivided import masks
from undivided.context_parallel._index import Index, as_index, count
from undivided.masks import Mask, NormalForm
from undivided.masks.normal_form import Ranges


@dataclass(frozen=True, eq=False)
class Share:
    """Query heads [H] of rows at global positions, and the key heads [N] that serve them in equal groups."""

    heads: slice
    kv_heads: slice
    rows: Tensor


@dataclass(frozen=True, eq=False)
class Piece:
    """Rows of a share against keys of a round. Head numbers are global.

    share: the number of the share. rows: indices into the share's rows. keys: indices into the round's keys.
    form: the mask between these rows and keys. mask: the same mask in the simplest form that describes it.
    """

    share: int
    heads: slice
    kv_heads: slice
    rows: slice
    keys: slice
    form: NormalForm
    mask: Mask

    @cached_property
    def key_index(self) -> Index:
        """The global positions of its keys."""
        assert self.form.key_index is not None
        return as_index(self.form.key_index)

    @cached_property
    def pairs(self) -> int:
        """Allowed pairs, summed over batch elements and heads."""
        return self.form.pairs


@dataclass(frozen=True, eq=False)
class Round:
    """The keys that are on a rank at one time, and the pieces that are computed with them.

    kv_heads: the key heads (global numbers) that the round covers.
    sends: (peer, indices of this rank's keys that the peer needs). receives: (peer, number of keys that it sends).
    own: indices of this rank's own keys that take part, or None.
    slots: where [own, received..] land among the round's keys, which ascend.
    """

    kv_heads: slice
    sends: tuple[tuple[int, Index], ...]
    receives: tuple[tuple[int, int], ...]
    own: Index | None
    slots: tuple[Index, ...]
    pieces: tuple[Piece, ...]


def needed_keys(form: NormalForm, rows: Tensor, keys: Tensor) -> Tensor:
    """The indices of the keys that at least one of the rows may attend to, int64, ascending."""
    if not rows.numel() or not keys.numel():
        return keys.new_zeros(0)
    return form.shard(rows, keys).keys_allowed.nonzero().squeeze(1)


def union_of_rows(shares: Sequence[Share]) -> Tensor:
    """The rows of all shares, ascending, without duplicates."""
    if not shares:
        return torch.zeros(0, dtype=torch.int64, device="cpu")
    return shares[0].rows if len(shares) == 1 else torch.cat([share.rows for share in shares]).unique()


def build_pieces(
    form: NormalForm, shares: Sequence[Share], keys: Tensor, kv_heads: slice, with_positions: bool
) -> tuple[Piece, ...]:
    """One piece for every share that may attend to some of these keys, trimmed to the rows and keys that take part.

    form: the mask of the whole sequence. keys: global positions. with_positions: ALiBi or dropout depend on positions,
    so that the mask of a piece must keep them.
    """
    pieces = []
    for number, share in enumerate(shares):
        heads = _common_heads(share, kv_heads)
        if heads is None or not share.rows.numel() or not keys.numel():
            continue
        rows = share.rows
        untrimmed = form.shard(rows, keys, heads[0])
        piece_rows = _bounding_slice(untrimmed.rows_allowed.flatten(0, -2).any(0))
        piece_keys = _bounding_slice(untrimmed.keys_allowed)
        if piece_rows.stop > piece_rows.start:
            piece_form = form.shard(rows[piece_rows], keys[piece_keys], heads[0])
            mask = piece_mask(piece_form, with_positions)
            pieces.append(Piece(number, *heads, piece_rows, piece_keys, piece_form, mask))
    return tuple(pieces)


def _common_heads(share: Share, kv_heads: slice) -> tuple[slice, slice] | None:
    """(query heads, key heads) of the share that these key heads serve; None if there are none."""
    start, stop = max(share.kv_heads.start, kv_heads.start), min(share.kv_heads.stop, kv_heads.stop)
    if stop <= start:
        return None
    group = count(share.heads) // count(share.kv_heads)
    first = share.heads.start + (start - share.kv_heads.start) * group
    return slice(first, first + (stop - start) * group), slice(start, stop)


def _bounding_slice(flags: Tensor) -> slice:
    """From the first to the last True."""
    where = flags.nonzero()
    return slice(int(where[0]), int(where[-1]) + 1) if where.numel() else slice(0, 0)


def piece_mask(form: NormalForm, with_positions: bool) -> Mask:
    """The mask with the same allowed pairs that most kernels run: full or a band, otherwise the ranges themselves.

    with_positions: ALiBi or dropout depend on positions, which only the ranges keep.

    >>> from undivided import masks
    >>> whole = masks.causal().normal_form(1, 1, 8, 8, "cpu")
    >>> first, second = torch.arange(4), torch.arange(4, 8)
    >>> [piece_mask(whole.shard(rows, keys), False) for rows, keys in ((first, first), (second, first))]
    [causal(align='bottom_right'), every pair]
    """
    ranges = form.ranges
    general = Mask(parts=(Ranges(form),))
    if with_positions or not form.exact or tuple(ranges.shape[::2]) != (1, 2):
        return general
    start, stop = ranges[0, :, 0], ranges[0, :, 1]
    offset = form.kv_len - form.q_len
    left = None if not bool(start.any()) else form.kv_len - 1 - int(start[-1])
    right = None if bool((stop == form.kv_len).all()) else int(stop[0]) - 1 - offset
    if left is None and right is None:
        return masks.FULL
    if (left is not None and left < 0) or (right is not None and right < 0):
        return general
    band = masks.window(left, right, align="bottom_right")
    same = band.normal_form(1, 1, form.q_len, form.kv_len, ranges.device).ranges
    return band if torch.equal(same, ranges) else general

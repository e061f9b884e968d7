"""What one rank computes: shares of the queries, rounds of keys, and a piece for each pair of them that is not hidden.

    Share   some query heads for some rows, at one rank
    Round   keys that are at a rank at one time: its own, and what others sent of theirs
    Piece   a share's rows against a round's keys: one call of a backend, under the mask cut to these rows and keys

Nothing here communicates. Positions are global, ascending, and on the device of the mask's form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from undivided import masks
from undivided.context_parallel._index import Index, as_index
from undivided.masks import Mask, NormalForm
from undivided.masks.normal_form import Ranges


@dataclass(frozen=True, eq=False)
class Share:
    """Query heads [H] for rows at global positions, and the key heads [N] that serve them, in equal groups."""

    heads: slice
    kv_heads: slice
    rows: Tensor


@dataclass(frozen=True, eq=False)
class Piece:
    """Rows of a share against keys of a round; heads are global numbers.

    share: its number. rows: which of the share's rows. keys: which of the round's keys. form: the mask between them.
    mask: the form as a mask, in the simplest words that say it.
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
        """Allowed pairs, over batch elements and heads."""
        counts = self.form.counts([0, self.form.q_len], [0, self.form.kv_len])
        batch, heads = (self.form.batch, self.form.heads)
        return int(counts.sum()) * (batch // max(counts.shape[0], 1)) * (heads // max(counts.shape[1], 1))


@dataclass(frozen=True, eq=False)
class Round:
    """Keys at a rank at one time.

    kv_heads: of which key heads (global numbers).
    sends: (peer, which of this rank's keys it needs). receives: (peer, how many keys it sends).
    own: which of this rank's keys take part, or None.
    where: the places of [own, received..] among the round's keys, which ascend.
    """

    kv_heads: slice
    sends: tuple[tuple[int, Index], ...]
    receives: tuple[tuple[int, int], ...]
    own: Index | None
    where: tuple[Index, ...]
    pieces: tuple[Piece, ...]


def needed(form: NormalForm, rows: Tensor, keys: Tensor) -> Tensor:
    """Which of the keys any of the rows may attend to: their numbers, int64, ascending."""
    if not rows.numel() or not keys.numel():
        return keys.new_zeros(0)
    return form.shard(rows, keys).keys_allowed.nonzero().squeeze(1)


def union_of_rows(shares: Sequence[Share]) -> Tensor:
    """The rows of all shares, ascending, each once."""
    if not shares:
        return torch.zeros(0, dtype=torch.int64)
    return shares[0].rows if len(shares) == 1 else torch.cat([share.rows for share in shares]).unique()


def pieces(
    form: NormalForm, shares: Sequence[Share], keys: Tensor, kv_heads: slice, with_positions: bool
) -> tuple[Piece, ...]:
    """A piece for every share that may attend to some of these keys, trimmed to the rows and keys that it is about.

    form: of the whole. keys: global positions. with_positions: something asks where rows and keys stand (ALiBi,
    dropout), so that a mask in simpler words would not do.
    """
    found = []
    for number, share in enumerate(shares):
        heads = _heads_of(share, kv_heads)
        if heads is None or not share.rows.numel() or not keys.numel():
            continue
        rows = share.rows
        whole = form.shard(rows, keys, heads[0])
        some_rows = _hull(whole.rows_allowed.flatten(0, -2).any(0))
        some_keys = _hull(whole.keys_allowed)
        if some_rows.stop > some_rows.start:
            part = form.shard(rows[some_rows], keys[some_keys], heads[0])
            mask = Mask(parts=(Ranges(part),)) if with_positions else in_simple_words(part)
            found.append(Piece(number, *heads, some_rows, some_keys, part, mask))
    return tuple(found)


def _heads_of(share: Share, kv_heads: slice) -> tuple[slice, slice] | None:
    """Of a share the query and key heads that these key heads serve; None where there are none."""
    start, stop = max(share.kv_heads.start, kv_heads.start), min(share.kv_heads.stop, kv_heads.stop)
    if stop <= start:
        return None
    group = (share.heads.stop - share.heads.start) // (share.kv_heads.stop - share.kv_heads.start)
    first = share.heads.start + (start - share.kv_heads.start) * group
    return slice(first, first + (stop - start) * group), slice(start, stop)


def _hull(used: Tensor) -> slice:
    """From the first to the last True."""
    where = used.nonzero()
    return slice(int(where[0]), int(where[-1]) + 1) if where.numel() else slice(0, 0)


def in_simple_words(form: NormalForm) -> Mask:
    """A mask of the same pairs that most kernels know: every pair, or a band; else the ranges themselves.

    Positions are lost: only for what looks at nothing but pairs.

    >>> from undivided import masks
    >>> whole = masks.causal().normal_form(1, 1, 8, 8, "cpu")
    >>> first, second = torch.arange(4), torch.arange(4, 8)
    >>> [in_simple_words(whole.shard(rows, keys)) for rows, keys in ((first, first), (second, first))]
    [causal(align='bottom_right'), every pair]
    """
    ranges = form.ranges
    as_they_are = Mask(parts=(Ranges(form),))
    if not form.exact or tuple(ranges.shape[::2]) != (1, 2):
        return as_they_are
    start, stop = ranges[0, :, 0], ranges[0, :, 1]
    ahead = form.kv_len - form.q_len
    left = None if not bool(start.any()) else form.kv_len - 1 - int(start[-1])
    right = None if bool((stop == form.kv_len).all()) else int(stop[0]) - 1 - ahead
    if left is None and right is None:
        return masks.FULL
    if (left is not None and left < 0) or (right is not None and right < 0):
        return as_they_are
    band = masks.window(left, right, align="bottom_right")
    same = band.normal_form(1, 1, form.q_len, form.kv_len, ranges.device).ranges
    return band if torch.equal(same, ranges) else as_they_are

"""Draft trees: each row attends to the keys before its tree, its ancestors, and itself.

The kernel reads a row's ancestors, a byte for each node, so that nothing is evaluated per pair. Tiles of keys that lie
before the trees of all rows of a block need no mask; they are most of the keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from undivided.backends.triton.tables import once_per_mask
from undivided.masks import NormalForm


def tile_ranges(form: NormalForm, key: Hashable, tile_ranges_of: Callable[[NormalForm], Tensor]) -> Tensor:
    """The ranges of tiles of a mask with a tree, of which those before the tree are full; cached per mask.

    Args:
        form: the mask.
        key: what decides them besides the mask.
        tile_ranges_of: computes the tile ranges of a mask, int32 [..., 8], as `tables.Tables.rows`.
    """
    return once_per_mask(
        form, ("trees", key), lambda: _with_full_tiles(tile_ranges_of(form), tile_ranges_of(_before_the_tree(form)))
    )


def _before_the_tree(form: NormalForm) -> NormalForm:
    """The same mask without the keys of the tree: ranges alone."""

    def compute() -> NormalForm:
        assert form.tree is not None
        ranges = torch.minimum(form.ranges, form.tree.first[..., None])
        return dataclasses.replace(form, ranges=ranges, extras=())

    return once_per_mask(form, "before the tree", compute)


def _with_full_tiles(runs: Tensor, others: Tensor) -> Tensor:
    """The runs, with the full tiles of `others` as far as they are tiles of the same run."""
    sides = []
    for one, other in zip(runs.split(4, -1), others.split(4, -1), strict=True):
        first, last = one[..., 0], one[..., 3]
        full_first = torch.minimum(torch.maximum(other[..., 1], first), last)
        full_last = torch.minimum(torch.maximum(other[..., 2], full_first), last)
        sides.append(torch.stack((first, full_first, full_last, last), -1))
    return torch.cat(sides, -1)

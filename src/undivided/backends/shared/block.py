"""A block of the score matrix: query rows, the slice of keys that they need, and their allowed pairs.

Shared by the backends that work block by block. Legend: B batch, H query heads, N key/value heads, R rows, K keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from undivided.arguments.tensors import is_traced, readable
from undivided.backends.shared.alibi import slope_index
from undivided.masks.normal_form import NormalForm


@dataclass(frozen=True)
class Block:
    """Rows of queries and a slice of keys, for some batch elements and heads."""

    batch: slice
    heads: slice
    kv_heads: slice
    rows: slice
    keys: slice

    def slice_rows(self, table: Tensor) -> Tensor:
        """The block's rows of a [B|1, Sq] table."""
        return table[self.batch if table.shape[0] > 1 else slice(None), self.rows]

    def slice_keys(self, table: Tensor) -> Tensor:
        """The block's keys of a [B|1, Sk] table."""
        return table[self.batch if table.shape[0] > 1 else slice(None), self.keys]

    def slice_pairs(self, tensor: Tensor) -> Tensor:
        """The block of a broadcast [B|1, H|1, Sq|1, Sk|1] tensor, a view."""
        slices = (self.batch, self.heads, self.rows, self.keys)
        return tensor[tuple(s if n > 1 else slice(None) for s, n in zip(slices, tensor.shape, strict=True))]

    def allowed(self, form: NormalForm) -> Tensor:
        """The allowed pairs, bool [B|1, H|1, R, K]."""
        return form.allowed(self.batch, self.rows, self.keys, self.heads)

    def is_covered(self, form: NormalForm) -> bool:
        """Whether every pair is known to be allowed; False if finding out would wait for a device."""
        return readable(form.ranges) and form.covers(self.batch, self.rows, self.keys)


def distance(block: Block, form: NormalForm) -> Tensor:
    """|i + d - j| within the sequence, [B|1, 1, R, K]."""
    rows = block.slice_rows(form.q_position) + block.slice_rows(form.shift)
    return (rows[:, None, :, None] - block.slice_keys(form.kv_position)[:, None, None, :]).abs()


def block_slopes(slopes: Tensor, block: Block, form: NormalForm | None) -> Tensor:
    """The ALiBi slope of every row of a block: [1, H, 1, 1] for slopes [H], [B, H, R, 1] for slopes [sequences, H]."""
    if slopes.dim() == 1:
        return slopes[block.heads][None, :, None, None]
    assert form is not None
    index = slope_index(block.slice_rows(form.q_sequence), slopes)
    return slopes[index, block.heads].transpose(1, 2).unsqueeze(-1)


def hide(allowed: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """q, k and v with 0 where no allowed pair uses them, and the rows that have a key, [B|1, H|1, R, 1] (None if all).

    Memory outside the mask may hold NaN, and 0 * NaN is NaN: select before multiplying. q is [B, H, R, D], k and v are
    [B, N, K, D]. On the CPU, where reading values costs nothing, a tensor that is used entirely is not copied.
    """
    some_row, some_key = allowed.any(-1, keepdim=True), allowed.any(-2)
    if some_key.shape[1] > 1:
        some_key = some_key.unflatten(1, (k.shape[1], -1)).any(2)
    some_key = some_key.unsqueeze(-1)
    reads_values = allowed.device.type == "cpu" and not is_traced()
    if not (reads_values and bool(some_key.all())):
        k, v = torch.where(some_key, k, 0.0), torch.where(some_key, v, 0.0)
    if reads_values and bool(some_row.all()):
        return q, k, v, None
    return torch.where(some_row, q, 0.0), k, v, some_row

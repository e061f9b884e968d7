"""A block of the score matrix: query rows, the slice of keys that they need, and their allowed pairs.

Shared by the backends that work block by block. Legend: B batch, H query heads, N key/value heads, R rows, K keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from undivided.arguments.tensors import is_traced, readable
from undivided.masks.normal_form import IdPairs, NormalForm, SelectedPairs
from undivided.request.call import Call
from undivided.request.request import Tensors

DOCUMENTS = frozenset({"documents", "document_ids", "ranges"})
"""Kinds of mask under which rows of one sequence belong to documents."""


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

    def allowed(self, normal: NormalForm) -> Tensor:
        """The allowed pairs, bool [B|1, H|1, R, K]."""
        return normal.allowed(self.batch, self.rows, self.keys, self.heads)

    def is_covered(self, normal: NormalForm) -> bool:
        """Whether every pair is known to be allowed; False if finding out would wait for a device."""
        return readable(normal.ranges) and normal.covers(self.batch, self.rows, self.keys)


def distance(block: Block, normal: NormalForm) -> Tensor:
    """|i + d - j| within the sequence, [B|1, 1, R, K]."""
    rows = block.slice_rows(normal.q_position) + block.slice_rows(normal.shift)
    return (rows[:, None, :, None] - block.slice_keys(normal.kv_position)[:, None, None, :]).abs()


def row_slopes(slopes: Tensor, block: Block, normal: NormalForm | None) -> Tensor:
    """The ALiBi slope of every row: [1, H, 1, 1] for slopes [H], [B, H, R, 1] for slopes [sequences, H]."""
    if slopes.dim() == 1:
        return slopes[block.heads][None, :, None, None]
    assert normal is not None
    sequence = block.slice_rows(normal.q_sequence).clamp(0, slopes.shape[0] - 1).long()
    return slopes[sequence, block.heads].transpose(1, 2).unsqueeze(-1)


def needs_blocks_per_document(
    call: Call, tensors: Tensors, normal: NormalForm, row_tensors: Sequence[Tensor], key_tensors: Sequence[Tensor]
) -> bool:
    """Whether no block may mix documents: values that they use are not finite, and 0 * NaN is NaN.

    Only on the CPU: elsewhere reading values would wait for the device, and under tracing there are none.
    """
    problem = call.problem
    if not problem.mask.kinds & DOCUMENTS or is_traced():
        return False
    q, k, v = tensors.heads_first(call.problem.layout)
    if not readable(q, k, v, *row_tensors, *key_tensors):
        return False
    if all(bool(torch.isfinite(t).all()) for t in (q, k, v, *row_tensors, *key_tensors)):
        return False
    rows = normal.rows_allowed.flatten(0, -2).any(0)
    used = [t[:, :, rows] for t in (q, *row_tensors)] + [t[:, :, normal.keys_allowed] for t in (k, v, *key_tensors)]
    return not all(bool(torch.isfinite(t).all()) for t in used)


def document_ends(normal: NormalForm, batch: slice) -> list[int]:
    """The end of each document's rows: between neighbours that share no key; after every row if ids decide. For CPU
    tensors.

    >>> form = NormalForm(torch.tensor([[[0, 2], [0, 2], [2, 3]]], dtype=torch.int32), kv_len=3)
    >>> document_ends(form, slice(0, 1))
    [2, 3]
    """
    wholes = (extra.whole if isinstance(extra, SelectedPairs) else extra for extra in normal.extras)
    if any(isinstance(whole, IdPairs) for whole in wholes):
        return list(range(1, normal.q_len + 1))
    ranges = normal.ranges[batch if normal.ranges.shape[0] > 1 else slice(None)]
    start, stop = ranges[..., 0], ranges[..., 1::2].amax(-1)
    some = stop > start
    shared = torch.minimum(stop[:, 1:], stop[:, :-1]) > torch.maximum(start[:, 1:], start[:, :-1])
    ends = ~shared & (some[:, 1:] | some[:, :-1])  # rows without keys may stay together
    return [*(ends.any(0).nonzero().flatten() + 1).tolist(), normal.q_len]


def hide(allowed: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """q, k and v with 0 where no allowed pair uses them, and the rows that have a key, [B|1, H|1, R, 1] (None if all).

    Memory outside the mask may hold NaN, and 0 * NaN is NaN: select before multiplying. q is [B, H, R, D], k and v are
    [B, N, K, D]. On the CPU, where reading values costs nothing, a tensor that is used entirely is not copied.
    """
    some_row, some_key = allowed.any(-1, keepdim=True), allowed.any(-2)
    if some_key.shape[1] > 1:
        some_key = some_key.unflatten(1, (k.shape[1], -1)).any(2)
    some_key = some_key.unsqueeze(-1)
    look = allowed.device.type == "cpu" and not is_traced()
    if not (look and bool(some_key.all())):
        k, v = torch.where(some_key, k, 0.0), torch.where(some_key, v, 0.0)
    if look and bool(some_row.all()):
        return q, k, v, None
    return torch.where(some_row, q, 0.0), k, v, some_row

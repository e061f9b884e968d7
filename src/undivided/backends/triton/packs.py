"""The forward of packed documents whose queries and keys have offsets of their own: a step of serving.

Some documents decode a token or a few, others prefill. In blocks of rows that follow one another, one block would have
the queries of dozens of decoding documents and visit the keys of all of them, one after another. So there are two
launches: documents of few rows are decoded, with a block for each that all heads of a key/value head share; the others
have blocks of many rows. Only the device knows which documents are short: each launch has blocks for all, of which some
are empty.

Legend: N documents, P blocks of rows, M rows of a block. A row is a (query, head of the group) pair.
"""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from undivided.arguments.tensors import is_traced
from undivided.backends.shared import gpu
from undivided.backends.triton import places, tables
from undivided.kernels.triton.config import Config
from undivided.masks import NormalForm
from undivided.request.call import Call


class Blocks(NamedTuple):
    """The blocks of rows of a launch.

    places: int32 [1, P, 3], the first row and one past the last row of each, and 0; empty blocks have 0 and 0.
    runs: int32 [1, P, 8], as `tables.Tables.rows`.
    """

    places: Tensor
    runs: Tensor


_cached: WeakKeyDictionary[NormalForm, dict[object, Blocks]] = WeakKeyDictionary()


def applies(call: Call, form: NormalForm | None) -> bool:
    """Whether the mask is ranges of several documents that may have more keys than queries."""
    documents = gpu.documents(call)
    if documents is None or form is None or not form.exact or form.row_index is not None:
        return False
    own_offsets = documents.cu_seqlens_q is not documents.cu_seqlens_kv
    return own_offsets and form.geometry is not None and documents.cu_seqlens_q.numel() > 2


def blocks(
    form: NormalForm, q_len: int, tile: Config, group: int, always_masked: bool, shortest: int, longest: int | None
) -> Blocks:
    """The blocks of the documents of `shortest` to `longest` queries, cached per mask; None: of any number. One of the
    two bounds is open (0 or None).

    Args:
        form: the mask's ranges.
        q_len: all queries.
        tile: the tile sizes.
        group: heads that share a block of rows, so that a query is `group` rows.
        always_masked: no tile is full.
        shortest, longest: queries of a document, padding included.
    """
    memory = _cached.setdefault(form, {})
    key = (tile.block_m, tile.block_n, group, always_masked, shortest, longest)
    found = memory.get(key)
    if found is None:
        assert form.geometry is not None and form.geometry.q_slot_ends is not None
        ends = form.geometry.q_slot_ends
        if longest is None:
            at = places.of_documents(ends, slice(0, q_len), q_len, group, tile.block_m, (shortest - 1) * group)
        else:
            at = places.of_short_documents(ends, q_len, group, tile.block_m, longest * group)
        found = Blocks(at, _runs(form, at, q_len, tile, group, always_masked))
        if not is_traced():
            memory[key] = found
    return found


def _runs(form: NormalForm, at: Tensor, q_len: int, tile: Config, group: int, always_masked: bool) -> Tensor:
    """The tiles that each block of rows needs, and which of them are full."""
    query, real = places.rows_of(at, tile.block_m, group)
    table = form.table[:, query[0].clamp(max=q_len - 1)]  # [1, P, M, 2|4]
    runs = []
    for side in range(0, table.shape[-1], 2):
        start, stop = table[..., side], table[..., side + 1]
        none = stop <= start
        start, stop = start.masked_fill(none, tables.FAR), stop.masked_fill(none, 0)
        runs.append(
            tables.run(
                torch.where(real, start, tables.FAR).amin(-1),
                torch.where(real, stop, 0).amax(-1),
                torch.where(real, start, 0).amax(-1),
                torch.where(real, stop, tables.FAR).amin(-1),
                tile.block_n,
                always_masked,
            )
        )
    runs.append(tables.without_overlap(*runs) if len(runs) == 2 else torch.zeros_like(runs[0]))
    return torch.cat((runs[0], runs[-1]), -1).contiguous()

"""The forward of packed documents whose queries and keys have offsets of their own: a step of serving.

Some documents decode a token or a few, others prefill. In blocks of rows that follow one another, one block would have
the queries of dozens of decoding documents and visit the keys of all of them, one after another. So there are two
launches: documents of few rows are decoded, with a block for each that all heads of a key/value head share; the others
have blocks of many rows. Only the device knows which documents are short: each launch has as many blocks as there can
be, of which some are empty.

Legend: N documents, P blocks of rows, M rows of a block. A row is a (query, head of the group) pair.
"""

from __future__ import annotations

import torch

from undivided.arguments.checks import INT32_MAX
from undivided.backends.shared.documents import packed_documents
from undivided.backends.triton.launches import launch
from undivided.backends.triton.tables import RowBlocks, once_per_mask
from undivided.kernels.triton.config import Config
from undivided.masks import NormalForm
from undivided.request.call import Call


def applies(call: Call, form: NormalForm | None) -> bool:
    """Whether the mask is ranges, or draft trees, of several documents that may have more keys than queries."""
    documents = packed_documents(call)
    if documents is None or form is None or form.row_index is not None or not (form.exact or form.tree):
        return False
    own_offsets = documents.cu_seqlens_q is not documents.cu_seqlens_kv
    return own_offsets and form.geometry is not None and documents.cu_seqlens_q.numel() > 2


def blocks(
    form: NormalForm, q_len: int, tile: Config, group: int, always_masked: bool, shortest: int, longest: int | None
) -> RowBlocks:
    """The blocks of the documents of `shortest` to `longest` queries (None: any number), cached per mask.

    Args:
        form: the mask's ranges.
        q_len: all queries; those after all documents belong to the last one.
        tile: the tile sizes.
        group: heads that share a block of rows, so that a query is `group` rows.
        always_masked: no tile is full.
        shortest, longest: queries of a document, padding included.
    """
    key = (tile.block_m, tile.block_n, group, always_masked, shortest, longest)
    return once_per_mask(form, ("packs", key), _blocks, form, q_len, *key)


def _blocks(
    form: NormalForm,
    q_len: int,
    block_m: int,
    block_n: int,
    group: int,
    always_masked: bool,
    shortest: int,
    longest: int | None,
) -> RowBlocks:
    from undivided.kernels.triton.blocks import document_blocks_kernel

    assert form.geometry is not None and form.geometry.q_slot_ends is not None
    ends, ranges = form.geometry.q_slot_ends, form.table
    documents = ends.numel()
    number = -(-q_len * group // block_m) + documents
    if longest is not None:
        number = min(number, documents * -(-longest * group // block_m))
    places = torch.empty(1, number, 3, dtype=torch.int32, device=ranges.device)
    runs = torch.empty(1, number, 8, dtype=torch.int32, device=ranges.device)
    constants = {
        "SHORTEST": shortest,
        "LONGEST": INT32_MAX if longest is None else longest,
        "GROUP": group,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "COLUMNS": ranges.shape[-1],
        "ALWAYS_MASKED": always_masked,
        "DOCUMENTS": 1 << (documents - 1).bit_length(),
        "num_warps": 1,
    }
    launch(
        document_blocks_kernel,
        (number, 1, 1),
        tuple(constants.values()),
        {"ends": ends, "ranges": ranges, "places": places, "runs": runs},
        lambda: {"number": documents, "q_len": q_len, **constants},
    )
    return RowBlocks(places, runs)

"""Keys that no query may attend to: their memory may hold NaN, and the kernels multiply what they mask by 0."""

from __future__ import annotations

from undivided.backends.shared.documents import packed_documents, sequence_lengths
from undivided.request.call import Call

_HOLES = frozenset({"padded", "document_ids", "dense", "predicate", "tree", "blocks", "ranges"})
"""Kinds of mask under which unused memory, which may hold NaN, may lie between used keys."""
_ENDS = frozenset({"lengths", "q_lengths", "starts", "documents"})
"""Kinds under which it lies only before or after the used keys."""


def replaced(call: Call, columns: int, has_bias: bool) -> int:
    """Which keys the kernels replace by 0 in a call with a mask or a bias: 0 none, 1 those before and after the keys of
    a block of rows, 2 all that the block does not use, 3 as 2 for chosen blocks: those before and after are not read.

    Args:
        call: the call.
        columns: columns of the mask's ranges, two for each range of a row.
        has_bias: whether there is a bias, which may mask any key.
    """
    kinds = call.problem.mask.kinds
    if kinds == {"ranges"} and call.pages is not None:  # two ranges of a row may have unused memory between them
        return 3 if columns == 4 else 1
    if kinds & _HOLES or has_bias:
        return 2
    if not _may_leave_keys_unused(call):
        return int(bool(kinds & _ENDS))
    # the unused keys of a document lie between keys of other documents, those of a union between its two ranges
    return 2 if kinds & {"documents", "global"} else 1


def _may_leave_keys_unused(call: Call) -> bool:
    """Whether a sequence may have more keys than queries, and under this mask keys that none of its queries uses."""
    problem = call.problem
    if "prefix" in problem.mask.kinds:
        return True
    documents = packed_documents(call)
    if documents is not None:
        return documents.cu_seqlens_q is not documents.cu_seqlens_kv
    lengths = sequence_lengths(call)
    if lengths is not None:
        return lengths.q is not lengths.kv
    every_key = problem.mask.kinds == {"causal"} and problem.align == "bottom_right"
    return problem.q_len < problem.kv_len and not every_key

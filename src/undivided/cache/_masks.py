"""The masks of a cached call: the caller's mask, aligned, with the lengths of the cached sequences.

Legend: B sequences, Sk keys of the longest sequence.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from undivided import masks
from undivided.arguments.layout import Layout
from undivided.cache._storage import Counts
from undivided.errors import InputError
from undivided.masks import Mask
from undivided.masks._parts import GlobalBand
from undivided.masks._predicate import Predicate

CAUSAL = masks.causal(align="bottom_right")
"""The meaning of `mask=None`. It is one object, so that caches with the same lengths share its cached results."""

EVERY = Mask()
"""Every key: what `CAUSAL` means for a single query, which is the last token; less work per step. It differs from
``masks.window(None, None)``, so that no caller can pass it."""

_WITH_LENGTHS = frozenset({"lengths", "documents"})
PER_KEY = frozenset({"dense", "document_ids"})
_PER_PAIR = PER_KEY | {"predicate"}

NEVER_RANGES = frozenset({"dense", "predicate", "tree", "blocks"})
"""Kinds of mask that are not a range of keys for each row."""


PADDED = "pass padded tokens, in layout 'bshd' or 'sbhd', in this call"
"""The hint for what packed tokens do not support. The layout is that of a call, not of a cache."""


def with_cached_lengths(mask: Mask, lengths: Counts, q_counts: Counts | None, device: torch.device) -> Mask:
    """The mask restricted to real tokens, the same object for repeated calls."""
    return mask.cached(("cache", lengths, q_counts, device), _with_lengths, mask, lengths, q_counts, device)


def _with_lengths(mask: Mask, lengths: Counts, q_counts: Counts | None, device: torch.device) -> Mask:
    """The mask restricted to real tokens. Its tensors have version counters even in inference mode."""
    with torch.inference_mode(False):
        kv = torch.tensor(lengths, dtype=torch.int32, device=device)
        q = None if q_counts is None else torch.tensor(q_counts, dtype=torch.int32, device=device)
        mask = mask if mask is EVERY else align(mask)
        return mask & masks.lengths(kv, q)


def with_documents(mask: Mask, lengths: Counts, q_counts: Counts, device: torch.device, slot: int | None) -> Mask:
    """The mask restricted to each sequence. Queries are packed. The keys of a sequence start at a multiple of `slot`
    tokens; None: they are packed, or in the pages of a block table."""
    with torch.inference_mode(False):
        q, kv = (
            torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device) for counts in (q_counts, lengths)
        )
        starts = None
        if slot is not None:
            starts = torch.arange(len(lengths) + 1, dtype=torch.int32, device=device) * slot
        documents = masks.documents(q, kv, padded_kv=starts, max_q=max(q_counts), max_kv=max(lengths))
        return align(mask) & documents


def align(mask: Mask) -> Mask:
    """The mask, bottom-right if it has no alignment: the last query is the last token."""
    if mask.align is not None:
        return mask
    return mask.cached("cache", lambda: mask & masks.window(None, None, align="bottom_right"))


class CausalBand(NamedTuple):
    """A causal mask, a window that ends at the query, or either joined to the first keys: then ranges are numbers.

    left: keys before the query's own that it sees; None: all.
    first_keys: the number of first keys that every query sees besides.
    """

    left: int | None
    first_keys: int

    @staticmethod
    def of_mask(mask: Mask) -> CausalBand | None:
        """The band that the mask consists of, aligned bottom-right or not at all; None if it is another mask."""
        if mask.align == "top_left" or mask.right != 0:
            return None
        if not mask.parts:
            return CausalBand(mask.left, 0)
        first = mask.parts[0]
        if len(mask.parts) > 1 or mask.left is not None or not isinstance(first, GlobalBand) or first.right != 0:
            return None
        return CausalBand(first.left, first.prefix) if type(first.prefix) is int else None


def is_causal(mask: Mask) -> bool:
    """Whether the mask is causal and nothing else, aligned bottom-right or not at all."""
    return mask.left is None and mask.right == 0 and not mask.parts and mask.align != "top_left"


def check_mask(mask: Mask, layout: Layout) -> None:
    """Raise InputError for a mask with lengths, or in layout "thd" for one that depends on single keys or pairs."""
    if mask.kinds & _WITH_LENGTHS:
        hint = "q_lengths is the number of real queries"
        raise InputError("mask", "leave the lengths to the cache", repr(mask), hint=hint)
    if layout == "thd" and mask.kinds & _PER_PAIR and not _has_positions(mask):
        must = "consist of causal, window, sinks, chunks, prefix, tree, blocks and pages in layout 'thd'"
        hint = PADDED if mask.kinds & PER_KEY else "masks.predicate(fn, positions=True)"
        raise InputError("mask", must, repr(mask), hint=hint)


def _has_positions(mask: Mask) -> bool:
    """Whether what is evaluated for single pairs are functions of positions."""
    return not mask.kinds & PER_KEY and all(part.positions for part in mask.parts if isinstance(part, Predicate))


def extend_mask(mask: Mask, longest: int, extent: int) -> Mask:
    """A mask of pairs, extended from the longest sequence to the end of its last page."""
    tensors, wide = mask.take("dense")
    ids, wide = wide.take("document_ids")
    for tensor in tensors or ():
        wide = wide & masks.dense(extend("mask", tensor, longest, extent, False))
    for documents in ids or ():
        wide = wide & masks.document_ids(documents.ids_q, extend("mask", documents.ids_kv, longest, extent, -1))
    return wide


def extend(name: str, tensor: Tensor, longest: int, extent: int, value: float) -> Tensor:
    """The tensor with its last axis, the keys, extended; a broadcast axis stays."""
    keys = tensor.shape[-1] if tensor.dim() else 1
    if keys == longest:
        return pad(tensor, (0, extent - longest), value=value)
    if keys != 1:
        raise InputError(name, f"end with the {longest} keys of the longest sequence, or 1", list(tensor.shape))
    return tensor

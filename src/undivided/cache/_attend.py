"""Attention over cached keys: one call of `undivided.attention`, with the lengths as part of the mask.

Legend: B sequences, S tokens (Sq new queries, Sk keys of the longest sequence), N key/value heads, D head size,
T packed tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from undivided import masks
from undivided.arguments import layout as _layout
from undivided.arguments.checks import check_tensor
from undivided.arguments.layout import Layout
from undivided.cache._storage import Counts, Heads
from undivided.errors import InputError
from undivided.functional import attention
from undivided.masks import Mask
from undivided.request.checks import checked_mask

CAUSAL = masks.causal(align="bottom_right")
"""The meaning of `mask=None`. It is one object, so that caches with the same lengths share its cached results."""

EVERY = masks.window(None, None)
"""The same for a single query, which is the last token and attends to every key: less work per step."""

_AXIS = {layout: layout.index("t" if layout == "thd" else "s") for layout in _layout.LAYOUTS}
_WITH_LENGTHS = frozenset({"lengths", "documents"})
_PER_KEY = frozenset({"dense", "document_ids"})
_PER_PAIR = _PER_KEY | {"predicate"}

Output = Tensor | tuple[Tensor, Tensor]


class CachedSequences(NamedTuple):
    """The cached sequences of a call.

    Args:
        k, v: [B, R, N, Dk] and [B, R, N, Dv], or pools of pages [P, R, N, D].
        lengths: tokens of each sequence.
        pages: block table of the pools, int32 [B, pages of the longest].
    """

    k: Tensor
    v: Tensor
    lengths: Counts
    pages: Tensor | None = None


def attend(
    q: Tensor, cached: CachedSequences, layout: Layout, q_counts: Counts | None, mask: Mask | None, **options: Any
) -> Output:
    """Attention of q, in `layout`, over the cached keys.

    `q_counts` are the real queries of each sequence. None: every row is real.
    """
    if mask is None:
        mask = CAUSAL
    else:
        _check_mask(checked_mask(mask), layout)
    if q.shape[_AXIS[layout]] == 1 and options.get("alibi_slopes") is None and _is_causal(mask):
        mask = EVERY
    if layout == "thd":
        assert q_counts is not None
        k, v, mask = _packed_inputs(cached, q_counts, mask, options)
    elif cached.pages is None:
        k, v, mask = _contiguous_inputs(cached, layout, q_counts, mask)
    else:
        k, v, mask = _paged_inputs(cached, q_counts, mask, options)
    if mask is EVERY:
        mask = None  # less work per step
    out: Output = attention(q, k, v, layout=layout, mask=mask, pages=cached.pages, **options)
    return out


def _contiguous_inputs(
    cached: CachedSequences, layout: Layout, q_counts: Counts | None, mask: Mask
) -> tuple[Tensor, Tensor, Mask]:
    """The keys up to the longest sequence, and their mask. Sequences of equal length need no lengths in the mask."""
    k, v, lengths, _ = cached
    longest = max(lengths)
    k, v = _layout.restore(k[:, :longest], layout), _layout.restore(v[:, :longest], layout)
    if q_counts is None and lengths.count(longest) == len(lengths):
        return k, v, mask if mask is EVERY else _align(mask)
    return k, v, _with_cached_lengths(mask, lengths, q_counts, k.device)


def _paged_inputs(
    cached: CachedSequences, q_counts: Counts | None, mask: Mask, options: dict[str, Any]
) -> tuple[Tensor, Tensor, Mask]:
    """The pools, and a mask of whole pages: masks and biases per pair are extended to the end of the last page."""
    k, v, lengths, pages = cached
    assert pages is not None
    longest, extent = max(lengths), pages.shape[1] * k.shape[1]
    if longest != extent and mask.kinds & _PER_KEY:
        build = functools.partial(_extend_mask, mask, longest, extent)
        mask = mask.cached(("cache", longest, extent), build)
    if isinstance(options.get("bias"), Tensor):
        options["bias"] = _extend("bias", options["bias"], longest, extent, 0.0)
    return k, v, _with_cached_lengths(mask, lengths, q_counts, k.device)


def _packed_inputs(
    cached: CachedSequences, q_counts: Counts, mask: Mask, options: dict[str, Any]
) -> tuple[Tensor, Tensor, Mask]:
    """The keys for packed queries, and a mask of documents; the keys of each start at its own slot or page."""
    k, v, lengths, pages = cached
    if options.get("bias") is not None:
        hint = "a cache in layout 'bshd', with padding"
        raise InputError("bias", "be None in layout 'thd'", "a tensor", hint=hint)
    slot = None
    if pages is None:
        slot = k.shape[1]
        k, v = k.flatten(0, 1), v.flatten(0, 1)
    build = functools.partial(_with_documents, mask, lengths, q_counts, k.device, slot)
    return k, v, mask.cached(("cache", lengths, q_counts, k.device, slot), build)


def _with_cached_lengths(mask: Mask, lengths: Counts, q_counts: Counts | None, device: torch.device) -> Mask:
    build = functools.partial(_with_lengths, mask, lengths, q_counts, device)
    return mask.cached(("cache", lengths, q_counts, device), build)


def _with_lengths(mask: Mask, lengths: Counts, q_counts: Counts | None, device: torch.device) -> Mask:
    """The mask restricted to real tokens. Its tensors have version counters even in inference mode."""
    with torch.inference_mode(False):
        kv = torch.tensor(lengths, dtype=torch.int32, device=device)
        q = None if q_counts is None else torch.tensor(q_counts, dtype=torch.int32, device=device)
        mask = mask if mask is EVERY else _align(mask)
        return mask & masks.lengths(kv, q)


def _with_documents(mask: Mask, lengths: Counts, q_counts: Counts, device: torch.device, slot: int | None) -> Mask:
    """The mask restricted to each sequence: queries are packed, keys start every `slot` tokens (None: paged)."""
    with torch.inference_mode(False):
        q, kv = (
            torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device) for counts in (q_counts, lengths)
        )
        starts = None
        if slot is not None:
            starts = torch.arange(len(lengths) + 1, dtype=torch.int32, device=device) * slot
        documents = masks.documents(q, kv, padded_kv=starts, max_q=max(q_counts), max_kv=max(lengths))
        return _align(mask) & documents


def _align(mask: Mask) -> Mask:
    """The mask, bottom-right if it has no alignment: the last query is the last token."""
    if mask.align is not None:
        return mask
    return mask.cached("cache", lambda: mask & masks.window(None, None, align="bottom_right"))


def _is_causal(mask: Mask) -> bool:
    return mask.left is None and mask.right == 0 and not mask.parts and mask.align != "top_left"


def _check_mask(mask: Mask, layout: Layout) -> None:
    if mask.kinds & _WITH_LENGTHS:
        raise InputError(
            "mask", "leave the lengths to the cache", repr(mask), hint="q_lengths is the number of real queries"
        )
    if layout == "thd" and mask.kinds & _PER_PAIR:
        raise InputError(
            "mask",
            "consist of causal, window, sinks, chunks and prefix in layout 'thd'",
            repr(mask),
            hint="a cache in layout 'bshd', with padding",
        )


def _extend_mask(mask: Mask, longest: int, extent: int) -> Mask:
    """A mask of pairs, extended from the longest sequence to the end of its last page."""
    tensors, wide = mask.take("dense")
    ids, wide = wide.take("document_ids")
    for tensor in tensors or ():
        wide = wide & masks.dense(_extend("mask", tensor, longest, extent, False))
    for part in ids or ():
        wide = wide & masks.document_ids(part.ids_q, _extend("mask", part.ids_kv, longest, extent, -1))
    return wide


def _extend(name: str, tensor: Tensor, longest: int, extent: int, value: float) -> Tensor:
    """The tensor with its last axis, the keys, extended; a broadcast axis stays."""
    keys = tensor.shape[-1] if tensor.dim() else 1
    if keys == longest:
        return pad(tensor, (0, extent - longest), value=value)
    if keys != 1:
        raise InputError(name, f"end with the {longest} keys of the longest sequence, or 1", list(tensor.shape))
    return tensor


def checked_query(q: Tensor, layout: Layout, batch: int, heads: Heads) -> int:
    """The number of queries per sequence (packed: of all sequences); InputError if q does not fit the cache."""
    check_tensor("q", q)
    if q.dim() != _layout.rank(layout):
        raise InputError("q", f"have {_layout.rank(layout)} axes in layout {layout!r}", list(q.shape))
    found, q_len, _, dim = _layout.sizes(q.shape, layout)
    if layout != "thd" and found != batch:
        raise InputError("q", f"have the batch size of the cache ({batch}) in layout {layout!r}", list(q.shape))
    if dim != heads.head_dim:
        raise InputError("q", f"have the head size of the cache ({heads.head_dim})", f"{dim} in {list(q.shape)}")
    return q_len


def table(tables: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Lists of pages as a block table, int32 [sequences, pages of the longest]; 0 after the end of a list."""
    width = max(1, *map(len, tables)) if tables else 1
    rows = [[*pages, *[0] * (width - len(pages))] for pages in tables]
    with torch.inference_mode(False):
        return torch.tensor(rows, dtype=torch.int32, device=device).reshape(len(rows), width)

"""Attention over cached keys: one call of `undivided.attention`, with the lengths as part of the mask.

Legend: B sequences, S tokens (Sq new queries, Sk keys of the longest sequence), N key/value heads, D head size,
T packed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import gt
from typing import Any, NamedTuple, cast

from torch import Tensor

from undivided.arguments import layout as _layout
from undivided.arguments.checks import INT32_MAX, check_tensor
from undivided.arguments.layout import SEQUENCE_AXIS, Layout
from undivided.arguments.signature import unknown_arguments
from undivided.arguments.tensors import is_dense
from undivided.cache._ledger import eviction
from undivided.cache._ledger.pages import Places
from undivided.cache._masks import (
    CAUSAL,
    EVERY,
    NEVER_RANGES,
    PADDED,
    PER_KEY,
    CausalBand,
    align,
    check_mask,
    extend,
    extend_mask,
    is_causal,
    with_cached_lengths,
    with_documents,
)
from undivided.cache._storage import Counts, Pools, TokenSpec
from undivided.errors import InputError
from undivided.functional import attention
from undivided.masks import Mask
from undivided.masks.normal_form.ranges import last_query_form
from undivided.request.checks import checked_mask
from undivided.request.foreign import CACHE_HINTS, keyword_hint
from undivided.request.request import OPTIONAL_TENSORS, RULES, Request
from undivided.request.result import Output
from undivided.run.autograd import any_autocast
from undivided.run.replay import SCALAR_TYPES, PreparedCall, may_replay, sinks_key
from undivided.selection.policy import Policy, current_policy

OPTIONS = frozenset({*OPTIONAL_TENSORS, *RULES, "scale", "softcap", "return_lse"})
"""The options of `undivided.attention` that attention over a cache takes; dropout is not among them."""

_PREPARED_ANEW = frozenset(OPTIONAL_TENSORS) - {"sinks"}
"""Optional tensors with which each call is prepared by itself."""

_SAME_IF_PADDED = frozenset({"causal", "window", "global", "prefix", "chunks"})
"""Kinds of mask that mean the same for packed sequences and for a padded batch of them."""


class CachedSequences(NamedTuple):
    """The cached sequences of a call.

    Args:
        pools: keys and values, [B, R, N, D], or pools of pages, [P, R, N, D], and their scales if they are quantised.
        lengths: tokens of each sequence, on all ranks together.
        pages: block table of the pools, int32 [B, pages of the longest].
        evicted: the places of the evicted pages of each sequence, on all ranks, if there are any, otherwise None.
        digest: a number that differs if the pages of sequences differ; 0 for one process.
    """

    pools: Pools
    lengths: Counts
    pages: Tensor | None = None
    evicted: Sequence[Places] | None = None
    digest: int = 0


class CachedCall(NamedTuple):
    """A call of attention over cached keys.

    Args:
        q: queries in `layout`.
        q_counts: real queries of each sequence. None: every row is real.
        mask: the caller's mask; None is causal.
        options: other arguments of `undivided.attention`; in one process, those that `check_options` accepts.
    """

    q: Tensor
    cached: CachedSequences
    layout: Layout
    q_counts: Counts | None
    mask: Mask | None
    options: dict[str, Any]

    def validated_mask(self) -> Mask:
        """The mask; InputError if it has lengths, shows keys that were evicted, or is causal for too many queries."""
        q, cached, layout, q_counts, mask, _ = self
        if mask is None:
            mask = CAUSAL
        else:
            check_mask(checked_mask(mask), layout)
        if cached.evicted is not None:
            counts = (q.shape[SEQUENCE_AXIS[layout]],) * len(cached.lengths) if q_counts is None else q_counts
            eviction.check_hidden(mask, cached.evicted, cached.lengths, counts, cached.pools.k.shape[1])
        if mask.right == 0 and mask.align != "top_left":
            if q_counts is not None:
                too_many = any(map(gt, q_counts, cached.lengths))
            else:
                too_many = q.shape[SEQUENCE_AXIS[layout]] > min(cached.lengths)
            if too_many:
                raise self._too_many_queries()
        return mask

    def _too_many_queries(self) -> InputError:
        """The error for queries before the first token of their sequence: a causal mask shows them no key."""
        q_len, lengths = self.q.shape[SEQUENCE_AXIS[self.layout]], self.cached.lengths
        counts = (q_len,) * len(lengths) if self.q_counts is None else self.q_counts
        number = next(n for n, length in enumerate(lengths) if counts[n] > length)
        must = f"have at most the {lengths[number]} cached tokens of sequence {number}"
        hint = "append(k, v) before attend(q); for cross-attention mask=masks.window(None, None)"
        return InputError("q", must, counts[number], hint)


def attend(call: CachedCall) -> Output:
    """Attention over the cached keys of one process."""
    mask = call.validated_mask()
    if (repeated := _repeated(call, mask)) is not None:
        return repeated
    q, k, v, options = _arguments(call, mask)
    result: Output = attention(q, k, v, **options)
    return _packed(result) if call.layout == "thd" and options["layout"] != "thd" else result


def _repeated(call: CachedCall, mask: Mask) -> Tensor | None:
    """The output by what an earlier call prepared, mostly one of another layer; None for calls that must be prepared.

    Those have a bias or slopes, return the lse, have a mask of single pairs, or a block table that somebody wrote to.
    """
    q, cached, layout, q_counts, _, options = call
    (k, v, k_scale, v_scale), lengths, pages = cached[:3]
    scale = softcap = sinks = None
    rules: dict[str, Any] = {}
    if options:
        if options.get("return_lse", False) is not False:
            return None
        if any(options.get(name) is not None for name in _PREPARED_ANEW):
            return None
        scale, softcap, sinks = options.get("scale"), options.get("softcap"), options.get("sinks")
        if not {type(scale), type(softcap)} <= SCALAR_TYPES:
            return None
        rules = {name: options.get(name) for name in RULES}
    if mask.parts and mask.kinds & NEVER_RANGES:
        return None
    sinks_part = sinks_key(sinks)
    if (
        sinks_part is None
        or not may_replay(q, k, v)
        or (pages is not None and (pages.is_inference() or pages._version))
    ):
        return None
    policy = current_policy(**rules)
    sizes = q.shape, q.stride(), q.dtype, k.shape, v.shape, k.dtype, 0 if pages is None else pages.shape[1]
    call_key = (layout, sizes, q.device, k.device, q_counts, scale, softcap, sinks_part, policy)
    prepared = mask.cached(("repeated", call_key, lengths), _prepare, call, mask, policy, call_key)
    return None if prepared is None else prepared.run(q, k, v, None, sinks, pages, k_scale, v_scale)


class _Latest:
    """The call of the latest step of decoding. Those of the next steps differ in nothing but the lengths."""

    prepared: PreparedCall | None = None


def _prepare(call: CachedCall, mask: Mask, policy: Policy, call_key: object) -> PreparedCall | None:
    """The call, prepared. call_key: everything that decides the call except the mask and the lengths."""
    latest = mask.cached(("latest", call_key), _Latest) if _is_paged_decoding(call, mask) else None
    before = None if latest is None else latest.prepared  # another thread may replace it
    if before is not None:
        prepared = _with_lengths(before, call, mask)
    else:
        q, k, v, options = _arguments(call, mask)
        if options.get("mask") is mask:  # a copy, because what a mask caches must not keep it alive
            options["mask"] = replace(mask)
        prepared = PreparedCall.prepare(Request.from_keywords(q, k, v, **options), policy)
    if latest is not None:
        latest.prepared = prepared
    return prepared


def _is_paged_decoding(call: CachedCall, mask: Mask) -> bool:
    """Whether each sequence has one query, its last token, and keys in pages, under a causal mask or a window, perhaps
    with sinks: then nothing but the ranges of keys depends on the lengths."""
    q, (_, lengths, pages, *_), layout, q_counts, _, _ = call
    if pages is None or CausalBand.of_mask(mask) is None:
        return False
    if max(lengths) == 1:  # the two alignments agree, which selection reads
        return False
    if layout == "thd":
        return q_counts is not None and q_counts.count(1) == len(lengths)
    return q_counts is None and q.shape[SEQUENCE_AXIS[layout]] == 1


def _with_lengths(prepared: PreparedCall, call: CachedCall, mask: Mask) -> PreparedCall | None:
    """The prepared call of an earlier step, with the lengths of this one."""
    q, (pools, lengths, pages, *_), layout, *_ = call
    assert pages is not None
    if layout == "thd":
        q = q.unflatten(0, (len(lengths), 1))
    heads = q.shape[1 if layout == "bhsd" else 2]
    kv_len = pages.shape[1] * pools.k.shape[1]
    left, first_keys = cast(CausalBand, CausalBand.of_mask(mask))
    form = last_query_form(lengths, left, kv_len, heads, pools.k.device, first_keys)
    return prepared.with_form(form, q, pools.k, pools.v, pages, pools.scales)


def _arguments(call: CachedCall, mask: Mask) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """q, k, v and the keywords of `attention`.

    Packed sequences with the same number of queries become the padded batch without padding that they are: its mask of
    lengths takes a third of the time to prepare that documents take.
    """
    q, cached, layout, q_counts, _, options = call
    if layout == "thd":
        assert q_counts is not None
        if options.get("bias") is not None:
            raise InputError("bias", "be None in layout 'thd'", "a tensor", hint=PADDED)
        if q_counts.count(q_counts[0]) == len(q_counts) and q_counts[0] and mask.structure.kinds <= _SAME_IF_PADDED:
            q, layout, q_counts = q.unflatten(0, (len(cached.lengths), -1)), "bshd", None
    options = {"layout": layout, "pages": cached.pages, **options}
    if q.shape[SEQUENCE_AXIS[layout]] == 1 and options.get("alibi_slopes") is None and is_causal(mask):
        mask = EVERY
    if layout == "thd":
        k, v, mask = _packed_inputs(cached, cast(Counts, q_counts), mask)
    elif cached.pages is None:
        k, v, mask = _contiguous_inputs(cached, layout, q_counts, mask)
    else:
        k, v, mask = _paged_inputs(cached, q_counts, mask, options)
    if cached.pools.k_scale is not None:
        options["k_scale"], options["v_scale"] = _scales(cached, layout)
    if mask is not EVERY:  # without a mask there is less work per step
        options["mask"] = mask
    return q, k, v, options


def _packed(result: Output) -> Output:
    """The result of packed sequences, from that of the padded batch without padding."""
    if isinstance(result, Tensor):
        return result.flatten(0, 1)
    out, lse = result
    return out.flatten(0, 1), lse.transpose(0, 1).flatten(1)


def _contiguous_inputs(
    cached: CachedSequences, layout: Layout, q_counts: Counts | None, mask: Mask
) -> tuple[Tensor, Tensor, Mask]:
    """The keys up to the longest sequence, and their mask. Sequences of equal length need no lengths in the mask."""
    (k, v, *_), lengths = cached[:2]
    longest = max(lengths)
    k, v = _layout.from_canonical(k[:, :longest], layout), _layout.from_canonical(v[:, :longest], layout)
    if q_counts is None and lengths.count(longest) == len(lengths):
        return k, v, mask if mask is EVERY else align(mask)
    return k, v, with_cached_lengths(mask, lengths, q_counts, k.device)


def _paged_inputs(
    cached: CachedSequences, q_counts: Counts | None, mask: Mask, options: dict[str, Any]
) -> tuple[Tensor, Tensor, Mask]:
    """The pools, and a mask of whole pages: masks and biases per pair are extended to the end of the last page."""
    (k, v, *_), lengths, pages = cached[:3]
    assert pages is not None
    bias = options.get("bias")
    if mask.parts or bias is not None:
        longest, extent = max(lengths), pages.shape[1] * k.shape[1]
        if longest != extent and mask.structure.kinds & PER_KEY:
            mask = mask.cached(("cache", longest, extent), extend_mask, mask, longest, extent)
        if isinstance(bias, Tensor):
            options["bias"] = extend("bias", bias, longest, extent, 0.0)
    return k, v, with_cached_lengths(mask, lengths, q_counts, k.device)


def _packed_inputs(cached: CachedSequences, q_counts: Counts, mask: Mask) -> tuple[Tensor, Tensor, Mask]:
    """The keys for packed queries, and a mask of documents; the keys of each start at its own slot or page."""
    (k, v, *_), lengths, pages = cached[:3]
    slot = k.shape[1]
    if pages is None:
        k, v = k.flatten(0, 1), v.flatten(0, 1)
    else:
        slot *= pages.shape[1]
    if len(lengths) * slot > INT32_MAX:
        must = f"have at most {INT32_MAX} places for tokens in layout 'thd': positions have 32 bits"
        got = f"{len(lengths)} sequences with {slot} each, as the longest has"
        raise InputError("cache", must, got, hint=f"fewer sequences, or {PADDED}")
    arguments = lengths, q_counts, k.device, slot
    return k, v, mask.cached(("cache", *arguments), with_documents, mask, *arguments)


def _scales(cached: CachedSequences, layout: Layout) -> tuple[Tensor, ...]:
    """The scales of the keys and values that the call reads, with the same axes as these."""
    scales = cached.pools.scales
    if cached.pages is not None:
        return scales
    if layout == "thd":
        return tuple([scale.flatten(0, 1) for scale in scales])
    longest = max(cached.lengths)
    return tuple([_layout.from_canonical(scale[:, :longest], layout) for scale in scales])


def check_options(options: dict[str, Any]) -> None:
    """InputError unless these are options of `InferenceParams.attend`."""
    if not OPTIONS.issuperset(options):
        unknown = sorted(options.keys() - OPTIONS)
        known = ("layer_number", "q", "new_k", "new_v", "qkv_format", "mask", *sorted(OPTIONS))
        hint = keyword_hint(unknown, known, CACHE_HINTS)
        raise unknown_arguments("InferenceParams.attend", unknown, known, hint).as_also(TypeError)


def checked_query(q: Tensor, layout: Layout, batch: int, spec: TokenSpec) -> int:
    """The number of queries per sequence (packed: of all sequences); InputError if q does not fit the cache."""
    if type(q) is not Tensor or not is_dense(q):  # `attention` checks all others
        check_tensor("q", q)
    shape = q.shape
    if len(shape) != _layout.axis_count(layout):
        raise InputError("q", f"have {_layout.axis_count(layout)} axes [{', '.join(layout)}]", list(shape))
    q_batch, q_len, _, dim = _layout.sizes(shape, layout)
    if layout != "thd" and q_batch != batch:
        raise InputError("q", f"have the batch size of the cache ({batch}) in layout {layout!r}", list(q.shape))
    if dim != spec.head_dim:
        raise InputError("q", f"have the head size of the cache ({spec.head_dim})", f"{dim} in {list(q.shape)}")
    if q.dtype != spec.dtype and spec.format is None and not any_autocast():  # `attention` checks the others
        raise InputError("q", f"have the dtype of the cache ({spec.dtype})", str(q.dtype), f"q.to({spec.dtype})")
    return q_len

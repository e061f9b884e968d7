"""Attention over a cache whose pages are spread over ranks: every rank attends to its own pages, results are merged.

Every rank has the queries of all sequences; no keys are sent. Legend: B sequences, S queries, H heads.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from undivided.arguments import layout as _layout
from undivided.arguments.layout import Layout
from undivided.backends._base import Backend
from undivided.cache._attend import OPTIONS, CachedCall
from undivided.cache._masks import EVERY, PADDED, PER_KEY, extend, extend_mask, with_cached_lengths, with_documents
from undivided.cache._storage import Counts
from undivided.context_parallel._request import policy_over_ranks
from undivided.context_parallel.decode import MergeMethod, attend_own_keys, check_merge_method, merge_ranks
from undivided.context_parallel.exchange.collectives import Communicator
from undivided.context_parallel.exchange.handshake import (
    CALL,
    SharedArguments,
    describe_mask,
    describe_queries,
    prepare_on_all_ranks,
)
from undivided.context_parallel.exchange.values import check_not_recorded, with_values
from undivided.errors import InputError
from undivided.masks import Mask
from undivided.masks.normal_form import Ranges
from undivided.request.call import Call
from undivided.request.checks import check_optional_tensors, check_scalars
from undivided.request.request import Request, Tensors
from undivided.request.result import Output, Result
from undivided.run import autograd
from undivided.run.prepare import prepare as prepare_call

RING_BYTES = 1 << 18
"""Partial results of this size or more are merged by "ring" unless the caller chooses: two exchanges, fewer bytes."""


def default_merge_method(size: int) -> MergeMethod:
    """How partial results of `size` bytes are merged if the caller does not choose.

    >>> default_merge_method(1 << 10), default_merge_method(1 << 20)
    ('all_gather', 'ring')
    """
    return "ring" if size >= RING_BYTES else "all_gather"


class _PagedStep(NamedTuple):
    """This rank's part of a step: attention over its own pages, and what the merge needs."""

    backend: Backend
    call: Call
    tensors: Tensors
    sinks: Tensor | None
    by: MergeMethod
    return_lse: bool


class _OwnKeys(NamedTuple):
    """The keys of a step on one rank. lengths: of the whole sequences. width: pages of this rank's longest list."""

    rank: int
    world: int
    page_size: int
    lengths: Counts
    width: int

    @property
    def held(self) -> Counts:
        """The tokens of each sequence that this rank holds."""
        return tuple([held_tokens(length, self.page_size, self.rank, self.world) for length in self.lengths])

    @property
    def extent(self) -> int:
        """Keys of the longest sequence, up to the end of the last page that any rank may have in that row of pages."""
        pages = max(1, -(-max(self.lengths) // self.page_size))
        return -(-pages // self.world) * self.world * self.page_size

    def positions(self, device: torch.device) -> Tensor:
        """The positions in a sequence of the keys in this rank's pages, int64 [width * page_size]."""
        pages = torch.arange(self.width, device=device) * self.world + self.rank
        return (pages[:, None] * self.page_size + torch.arange(self.page_size, device=device)).flatten()


def held_tokens(length: int, page_size: int, rank: int, world: int) -> int:
    """The tokens that a rank holds of a sequence of this length.

    >>> held_tokens(10, 4, 0, 2), held_tokens(10, 4, 1, 2)
    (6, 4)
    """
    full, rest = divmod(length, page_size)
    return page_size * ((full - rank + world - 1) // world) + (rest if full % world == rank else 0)


@torch.no_grad()
def attend(
    axes: Sequence[Communicator],
    check: bool,
    rank: int,
    world: int,
    prepare: Callable[[], CachedCall],
    rows: Sequence[Tensor] | None = None,
) -> Output:
    """The attention of the call that `prepare` returns, bitwise the same on every rank; (out, lse) if requested.

    axes, check: as for `prepare_on_all_ranks`. rows: the queries of each rank, whose results it gets; None: all.
    """
    check_not_recorded(())
    step = prepare_on_all_ranks(axes, check, lambda: _prepare(prepare(), rank, world))
    partial = attend_own_keys(step.backend, step.call, step.tensors)
    problem = step.call.problem
    partial = Result(_layout.canonical(partial.out, problem.layout), partial.lse)
    rows = None if rows is None else [own.to(partial.out.device) for own in rows]
    out, lse = merge_ranks(axes, partial, step.sinks, problem, step.by, rows)
    return (out, lse) if step.return_lse else out


def _prepare(call: CachedCall, rank: int, world: int) -> tuple[_PagedStep, SharedArguments]:
    """This rank's attention over its own pages, without sinks, and the values that all ranks must share."""
    mask, cached, layout = call.validated_mask(), call.cached, call.layout
    request, by = _request(call, mask)
    (q, k, v, bias, sinks, slopes), options = with_values(request.tensors), request.options
    request = request._replace(tensors=Tensors(q, k, v, bias, sinks, slopes))
    check_scalars(options)
    q, k, v = autograd.cast_under_autocast(q, k, v, options.k_scale)
    _, q_len, heads, _ = _layout.sizes(q.shape, layout)
    check_optional_tensors(request.tensors, heads)
    assert cached.pages is not None
    keys = _OwnKeys(rank, world, k.shape[1], cached.lengths, cached.pages.shape[1])
    if bias is not None:
        bias = _own_bias(bias, keys, layout)
    key = "context pages", *keys, call.q_counts, heads, q_len, layout, q.device
    own = mask.cached(key, functools.partial(_own_mask, mask, keys, layout, call.q_counts, (heads, q_len), q.device))
    policy = policy_over_ranks(request)
    request = request._replace(
        tensors=Tensors(q, k, v, bias, None, slopes), options=options._replace(mask=own, return_lse=True)
    )
    decision, local, tensors = prepare_call(request, policy)
    problem = local.problem
    if by is None:
        by = default_merge_method(problem.batch * q_len * heads * (problem.v_dim + 1) * 4)  # results and lse in fp32
    shared: SharedArguments = {
        CALL: "attention over a cache",
        "q": describe_queries(problem),
        "cache": f"lengths {cached.lengths}, pages {cached.digest:016x}",
        "q_lengths": call.q_counts,
        "mask": describe_mask(mask),
        "scale": options.scale,
        "softcap": options.softcap,
        "sinks": sinks is not None,
        "by": by,
        "features": sorted(problem.features),
    }
    return _PagedStep(decision.backend, local, tensors, sinks, by, options.return_lse), shared


def _request(call: CachedCall, mask: Mask) -> tuple[Request, MergeMethod | None]:
    """The request over this rank's pools, and the way in which results are merged; None: their size decides."""
    options: dict[str, Any] = {name: value for name, value in call.options.items() if name != "by"}
    if unknown := options.keys() - OPTIONS:
        raise InputError("attend", f"be given only {', '.join(sorted(OPTIONS))} over ranks", sorted(unknown))
    by = call.options.get("by")
    if by is not None:
        check_merge_method(by)
    pools, pages = call.cached.pools, call.cached.pages
    request = Request.from_keywords(
        call.q,
        pools.k,
        pools.v,
        layout=call.layout,
        mask=mask,
        pages=pages,
        k_scale=pools.k_scale,
        v_scale=pools.v_scale,
        **options,
    )
    return request, by


def _own_bias(bias: Tensor, keys: _OwnKeys, layout: Layout) -> Tensor:
    """The bias of this rank's keys; one that is equal for all keys stays."""
    if layout == "thd":
        raise InputError("bias", "be None in layout 'thd'", "a tensor", hint=PADDED)
    bias = extend("bias", bias, max(keys.lengths), keys.extent, 0.0)
    return bias if bias.dim() == 0 or bias.shape[-1] == 1 else bias.index_select(-1, keys.positions(bias.device))


def _own_mask(
    mask: Mask, keys: _OwnKeys, layout: Layout, counts: Counts | None, sizes: tuple[int, int], device: torch.device
) -> Mask:
    """The mask of whole sequences, cut to the keys of this rank, for its block table. sizes: heads, queries."""
    (heads, q_len), batch = sizes, len(keys.lengths)
    own_keys, rows = keys.positions(device), torch.arange(q_len, device=device)
    longest, extent = max(keys.lengths), keys.extent
    if longest != extent and mask.kinds & PER_KEY:
        mask = extend_mask(mask, longest, extent)
    if layout == "thd":
        assert counts is not None
        shape = 1, heads, q_len, batch * extent
        whole = with_documents(mask, keys.lengths, counts, device, extent)
        own = with_documents(EVERY, keys.held, counts, device, None)
        own_keys = (torch.arange(batch, device=device)[:, None] * extent + own_keys).flatten()
    else:
        shape = batch, heads, q_len, extent
        whole = with_cached_lengths(mask, keys.lengths, counts, device)
        own = with_cached_lengths(EVERY, keys.held, counts, device)
    whole.check(*shape, packed=layout == "thd", device=device)
    with torch.inference_mode(False), torch.no_grad():
        form = whole.normal_form(*shape, device).shard(rows, own_keys)
    return dataclasses.replace(own, align="bottom_right", parts=(Ranges(form), *own.parts))

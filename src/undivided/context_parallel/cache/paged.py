"""`ContextPagedKVCache`: a paged cache whose pages are spread over ranks, for contexts that one rank cannot hold.

Every rank has the new tokens and the queries; each page is on one rank. A rank writes the tokens of its own pages and
attends to these, and the partial results are merged by their log-sum-exps, as `ContextParallel.decode` does. No keys
are sent. Legend: B sequences, S new tokens, N key/value heads, D head size, T packed tokens.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from undivided.arguments import layout as _layout
from undivided.arguments.checks import as_integer
from undivided.arguments.layout import Layout
from undivided.backends._base import Backend
from undivided.cache import _attend
from undivided.cache._cache import Lengths, SequenceCache
from undivided.cache._graphs import outside_of_graphs
from undivided.cache._masks import (
    CAUSAL,
    EVERY,
    PER_KEY,
    check_mask,
    extend,
    extend_mask,
    with_cached_lengths,
    with_documents,
)
from undivided.cache._storage import Counts, Heads, NewTokens, Storage, checked_tokens
from undivided.context_parallel.cache.ledger import SpreadPages
from undivided.context_parallel.context import ContextParallel
from undivided.context_parallel.decode import MergeMethod, check_merge_method, merge_ranks
from undivided.context_parallel.exchange.handshake import SharedArguments, describe_mask, prepare_on_all_ranks
from undivided.errors import InputError
from undivided.masks import Mask
from undivided.masks.normal_form import Ranges
from undivided.request.call import Call
from undivided.request.checks import check_extras, checked_mask
from undivided.request.problem import Problem
from undivided.request.request import Options, Request, Tensors
from undivided.request.result import Result
from undivided.run import autograd
from undivided.run.prepare import prepare
from undivided.selection.policy import policy

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class _Local(NamedTuple):
    """This rank's part of a step: attention over its own pages."""

    backend: Backend
    call: Call
    tensors: Tensors


class ContextPagedKVCache(SequenceCache):
    """A paged cache of one layer whose pages are spread over the ranks of a context, for generation.

    Page p of every sequence is on rank ``p % world``, so that all ranks hold equally much of a long sequence. All ranks
    make the same calls with the same new tokens and queries. In `attend`, every rank attends to its own pages; the
    partial results are merged exactly, and all ranks return the result of one process, bit for bit the same.

    Args:
        context: the ranks.
        num_pages: pages of each rank's pool.
        page_size: tokens per page.
        kv_heads, head_dim, value_dim, dtype, device, layout, quantize, mesh: as in `undivided.PagedKVCache`.
        batch: number of sequences, B.

    Raises:
        InputError: an argument is wrong.

    Source: Kwon et al. 2023 (arXiv:2309.06180), pages; Dao et al. 2023, Flash-Decoding, the merge of partial results.

    >>> import torch, undivided
    >>> from undivided.context_parallel import ContextPagedKVCache, simulate
    >>> q, k, v = torch.randn(1, 1, 4, 8), torch.randn(1, 10, 2, 8), torch.randn(1, 10, 2, 8)
    >>> def generate(group):
    ...     context = undivided.ContextParallel(group)
    ...     cache = ContextPagedKVCache(context, 4, page_size=2, kv_heads=2, head_dim=8, batch=1, dtype=torch.float32)
    ...     cache.append(k, v)
    ...     return cache.attend(q), cache.held
    >>> alone = undivided.attention(q, k, v, layout="bshd")
    >>> [(bool((out - alone).abs().max() < 1e-5), held) for out, held in simulate(2, generate)]
    [(True, (6,)), (True, (4,))]
    """

    _ledger: SpreadPages

    def __init__(
        self,
        context: ContextParallel,
        num_pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        *,
        batch: int,
        value_dim: int | None = None,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        layout: Layout = "bshd",
        quantize: str | None = None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        if not isinstance(context, ContextParallel):
            raise InputError("context", "be an undivided.ContextParallel", type(context).__name__)
        self._axes, self.context = context._group_axes(), context
        batch = as_integer("batch", batch, 1)
        self.num_pages, self.page_size = as_integer("num_pages", num_pages, 1), as_integer("page_size", page_size, 1)
        heads = Heads.checked(kv_heads, head_dim, value_dim, dtype, quantize=quantize, mesh=mesh)
        storage = Storage(self.num_pages, self.page_size, heads, torch.device(device))
        ledger = SpreadPages(self.num_pages, self.page_size, batch, context.world)
        super().__init__(ledger, storage, batch, layout)
        self._own = ledger.ranks[context.rank]
        self._table: tuple[int, Tensor] | None = None

    @property
    def held(self) -> tuple[int, ...]:
        """The number of tokens of each sequence that this rank holds."""
        return self._own.lengths

    @property
    def free_pages(self) -> tuple[int, ...]:
        """The number of unused pages of each rank."""
        return tuple([ledger.free_pages for ledger in self._ledger.ranks])

    @outside_of_graphs
    def append(self, k: Tensor, v: Tensor, lengths: Lengths | None = None) -> None:
        """Append new tokens to each sequence: each rank writes those of its own pages. Nothing is sent.

        Args:
            k, v, lengths: as `PagedKVCache.append`, the same on every rank.

        Raises:
            InputError: as `PagedKVCache.append`, on every rank; also if the pages of another rank do not suffice. The
                cache is unchanged.
        """
        storage, ledger, rank = self._storage, self._ledger, self.context.rank
        new = checked_tokens(
            k, v, lengths, layout=self.layout, batch=self.batch, heads=storage.heads, device=storage.k.device
        )
        plan, padded = ledger.plan(new.counts), new.k.shape[1]
        own = plan.ranks[rank]
        storage.copy(own.copies, storage.k.shape[1])
        rows: list[int] = []
        chosen: list[int] = []  # rows of k and v, flattened
        counts = []
        first = 0
        for sequence, count in enumerate(new.counts):
            before = ledger.lengths[sequence]
            chosen += [first + n for n in range(count) if ledger.holds(rank, before + n)]
            counts.append(own.lengths[sequence] - self._own.lengths[sequence])
            rows += self._own.rows(own, sequence, counts[-1])
            first += count if new.packed else padded
        if rows:
            device = storage.k.device
            index = torch.tensor(chosen, dtype=torch.int64, device=device)
            k_own, v_own = (t.flatten(0, 1).index_select(0, index)[None] for t in (new.k, new.v))
            tokens = NewTokens(k_own, v_own, tuple(counts), packed=True)
            storage.write(torch.tensor(rows, dtype=torch.int64, device=device), tokens)
        ledger.commit(plan)
        self._last = new.counts, padded

    @outside_of_graphs
    @torch.no_grad()
    def attend(
        self,
        q: Tensor,
        mask: Mask | None = None,
        q_lengths: Lengths | None = None,
        *,
        bias: Tensor | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        alibi_slopes: Tensor | None = None,
        sinks: Tensor | None = None,
        backend: str | None = None,
        deterministic: bool | None = None,
        by: MergeMethod = "all_gather",
    ) -> Tensor:
        """Attention of q over all cached tokens of all ranks.

        Args:
            q: queries in the cache's layout, the same on every rank; the last tokens of their sequence.
            mask, q_lengths, bias, scale, softcap, alibi_slopes, sinks, backend, deterministic: as
                `PagedKVCache.attend`, of the whole sequences, the same on every rank.
            by: how partial results are merged, as in `ContextParallel.decode`.

        Returns:
            The output in q's layout and dtype, [.., H, Dv], bitwise the same on every rank. Not differentiable.

        Raises:
            InputError: an argument is wrong, or differs between ranks.
            NoBackendError: no allowed backend can run this rank's part.
            RankError: another rank refused its arguments, or failed.
        """

        def prepared() -> tuple[_Local, SharedArguments]:
            check_merge_method(by)
            q_len = _attend.checked_query(q, self.layout, self.batch, self._storage.heads)
            counts = self._queries(q_lengths, q_len)
            request = Request(
                Tensors(q, self._storage.k, self._storage.v, bias, sinks, alibi_slopes),
                Options(self.layout, CAUSAL if mask is None else checked_mask(mask), scale, softcap),
                backend,
                deterministic,
            )
            local = self._local(request, counts, q_len)
            return local, self._shared(local.call.problem, request, counts, by)

        local = prepare_on_all_ranks(self._axes, self.context.check, prepared)
        part = autograd.forward(*local)
        layout = local.call.problem.layout
        part = Result(_layout.canonical(part.out, layout), part.lse)
        return merge_ranks(self._axes, part, sinks, local.call.problem, by)[0]

    def __repr__(self) -> str:
        heads = self._storage.heads
        return (
            f"ContextPagedKVCache(rank {self.context.rank} of {self.context.world}, num_pages={self.num_pages}, "
            f"page_size={self.page_size}, kv_heads={heads.kv_heads}, head_dim={heads.head_dim}, "
            f"lengths={list(self.lengths)}, {self._storage.description})"
        )

    def _local(self, request: Request, counts: Counts | None, q_len: int) -> _Local:
        """This rank's attention over its own pages, without sinks."""
        (q, k, v, bias, sinks, slopes), options = request.tensors, request.options
        scales = self._storage.pools.k_scale, self._storage.pools.v_scale
        q, k, v = autograd.autocast(q, k, v, scales[0])
        heads = _layout.sizes(q.shape, self.layout)[2]
        check_extras(q, bias, sinks, slopes, heads)
        if self.layout == "thd" and bias is not None:
            raise InputError(
                "bias", "be None in layout 'thd'", "a tensor", hint="a cache in layout 'bshd', with padding"
            )
        width = max(1, *map(len, self._own.tables))
        mask = checked_mask(options.mask)
        check_mask(mask, self.layout)
        keys = self._positions(width)
        ranks = self.context.rank, self.context.world
        key = ("context pages", *ranks, self.lengths, counts, heads, q_len, self.page_size, self.layout, q.device)
        own_mask = mask.cached(key, self._mask, mask, counts, heads, q_len, keys.to(q.device))
        if bias is not None:
            bias = extend("bias", bias, max(self.lengths), self._extent, 0.0)
            bias = bias if bias.shape[-1] == 1 else bias.index_select(-1, keys.to(q.device))
        own = request._replace(
            tensors=Tensors(q, k, v, bias, None, slopes),
            options=options._replace(
                mask=own_mask, return_lse=True, pages=self._block_table(), k_scale=scales[0], v_scale=scales[1]
            ),
        )
        allowed = policy(request.backend, request.deterministic)
        if allowed.batch_invariant:
            must = "be False over ranks, whose partial results are merged in their order"
            raise InputError("batch_invariant", must, "True")
        decision, call, tensors = prepare(own, allowed)
        return _Local(decision.backend, call, tensors)

    @property
    def _extent(self) -> int:
        """Keys of the longest sequence, up to the end of the last page that any rank may have in that row of pages."""
        pages = max(1, -(-max(self.lengths) // self.page_size))
        return -(-pages // self.context.world) * self.context.world * self.page_size

    def _positions(self, width: int) -> Tensor:
        """The positions in a sequence of the keys in this rank's first pages, int64 [width * page_size]."""
        pages = torch.arange(width) * self.context.world + self.context.rank
        return (pages[:, None] * self.page_size + torch.arange(self.page_size)).flatten()

    def _mask(self, mask: Mask, counts: Counts | None, heads: int, q_len: int, keys: Tensor) -> Mask:
        """The mask of whole sequences, cut to the keys of this rank, for its block table."""
        longest, extent, device = max(self.lengths), self._extent, keys.device
        rows = torch.arange(q_len, device=device)
        if longest != extent and mask.kinds & PER_KEY:
            mask = extend_mask(mask, longest, extent)
        if self.layout == "thd":
            assert counts is not None
            sizes = 1, heads, q_len, self.batch * extent
            whole = with_documents(mask, self.lengths, counts, device, extent)
            own = with_documents(EVERY, self.held, counts, device, None)
            keys = (torch.arange(self.batch, device=device)[:, None] * extent + keys).flatten()
        else:
            sizes = self.batch, heads, q_len, extent
            whole = with_cached_lengths(mask, self.lengths, counts, device)
            own = with_cached_lengths(EVERY, self.held, counts, device)
        whole.check(*sizes, packed=self.layout == "thd", device=device)
        with torch.inference_mode(False), torch.no_grad():
            part = whole.normal_form(*sizes, device).shard(rows, keys)
        return dataclasses.replace(own, align="bottom_right", parts=(Ranges(part), *own.parts))

    def _block_table(self) -> Tensor:
        """This rank's pages of each sequence, int32 [B, pages of the longest]."""
        if self._table is None or self._table[0] != self._own.changes:
            self._table = self._own.changes, _attend.table(self._own.tables, self.device)
        return self._table[1]

    def _shared(self, problem: Problem, request: Request, counts: Counts | None, by: MergeMethod) -> SharedArguments:
        """The values that all ranks must share."""
        options = request.options
        return {
            "q": (self.layout, problem.batch, problem.q_len, problem.heads, problem.qk_dim, problem.dtype),
            "lengths": self.lengths,
            "q_lengths": counts,
            "mask": describe_mask(checked_mask(options.mask)),
            "scale": options.scale,
            "softcap": options.softcap,
            "sinks": request.tensors.sinks is not None,
            "by": by,
            "features": sorted(problem.features),
        }

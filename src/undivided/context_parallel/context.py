"""`ContextParallel`: who the ranks are, which strategy they follow, and which tokens each of them holds."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from undivided import masks
from undivided._layout import Layout
from undivided._machine import Machine
from undivided._policy import Policy, policy
from undivided._request import Options, Request, Tensors
from undivided._selection import Decision, decide
from undivided._validation import checked_mask
from undivided.cache._graphs import outside_of_graphs
from undivided.context_parallel import _run
from undivided.context_parallel._call import RankCall, Run
from undivided.context_parallel._groups import axes_of, mesh_of
from undivided.context_parallel._request import Whole, bias_by_row, check_own, check_values, inputs_of, said, whole_of
from undivided.context_parallel._schedule import STRATEGIES, Mesh, Strategy
from undivided.context_parallel._shards import SEQUENCE_AXIS, Gathered, axis_of, side_of
from undivided.context_parallel.decode import By, decode, prepared
from undivided.context_parallel.exchange.collectives import Counted, Traffic, gather_all
from undivided.context_parallel.exchange.handshake import Said, agreed
from undivided.context_parallel.max_logit import largest
from undivided.context_parallel.sharding import PLACEMENTS, Placement, PlacementName, Side, document_edges, sizes_of
from undivided.errors import InputError
from undivided.masks import Mask
from undivided.masks._parts import Documents

_MOST_PLACEMENTS = 64


class ContextParallel:
    """Attention over sequences that are spread over ranks: every mask, every layout, with every strategy.

    Each rank holds some tokens of every sequence (`shard`) and calls `undivided.attention` with its part of q, k and v
    and the mask of the whole, in global positions. What it gets is its part of what one process would have computed.

    Args:
        group: who takes part: a `torch.distributed` process group, a `DeviceMesh` of one axis (two, [ring, heads], for
            "ring+all_to_all"), TransformerEngine's pair (all-to-all group, ring group), a group of `simulate`, or None
            for all processes. Not needed where rank and world are given: such an object shards and plans, and cannot
            attend.
        strategy: "ring" (keys come a rank at a time, hidden behind work), "all_gather" (keys are brought together, some
            heads at a time), "all_to_all" (rows are traded for heads), or "ring+all_to_all".
        placement: which tokens a rank holds: "zigzag", "contiguous" or "balanced" (equal work for the mask of `bind`).
        check: compare the arguments of all ranks before every call; a difference is then an error on every rank, and
            not a wait for the group's timeout. One small gathering, without effect on results.
        rank, world: in place of a group.

    Raises:
        InputError: an argument is wrong, or the group has another number of axes than the strategy.

    >>> import undivided
    >>> cp = undivided.ContextParallel(rank=1, world=2).bind(8)
    >>> cp.positions().tolist()
    [2, 3, 4, 5]
    """

    def __init__(
        self,
        group: Any = None,
        strategy: Strategy = "ring",
        placement: PlacementName = "zigzag",
        *,
        check: bool = True,
        rank: int | None = None,
        world: int | None = None,
    ) -> None:
        if strategy not in STRATEGIES:
            raise InputError("strategy", f"be one of {', '.join(map(repr, STRATEGIES))}", repr(strategy))
        if placement not in PLACEMENTS:
            raise InputError("placement", f"be one of {', '.join(map(repr, PLACEMENTS))}", repr(placement))
        self.strategy: Strategy = strategy
        self.placement: PlacementName = placement
        self.check = check
        self.traffic = Traffic()
        self._axes: tuple[Counted, Counted] | None = None
        if rank is None and world is None:
            ring, heads = axes_of(group, strategy)
            self._axes = Counted(ring, self.traffic), Counted(heads, self.traffic)
            self.mesh = Mesh(ring.rank, heads.rank, ring.world, heads.world)
        else:
            self.mesh = mesh_of(strategy, rank, world)
        self.rank = self.mesh.ring * self.mesh.heads_world + self.mesh.heads
        self.world = self.mesh.ring_world * self.mesh.heads_world
        self.bound: Placement | None = None
        self._documents: Mask | None = None
        self._placements: dict[object, Placement] = {}

    def __repr__(self) -> str:
        bound = "" if self.bound is None else f", bound to {self.bound.length('q')} x {self.bound.length('kv')}"
        return f"ContextParallel(rank {self.rank} of {self.world}, {self.strategy}, {self.placement}{bound})"

    def bind(self, q_len: int, kv_len: int | None = None, mask: Mask | None = None) -> ContextParallel:
        """The same ranks with one placement of tokens for every layer, whatever the layer's own mask.

        Args:
            q_len: tokens of the whole sequence; of all documents together, padding included, where they are packed.
            kv_len: keys, where they are not the same tokens as the queries.
            mask: "balanced" shares its work out evenly; its documents are what "zigzag" cuts. Another mask given to
                `attention` is as right, and perhaps less even.

        Raises:
            InputError: a length is not a positive number, or the mask does not fit the lengths.

        >>> import undivided
        >>> from undivided import masks
        >>> cp = undivided.ContextParallel(rank=0, world=2, placement="balanced")
        >>> cp.bind(8, mask=masks.causal()).positions().tolist()
        [0, 1, 6, 7]
        """
        for name, length in (("q_len", q_len), ("kv_len", kv_len)):
            if length is not None and (not isinstance(length, int) or length < 0):
                raise InputError(name, "be a number of tokens", repr(length))
        mask = checked_mask(mask)
        form = None
        keys = q_len if kv_len is None else kv_len
        batch, heads = sizes_of(mask)
        mask.check(batch, heads, q_len, keys, packed=False, device=torch.device("cpu"))
        if self.placement == "balanced":
            form = mask.normal_form(batch, heads, q_len, keys, "cpu")
        bound = copy.copy(self)
        bound.bound = Placement.of(self.placement, self.world, q_len, kv_len, mask, form)
        bound._documents = mask
        return bound

    def positions(self, of: Side = "q", *, within_documents: bool = True) -> Tensor:
        """Where this rank's tokens stand, int64 [local length]: for rotary embeddings, labels, and whatever depends on
        it.

        Args:
            of: "q" or "kv".
            within_documents: count from the beginning of each document of the mask that was bound, where it has any.
        """
        rows = self._bound().rows(side_of(of))[self.rank]
        documents = None if self._documents is None else self._documents.take("documents")[0]
        if not within_documents or not isinstance(documents, Documents):
            return rows
        starts = torch.tensor(document_edges(self._documents, of, self._bound().length(of)))
        return rows - starts[torch.searchsorted(starts, rows, right=True) - 1]

    def placed(self, q_len: int, kv_len: int, mask: Mask = masks.FULL) -> Placement:
        """Who holds which token where this rank holds ``q_len`` queries and ``kv_len`` keys: the bound placement, or
        that of as many on every rank, in documents of the mask where it has any.

        Raises:
            InputError: unbound and "balanced".
        """
        return self.bound or self._unbound(self.world * q_len, self.world * kv_len, mask)

    def seed(self) -> int:
        """A dropout seed that is the same on every rank: the first draws it from torch's generator. All ranks must call
        it."""
        drawn = torch.randint(2**62, ())
        return int(drawn if self._axes is None else gather_all(self._axes, drawn[None])[0])

    def shard(self, tensor: Tensor, layout: Layout | None = None, *, of: Side = "q", dim: int | None = None) -> Tensor:
        """This rank's tokens of a tensor of the whole. Differentiable.

        Args:
            tensor: with all tokens along one axis.
            layout: of q, k or v, which says the axis.
            of: "kv" for keys and values.
            dim: the axis itself, for token ids, hidden states, labels.

        Raises:
            InputError: neither or both of layout and dim, or a length that is not the bound one.

        >>> import torch, undivided
        >>> cp = undivided.ContextParallel(rank=0, world=2)
        >>> cp.shard(torch.arange(8), dim=0).tolist()
        [0, 1, 6, 7]
        """
        axis = axis_of(tensor, layout, dim)
        placement = self._placement_of_length(tensor.shape[axis], of, layout)
        return tensor.index_select(axis, placement.rows(side_of(of))[self.rank].to(tensor.device))

    def unshard(
        self, shards: Tensor | Sequence[Tensor], layout: Layout | None = None, *, of: Side = "q", dim: int | None = None
    ) -> Tensor:
        """The tensor of the whole, on every rank: the exact inverse of `shard`.

        Args:
            shards: this rank's part, gathered from all; or the parts of all ranks, for which no group is needed.
            layout, of, dim: as for `shard`.

        In the backward each rank takes its own part of the gradient: the loss is taken to be computed alike on every
            rank.

        >>> import torch, undivided
        >>> ranks = [undivided.ContextParallel(rank=r, world=3).bind(7) for r in range(3)]
        >>> ranks[0].unshard([cp.shard(torch.arange(7), dim=0) for cp in ranks], dim=0).tolist()
        [0, 1, 2, 3, 4, 5, 6]
        """
        first = shards if isinstance(shards, Tensor) else shards[0]
        axis = axis_of(first, layout, dim)
        if isinstance(shards, Tensor):
            placement = self.bound or self._placement_of_length(self.world * shards.shape[axis], of, layout)
            if self._axes is None:
                raise InputError("shards", "be those of all ranks where there is no group", "one tensor")
            counts = [rows.numel() for rows in placement.rows(side_of(of))]
            parts = list(Gathered.apply(self._axes, self.rank, counts, axis, shards))  # type: ignore[no-untyped-call]
        else:
            parts = list(shards)
            placement = self.bound or self._placement_of_length(sum(p.shape[axis] for p in parts), of, layout)
        return torch.cat(parts, axis).index_select(axis, placement.order[side_of(of)].to(first.device))

    @outside_of_graphs
    def attention(self, request: Request) -> Tensor | tuple[Tensor, Tensor]:
        """What `undivided.attention` calls."""
        axes = self._talking()
        allowed = policy(request.backend, request.deterministic)
        asked, runs = agreed(axes, self.check, lambda: self._ready(request, allowed))
        out, lse = _run.run(self._call(asked, runs), inputs_of(request))
        return (out, lse) if request.options.return_lse else out

    @outside_of_graphs
    @torch.no_grad()
    def max_logit(
        self,
        q: Tensor,
        k: Tensor,
        *,
        layout: Layout,
        mask: Mask | None = None,
        bias: Tensor | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        alibi_slopes: Tensor | None = None,
    ) -> Tensor:
        """The largest allowed score of each head over all ranks' rows and keys: what QK-clipping and logit monitors
        look at.

        A second pass over q . k^T in which keys travel again (values do not), as in the layers' ``return_max_logit``.

        Args:
            q, k: this rank's shards. mask: of the whole. bias: this rank's rows, all keys.
            layout, scale, softcap, alibi_slopes: as for `undivided.attention`.

        Returns:
            fp32 (fp64 for fp64 inputs) [H], the same on every rank, without gradient; -inf where a head has no pair.

        Raises:
            InputError: an argument is wrong, or differs between ranks.
            RankError: another rank refused its arguments, or died.
        """
        options = Options(layout, mask, scale, softcap)
        request = Request(Tensors(q, k, k, bias, None, alibi_slopes), options)
        asked = agreed(self._talking(), self.check, lambda: self._asked(request))
        return largest(self._call(asked, ()), asked.parts, inputs_of(request)._replace(v=k[..., :0]))

    @torch.no_grad()
    def decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        kv_len: int,
        *,
        layout: Layout,
        mask: Mask | None = None,
        bias: Tensor | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        alibi_slopes: Tensor | None = None,
        sinks: Tensor | None = None,
        backend: str | None = None,
        deterministic: bool | None = None,
        by: By = "all_gather",
    ) -> tuple[Tensor, Tensor]:
        """Attention of queries that every rank has over keys that are spread over the ranks: a step of generation.

        Args:
            q: new queries, the same on every rank.
            k, v: the cached keys and values of this rank, for example ``cache.k[:, :n]`` of its own `KVCache`.
            positions: int64, where they stand in the sequence, ascending; every key is at exactly one rank. Let rank
                ``n % world`` append token n, and the ranks' caches grow alike.
            kv_len: keys of all ranks together.
            layout, scale, softcap, alibi_slopes, sinks, backend, deterministic: as for `undivided.attention`.
            mask: of all queries and all keys; None is causal, aligned bottom-right.
            bias: its keys are all keys.
            by: how partial results come together. "all_gather" sends each to every rank, in one exchange: for a few
                tokens. "ring" adds up some rows at each rank and then shares the sums: two exchanges, of 2 / ranks of
                the bytes, for many tokens, as in chunked prefill.

        Returns:
            (out, lse) of all keys, the same on every rank, bit for bit. Not differentiable.

        Raises:
            InputError: an argument is wrong, or differs between ranks.
            RankError: another rank refused its arguments, or died.
        """
        mask = masks.causal(align="bottom_right") if mask is None else mask
        options = Options(layout, mask, scale, softcap, return_lse=True)
        request = Request(Tensors(q, k, v, bias, sinks, alibi_slopes), options)
        axes, allowed = self._talking(), policy(backend, deterministic)
        own = agreed(axes, self.check, lambda: prepared(request, positions, kv_len, allowed, by))
        return decode(axes, own, by)

    def explain(self, request: Request, machine: Machine, device: str | None) -> Decision:
        """What `undivided.explain` calls: the decision for this rank's piece with the most pairs. Talks to nobody."""
        asked = self._request(request, device)
        found = [
            (piece.pairs, part)
            for round_, parts in zip(asked.schedule.rounds, asked.parts, strict=True)
            for piece, part in zip(round_.pieces, parts, strict=True)
        ]
        problem = max(found, key=lambda pair: pair[0])[1] if found else asked.problem
        return decide(problem, machine, policy(request.backend, request.deterministic))

    def _talking(self) -> tuple[Counted, Counted]:
        if self._axes is None:
            raise InputError(
                "context_parallel",
                "have a group to attend with",
                repr(self),
                hint="ContextParallel(group): rank and world alone are for sharding and planning",
            )
        return self._axes

    def _asked(self, request: Request) -> tuple[Whole, Said]:
        """The request of the whole, and what the others must say of theirs."""
        check_values(request.tensors.q)
        asked = self._request(request)
        return asked, said(asked, self.strategy)

    def _request(self, request: Request, device: str | None = None) -> Whole:
        check_own(request)
        (q, k, *_), options = request.tensors, request.options
        axis = SEQUENCE_AXIS[options.layout]
        placement = self.placed(q.shape[axis], k.shape[axis], checked_mask(options.mask))
        return whole_of(request, self.strategy, self.mesh, placement, device)

    def _ready(self, request: Request, allowed: Policy) -> tuple[tuple[Whole, tuple[tuple[Run, ...], ...]], Said]:
        """With the backend of every piece, the same forward and backward."""
        asked, words = self._asked(request)
        return (asked, asked.runs(Machine.this(request.tensors.q.device), allowed)), words

    def _call(self, asked: Whole, runs: tuple[tuple[Run, ...], ...]) -> RankCall:
        axes = self._talking()
        return RankCall(asked.call, asked.schedule, runs, *axes, bias_by_row(asked, axes))

    def _bound(self) -> Placement:
        if self.bound is None:
            raise InputError("context_parallel", "be bound", repr(self), hint="cp = cp.bind(q_len, kv_len, mask)")
        return self.bound

    def _placement_of_length(self, length: int, of: Side, layout: Layout | None) -> Placement:
        """For sharding without a call: the bound placement, or one of this many tokens."""
        if self.bound is not None:
            if length != self.bound.length(side_of(of)):
                raise InputError("tensor", f"have the {self.bound.length(of)} tokens that were bound", length)
            return self.bound
        if length % self.world or layout == "thd":
            raise InputError(
                "context_parallel",
                f"be bound where {self.world} ranks do not divide {length} tokens, or they are packed",
                repr(self),
                hint="cp = cp.bind(q_len, kv_len, mask)",
            )
        return self._unbound(length, length, masks.FULL)

    def _unbound(self, q_len: int, kv_len: int, mask: Mask) -> Placement:
        if self.placement == "balanced":
            raise InputError(
                "context_parallel",
                "be bound for placement='balanced'",
                repr(self),
                hint="cp = cp.bind(q_len, kv_len, mask)",
            )
        edges = document_edges(mask, "q", q_len), document_edges(mask, "kv", kv_len)
        key = (q_len, kv_len, *edges)
        if key not in self._placements:
            if len(self._placements) >= _MOST_PLACEMENTS:
                self._placements.clear()
            same = (q_len, edges[0]) == (kv_len, edges[1])
            self._placements[key] = Placement.of(self.placement, self.world, q_len, None if same else kv_len, mask)
        return self._placements[key]

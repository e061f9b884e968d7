"""`ContextParallel`: the ranks, the strategy that they follow, and the tokens that each of them holds."""

from __future__ import annotations

import functools
from typing import Any, Self

import torch
from torch import Tensor

from undivided import masks
from undivided.arguments.checks import check_type, checked_choice, checked_flag
from undivided.arguments.graphs import outside_of_graphs
from undivided.arguments.layout import SEQUENCE_AXIS, Layout
from undivided.arguments.modes import hidden_from_checkpoints
from undivided.arguments.signature import checked_methods
from undivided.context_parallel import _run
from undivided.context_parallel._call import PieceBackends, RankCall
from undivided.context_parallel._groups import group_axes, rank_mesh
from undivided.context_parallel._request import (
    GlobalRequest,
    agree_on_bias_rows,
    build_global_request,
    check_local,
    check_values,
    policy_over_ranks,
    shared_arguments,
    with_four_bias_axes,
)
from undivided.context_parallel._schedule import STRATEGIES, Mesh, Strategy
from undivided.context_parallel._sharded_tokens import ShardedTokens
from undivided.context_parallel.decode import MergeMethod, decode, prepare_step
from undivided.context_parallel.exchange import handshake
from undivided.context_parallel.exchange.collectives import CountingCommunicator, Traffic, process_groups
from undivided.context_parallel.exchange.handshake import SharedArguments, prepare_on_all_ranks
from undivided.context_parallel.exchange.values import check_not_recorded, with_values
from undivided.context_parallel.max_logit import head_maxima
from undivided.context_parallel.pages.ranks import RanksOfPages
from undivided.context_parallel.sharding import PLACEMENTS, PlacementName
from undivided.errors import InputError
from undivided.machine import Machine
from undivided.masks import Mask
from undivided.request.checks import checked_mask
from undivided.request.request import Options, Request, Tensors
from undivided.request.seed import draw_number
from undivided.selection.decision import Decision, decide


@checked_methods("__init__", "bind", "shard", "tell_of_error", "unshard")
class ContextParallel(ShardedTokens):
    """Attention over sequences that are spread over ranks: every mask, every layout, every strategy.

    Each rank holds some tokens of every sequence (`shard`) and calls `undivided.attention` with its part of q, k and v
    and the mask of the whole sequence, in global positions. The result is its part of what one process would compute.

    Args:
        group: the ranks: a `torch.distributed` process group, a `DeviceMesh` with one axis (two, [ring, heads], for
            "ring+all_to_all"), TransformerEngine's pair (all-to-all group, ring group), a group of `simulate`, or None
            for all processes. If rank and world are given instead, the object shards and plans, but cannot attend.
        strategy: "ring" (keys of one rank at a time, hidden behind computation), "all_gather" (keys of all ranks, some
            heads at a time), "all_to_all" (rows are exchanged for heads), or "ring+all_to_all".
        placement: which tokens a rank holds: "zigzag", "contiguous" or "balanced" (equal work for the mask of `bind`).
        check: compare the arguments of all ranks before every call, which costs one small all-gather. A difference
            raises an error on every rank at once, instead of a timeout of the group. It never changes results.
        rank, world: this rank and the number of ranks, instead of a group.

    Attributes:
        traffic: `Traffic`, what this rank has sent and computed.
        rank, world: this rank and the number of ranks.
        bound: the `Placement` of `bind`, or None.

    Raises:
        InputError: an argument is wrong, or the number of axes of the group is not that of the strategy.

    Source: ring attention (arXiv:2310.01889), DeepSpeed Ulysses (arXiv:2309.14509), all-gather as in Llama 3
        (arXiv:2407.21783), the pair of both as in USP (arXiv:2405.07719).

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
        checked_choice("strategy", strategy, STRATEGIES)
        checked_choice("placement", placement, PLACEMENTS)
        checked_flag("check", check)
        self.strategy: Strategy = strategy
        self.check = check
        self.traffic = Traffic()
        if rank is None and world is None:
            ring, heads = group_axes(group, strategy)
            mesh = Mesh(ring.rank, heads.rank, ring.world, heads.world)
            first, second = (CountingCommunicator(axis, self.traffic, strategy) for axis in (ring, heads))
            super().__init__(mesh, placement, (first, second))
        else:
            super().__init__(rank_mesh(strategy, rank, world), placement, None)

    def __copy__(self) -> Self:
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)  # with the group, which is not pickled
        return other

    def __deepcopy__(self, memo: object) -> Self:
        return self  # a copy of a layer has the same ranks

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_axes": None}  # a process that loads a layer sets its own group

    def __repr__(self) -> str:
        bound = "" if self.bound is None else f", bound to {self.bound.length('q')} x {self.bound.length('kv')}"
        return f"ContextParallel(rank {self.rank} of {self.world}, {self.strategy}, {self.placement}{bound})"

    def seed(self) -> int:
        """A dropout seed that is the same on every rank: rank 0 draws it from torch's default generator.

        All ranks must call it. One process would draw the same from a generator of the same state.

        Returns:
            An int from 0 to 2**62 - 1.

        Raises:
            InputError: another rank makes another call.
            RankError: another rank refused its arguments, or failed.

        >>> import undivided
        >>> from undivided.context_parallel import simulate
        >>> first, second = simulate(2, lambda group: undivided.ContextParallel(group).seed())
        >>> first == second
        True
        """
        check_not_recorded(())
        drawn = draw_number()
        return drawn if self._axes is None else handshake.agree_on_seed(self._axes, drawn)

    def tell_of_error(self, error: Exception) -> None:
        """Make the other ranks raise `RankError` in their next call, which this rank will not make, as layers do.

        Args:
            error: the reason, whose text the other ranks show.

        Raises:
            InputError: it is no exception.

        >>> import undivided
        >>> from undivided.context_parallel import simulate
        >>> simulate(1, lambda group: undivided.ContextParallel(group).tell_of_error(ValueError("a wrong width")))
        [None]
        """
        check_type("error", error, Exception, "an exception")
        if self._axes is not None and self.check:
            handshake.tell_of_error(self._axes, error)

    @outside_of_graphs
    @hidden_from_checkpoints
    def attention(self, request: Request) -> Tensor | tuple[Tensor, Tensor]:
        """This rank's part of the output, for `undivided.attention`.

        Args:
            request: with this rank's tensors.

        Returns:
            out in the caller's layout; (out, lse) if lse is requested.
        """
        axes = self._group_axes()
        request = request._replace(tensors=with_values(request.tensors))
        global_request, backends = prepare_on_all_ranks(axes, self.check, lambda: self._request_and_backends(request))
        out, lse = _run.run(self._rank_call(global_request, backends), with_four_bias_axes(request.tensors))
        return (out, lse) if request.options.return_lse else out

    @outside_of_graphs
    @hidden_from_checkpoints
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
        """The largest allowed score of each head over the rows and keys of all ranks, as QK-clipping needs it.

        A second pass over q . k^T in which keys are sent again (values are not), as for ``return_max_logit`` of the
        layers.

        Args:
            q, k: this rank's shards, floating point, in `layout`.
            layout, scale, softcap, alibi_slopes: as for `undivided.attention`.
            mask: of the whole sequence; None is every pair.
            bias: this rank's rows, all keys.

        Returns:
            fp32 (fp64 for fp64 inputs) [H], the same on every rank, without gradient; -inf for a head without an
            allowed pair.

        Raises:
            InputError: an argument is wrong, or differs between ranks.
            RankError: another rank refused its arguments, or failed.

        >>> import torch, undivided
        >>> from undivided.context_parallel import simulate
        >>> q = k = torch.tensor([1.0, 2.0, 3.0, 4.0]).reshape(1, 4, 1, 1)
        >>> def step(group):
        ...     cp = undivided.ContextParallel(group)
        ...     return cp.max_logit(cp.shard(q, "bshd"), cp.shard(k, "bshd"), layout="bshd", scale=1.0).tolist()
        >>> simulate(2, step)
        [[16.0], [16.0]]
        """
        options = Options(layout, mask, scale, softcap)
        request = Request(with_values(Tensors(q, k, k, bias, None, alibi_slopes)), options)
        prepare = functools.partial(self._checked_request, request, "ContextParallel.max_logit()")
        prepared = prepare_on_all_ranks(self._group_axes(), self.check, prepare)
        tensors = with_four_bias_axes(request.tensors)._replace(v=request.tensors.k[..., :0])
        return head_maxima(self._rank_call(prepared, ()), prepared.problems, tensors)

    @outside_of_graphs
    @hidden_from_checkpoints
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
        by: MergeMethod = "all_gather",
    ) -> tuple[Tensor, Tensor]:
        """(out, lse) of queries that every rank has, over keys that are spread over the ranks: one step of generation.

        Args:
            q: the new queries, the same on every rank.
            k, v: the cached keys and values of this rank, for example ``cache.k[:, :n]`` of a `KVCache` on each rank.
            positions: int64 [keys of this rank], their positions in the sequence, ascending; every key is on exactly
                one rank. If rank ``n % world`` appends token n, the caches of all ranks grow alike.
            kv_len: number of keys of all ranks together.
            layout, scale, softcap, alibi_slopes, sinks, backend, deterministic: as for `undivided.attention`.
            mask: of all queries and all keys; None is causal, aligned bottom-right.
            bias: its keys are all keys.
            by: how partial results are merged. "all_gather" sends each to every rank in one exchange, for a few tokens.
                "ring" merges some rows on each rank and then shares the sums: two exchanges with 2 / world of the
                bytes, for many tokens, as in chunked prefill.

        Returns:
            out in `layout` and lse [B, H, Sq] (natural logarithm) over all keys, bitwise the same on every rank. Not
            differentiable.

        Raises:
            InputError: an argument is wrong, or differs between ranks.
            RankError: another rank refused its arguments, or failed.

        >>> import torch, undivided
        >>> from undivided.context_parallel import simulate
        >>> q, k, v = torch.randn(1, 1, 2, 8), torch.randn(1, 6, 2, 8), torch.randn(1, 6, 2, 8)
        >>> def step(group):
        ...     cp = undivided.ContextParallel(group)
        ...     own = torch.arange(cp.rank, 6, cp.world)
        ...     return cp.decode(q, k[:, own], v[:, own], own, 6, layout="bshd")[0]
        >>> alone = undivided.attention(q, k, v, layout="bshd")
        >>> [bool((out - alone).abs().max() < 1e-5) for out in simulate(2, step)]
        [True, True]
        """
        mask = masks.causal(align="bottom_right") if mask is None else mask
        options = Options(layout, mask, scale, softcap, return_lse=True)
        tensors = with_values(Tensors(q, k, v, bias, sinks, alibi_slopes))
        request = Request(tensors, options, backend, deterministic)
        axes = self._group_axes()
        step = prepare_on_all_ranks(axes, self.check, lambda: prepare_step(request, positions, kv_len, by))
        return decode(axes, step, by)

    def explain(self, request: Request, machine: Machine, device: str | None) -> Decision:
        """The decision for this rank's piece with the most pairs, for `undivided.explain`. Nothing is sent.

        Args:
            request: with this rank's tensors, which may be on the meta device.
            machine: the machine to decide for.
            device: replaces the device of the tensors; None keeps it.

        Returns:
            The `Decision` of that piece; of the whole, if this rank has no pair.
        """
        global_request = self._request(request, device)
        pieces = [
            (piece.pairs, problem)
            for round_, problems in zip(global_request.schedule.rounds, global_request.problems, strict=True)
            for piece, problem in zip(round_.pieces, problems, strict=True)
        ]
        problem = max(pieces, key=lambda pair: pair[0])[1] if pieces else global_request.problem
        return decide(problem, machine, policy_over_ranks(request))

    def process_groups(self) -> list[list[int]]:
        """The global ranks of each process group: one, or ring and heads for "ring+all_to_all". For DTensors.

        Returns:
            One list for each group of `torch.distributed`; of a simulated group, none.

        >>> import undivided
        >>> from undivided.context_parallel import simulate
        >>> simulate(1, lambda group: undivided.ContextParallel(group).process_groups())
        [[]]
        """
        return process_groups(self._group_axes())

    def groups_for_dtensors(self) -> list[list[int]]:
        """`process_groups`, if the ranks hold equally many tokens: the shards of a DTensor are equal.

        Returns:
            As `process_groups`.

        Raises:
            InputError: the bound placement gives ranks different numbers of tokens; on every rank.

        >>> import undivided
        >>> from undivided.context_parallel import simulate
        >>> simulate(1, lambda group: undivided.ContextParallel(group).bind(8).groups_for_dtensors())
        [[]]
        """
        owned = [] if self.bound is None else [(of, self.bound.rows(of)) for of in ("q", "kv")]
        for of, rows_of_ranks in owned:
            counts = [rows.numel() for rows in rows_of_ranks]
            if len(set(counts)) > 1:
                must = "give every rank equally many tokens if q, k and v are DTensors"
                hint = "pad the sequence, or each document, to a multiple of 2 * ranks, or pass the local tensors"
                raise InputError("context_parallel", must, f"{counts} tokens of {of}", hint=hint)
        return self.process_groups()

    def page_ranks(self) -> RanksOfPages:
        """The ranks as owners of pages, for ``InferenceParams(context_parallel=)`` and `ContextPagedKVCache`.

        Returns:
            An object with the interface that the caches call.

        Raises:
            InputError: there is no group.

        >>> import undivided
        >>> from undivided.context_parallel import simulate
        >>> simulate(2, lambda group: undivided.ContextParallel(group).page_ranks().rank)
        [0, 1]
        """
        return RanksOfPages(self, self._group_axes(), self.check)

    def _group_axes(self) -> tuple[CountingCommunicator, CountingCommunicator]:
        """The communicators (ring, heads); raises InputError if there is no group."""
        if self._axes is None:
            raise InputError(
                "context_parallel",
                "have a group to attend with",
                repr(self),
                hint="ContextParallel(group): with rank and world alone, or after pickling, it only shards and plans; "
                "for a layer, set_context_parallel_group(group)",
            )
        return self._axes

    def _checked_request(self, request: Request, call: str) -> tuple[GlobalRequest, SharedArguments]:
        """The request over all ranks' tokens, and the values that must be the same on all ranks."""
        check_values(request.tensors.q)
        global_request = self._request(request)
        return global_request, {handshake.CALL: call, **shared_arguments(global_request, self.strategy)}

    def _request(self, request: Request, device: str | None = None) -> GlobalRequest:
        check_local(request)
        (q, k, *_), options = request.tensors, request.options
        axis = SEQUENCE_AXIS[options.layout]
        placement = self.placed(q.shape[axis], k.shape[axis], checked_mask(options.mask))
        return build_global_request(request, self.strategy, self.mesh, placement, device)

    def _request_and_backends(self, request: Request) -> tuple[tuple[GlobalRequest, PieceBackends], SharedArguments]:
        """`_checked_request`, with the backend of every piece."""
        policy = policy_over_ranks(request)
        global_request, shared = self._checked_request(request, "attention")
        return (global_request, global_request.backends(Machine.this(request.tensors.q.device), policy)), shared

    def _rank_call(self, request: GlobalRequest, backends: PieceBackends) -> RankCall:
        axes = self._group_axes()
        return RankCall(request.call, request.schedule, backends, *axes, agree_on_bias_rows(request, axes))

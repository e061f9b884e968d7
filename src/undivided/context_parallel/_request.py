"""From one rank's arguments to its part of a validated whole: the whole's Problem, its schedule, and who runs each
piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from undivided import _layout
from undivided._arguments import check_tensor
from undivided._call import Call
from undivided._layout import Layout
from undivided._machine import Machine
from undivided._normalise import normalise
from undivided._policy import Policy
from undivided._problem import Problem
from undivided._request import Request, Tensors
from undivided._selection import select
from undivided._validation import check_extras, check_kinds, check_layout, check_ranks, checked_mask
from undivided.context_parallel import _schedule
from undivided.context_parallel._call import Run, piece_problem
from undivided.context_parallel._schedule import Mesh, Schedule, Strategy
from undivided.context_parallel._shards import SEQUENCE_AXIS
from undivided.context_parallel.exchange.collectives import Communicator, gather_all
from undivided.context_parallel.exchange.handshake import mask_words
from undivided.context_parallel.sharding import Placement, Side
from undivided.errors import InputError
from undivided.masks import Mask


class Whole(NamedTuple):
    """A request of all ranks' tokens, checked. call: of the whole. parts: the problem of every round's pieces.

    by_row: whether the bias has rows of its own for every rank's queries; None where this rank cannot tell.
    """

    call: Call
    placement: Placement
    schedule: Schedule
    parts: tuple[tuple[Problem, ...], ...]
    by_row: bool | None

    @property
    def problem(self) -> Problem:
        """Of the whole."""
        return self.call.problem

    def runs(self, machine: Machine, allowed: Policy) -> tuple[tuple[Run, ...], ...]:
        """The backend of every piece, the same forward and backward; raises NoBackendError."""
        return tuple(tuple(decided(part, machine, allowed) for part in parts) for parts in self.parts)


def decided(part: Problem, machine: Machine, allowed: Policy) -> Run:
    """The backend that runs a piece, and the problem as it was decided; raises NoBackendError."""
    decision = select(part, machine, allowed)
    return decision.backend, decision.problem


def whole_of(
    request: Request, strategy: Strategy, mesh: Mesh, placement: Placement, device: str | None = None
) -> Whole:
    """Check this rank's request, in which `check_own` has found nothing wrong, as one of the whole.

    `device` replaces that of the tensors, which may then be on the meta device.

    Raises:
        InputError: as `undivided.attention`'s; or a length that is not this rank's part of the placement.
    """
    (q, k, v, bias, *_), layout = request.tensors, request.options.layout
    rank = mesh.ring * mesh.heads_world + mesh.heads
    rows = placement.q[rank].numel()
    _check_length("q", q, layout, placement, "q", rank)
    _check_length("k", k, layout, placement, "kv", rank)
    by_row = _bias_has_rows(bias, rows, placement)
    q_len, kv_len = placement.length("q"), placement.length("kv")
    whole = [_whole(t, layout, n) for t, n in ((q, q_len), (k, kv_len), (v, kv_len))]
    whole_bias, sinks, slopes = (None if t is None else torch.empty_like(t, device="meta") for t in request.tensors[3:])
    if bias is not None and by_row is not False:
        shape = (*bias.shape[:-2], placement.length("q"), bias.shape[-1])
        whole_bias = bias.new_empty(shape, device="meta")
    needs = tuple(torch.is_grad_enabled() and t is not None and t.requires_grad for t in request.tensors)
    sized = Tensors._make((*whole, whole_bias, sinks, slopes))
    call, _ = normalise(request._replace(tensors=sized), device or q.device.type, needs)
    problem = call.problem
    here = torch.device("cpu") if q.is_meta else q.device  # the ranges of a mask have values
    schedule = _schedule_of(problem, call.mask, strategy, mesh, placement, here)
    parts = tuple(tuple(piece_problem(problem, piece) for piece in round_.pieces) for round_ in schedule.rounds)
    return Whole(call, placement, schedule, parts, by_row)


def check_own(request: Request) -> None:
    """What can be said of this rank's tensors before anything is known of the whole."""
    (q, k, v, bias, sinks, slopes), options = request.tensors, request.options
    layout = options.layout
    check_layout(layout)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, tensor)
    for name, small in (("bias", bias), ("sinks", sinks), ("alibi_slopes", slopes)):
        if small is not None:
            check_tensor(name, small)
    if any(tensor.is_meta for tensor in checked_mask(options.mask).tensors):
        raise InputError(
            "mask",
            "hold values under context parallelism: the ranks' work is planned by them",
            "a meta tensor",
            hint="q, k and v may be meta tensors for undivided.explain; lengths, offsets and ids may not",
        )
    check_ranks(q, k, v, layout, None)
    check_kinds(q, k, v)
    heads = _layout.sizes(q.shape, layout)[2]
    check_extras(q, bias, sinks, slopes, heads)
    if options.pages is not None:
        raise InputError(
            "pages",
            "be None under context parallelism: a block table is of one rank's pool, keys are of all",
            "one",
            hint="generation over keys that are spread over ranks: ContextParallel.decode",
        )
    if options.dropout_p and options.dropout_seed is None:
        raise InputError(
            "dropout_seed",
            "be given under context parallelism, the same on every rank",
            "None",
            hint="dropout_seed=step: each rank would draw another one, and the pattern is a function of the seed",
        )


def check_values(q: Tensor) -> None:
    """InputError for a meta tensor: the ranks exchange values."""
    if isinstance(q, Tensor) and q.is_meta:
        hint = "undivided.explain takes meta tensors"
        raise InputError("q", "hold values under context parallelism", "a meta tensor", hint=hint)


def _check_length(name: str, tensor: Tensor, layout: Layout, placement: Placement, side: Side, rank: int) -> None:
    length, wanted = tensor.shape[SEQUENCE_AXIS[layout]], placement.rows(side)[rank].numel()
    if length != wanted:
        raise InputError(
            name,
            f"have rank {rank}'s {wanted} of {placement.length(side)} tokens",
            f"{length} in {list(tensor.shape)}",
            hint=f"cp.bind(q_len, kv_len, mask), then {name} = cp.shard({name}, layout={layout!r}, of={side!r})",
        )


def _bias_has_rows(bias: Tensor | None, rows: int, placement: Placement) -> bool | None:
    """Whether its axis of queries is this rank's rows; None where one row may be that, or be meant for all ranks'
    rows."""
    if bias is None or bias.dim() < 2:
        return False
    if bias.shape[-2] not in (1, rows):
        raise InputError(
            "bias",
            f"have 1 or this rank's {rows} query rows, and all keys",
            list(bias.shape),
            hint="bias = cp.shard(bias, dim=-2): its rows are local, its keys global",
        )
    if bias.shape[-2] != 1:
        return True
    if rows > 1:
        return False
    return None if one_row_among_more(placement) else max(map(torch.Tensor.numel, placement.q)) <= 1


def bias_by_row(asked: Whole, axes: Sequence[Communicator]) -> bool:
    """Whether the bias has rows of its own; a rank with a single row asks the others."""
    if asked.problem.bias is None or axes[1].world == 1:
        return asked.by_row is not False
    if not one_row_among_more(asked.placement):
        return bool(asked.by_row)
    return bool(torch.cat(gather_all(axes, torch.tensor([bool(asked.by_row)]))).any())


def one_row_among_more(placement: Placement) -> bool:
    """Whether some ranks have one row and others more: one row of bias is then a rank's own, or meant for all."""
    counts = {rows.numel() for rows in placement.q}
    return 1 in counts and max(counts) > 1


def _whole(tensor: Tensor, layout: Layout, length: int) -> Tensor:
    """A tensor without contents in the shape of the whole."""
    shape = list(tensor.shape)
    shape[SEQUENCE_AXIS[layout]] = length
    return torch.empty(shape, dtype=tensor.dtype, device="meta")


def _schedule_of(
    problem: Problem, mask: Mask, strategy: Strategy, mesh: Mesh, placement: Placement, device: torch.device
) -> Schedule:
    """The schedule, remembered by the mask."""
    with_positions = bool(problem.features & {"alibi", "dropout"})
    key = (
        "schedule",
        problem.batch,
        problem.heads,
        problem.kv_heads,
        strategy,
        mesh,
        placement,
        device,
        with_positions,
    )

    def build() -> Schedule:
        with torch.inference_mode(False), torch.no_grad():
            form = mask.normal_form(problem.batch, problem.heads, problem.q_len, problem.kv_len, device)
            return _schedule.build(form, placement, strategy, mesh, problem.heads, problem.kv_heads, with_positions)

    return mask.remembered(key, build)


def _axes_of_bias(asked: Whole) -> str | None:
    """Without that of queries where a rank may not know whether it has one."""
    axes = asked.problem.bias
    return axes if axes is None or not one_row_among_more(asked.placement) else axes[:2] + axes[3:]


def said(asked: Whole, strategy: Strategy) -> dict[str, object]:
    """What must be the same on every rank, by argument."""
    call, problem, placement = asked.call, asked.problem, asked.placement
    seed = call.dropout_seed
    return {
        "q": (problem.layout, problem.batch, problem.q_len, problem.heads, problem.qk_dim, problem.dtype),
        "k": (problem.kv_len, problem.kv_heads, problem.v_dim),
        "mask": mask_words(call.mask),
        "strategy": strategy,
        "placement": f"{placement.digest:x}",
        "scale": call.scale,
        "softcap": call.softcap,
        "dropout_p": (call.dropout_p, seed if isinstance(seed, int) or seed is None else int(seed)),
        "requires_grad": dict(zip(("q", "k", "v", "bias", "sinks", "alibi_slopes"), call.needs, strict=True)),
        "bias": _axes_of_bias(asked),
        "features": sorted(problem.features),
    }


def inputs_of(request: Request) -> Tensors:
    """This rank's tensors, with a bias of four axes [B|1, H|1, R|1, K|1]."""
    bias = request.tensors.bias
    if bias is None or bias.dim() == 4:
        return request.tensors
    return request.tensors._replace(bias=bias[(None,) * (4 - bias.dim())])

"""One rank's request: arguments validated as part of the whole sequence, its schedule, and the backend per piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from undivided.arguments import layout as _layout
from undivided.arguments.checks import check_tensor
from undivided.arguments.layout import SEQUENCE_AXIS, Layout
from undivided.context_parallel import _schedule
from undivided.context_parallel._call import PieceBackend, PieceBackends, piece_problem
from undivided.context_parallel._schedule import Mesh, Schedule, Strategy
from undivided.context_parallel.exchange.collectives import Communicator, gather_all
from undivided.context_parallel.exchange.handshake import describe_mask, describe_queries, describe_sizes
from undivided.context_parallel.sharding import Placement, Side
from undivided.errors import InputError
from undivided.machine import Machine
from undivided.masks import Mask
from undivided.request.call import Call
from undivided.request.checks import (
    check_axes,
    check_dtypes_and_devices,
    check_layout,
    check_optional_tensors,
    checked_mask,
)
from undivided.request.normalise import normalise
from undivided.request.problem import Problem
from undivided.request.request import OPTIONAL_TENSORS, Request, Tensors
from undivided.run.autograd import has_tangent
from undivided.selection.decision import select
from undivided.selection.policy import Policy, current_policy


def policy_over_ranks(request: Request) -> Policy:
    """The backends that the caller allows; InputError if results must not depend on the batch."""
    policy = current_policy(request.backend, request.deterministic, request.batch_invariant)
    if policy.batch_invariant:
        must = "be False over ranks, whose partial results are merged in their order"
        raise InputError("batch_invariant", must, "True")
    return policy


class GlobalRequest(NamedTuple):
    """A request over the tokens of all ranks, validated, and this rank's part of it.

    call: over the tokens of all ranks. schedule: what this rank does.
    problems: for every round, the problems of its pieces.
    bias_has_rows: whether the bias has one row per query of its rank; None if this rank cannot tell.
    """

    call: Call
    placement: Placement
    schedule: Schedule
    problems: tuple[tuple[Problem, ...], ...]
    bias_has_rows: bool | None

    @property
    def problem(self) -> Problem:
        """The problem over the tokens of all ranks."""
        return self.call.problem

    def backends(self, machine: Machine, policy: Policy) -> PieceBackends:
        """The backend of every piece, for its forward and its backward; raises NoBackendError."""
        return tuple(
            tuple(select_backend(problem, machine, policy) for problem in problems) for problems in self.problems
        )


def select_backend(problem: Problem, machine: Machine, policy: Policy) -> PieceBackend:
    """The backend that runs a piece, and the decided problem; raises NoBackendError."""
    decision = select(problem, machine, policy)
    return decision.backend, decision.problem


def build_global_request(
    request: Request, strategy: Strategy, mesh: Mesh, placement: Placement, device: str | None = None
) -> GlobalRequest:
    """This rank's request, validated as part of the whole sequence; `check_local` has validated the tensors themselves.

    `device` replaces the device of the tensors, which may then be on the meta device.

    Raises:
        InputError: as for `undivided.attention`, or a length is not that of this rank's part of the placement.
    """
    (q, k, _, bias, *_), layout = request.tensors, request.options.layout
    rank = mesh.rank
    rows = placement.q[rank].numel()
    _check_length("q", q, layout, placement, "q", rank)
    _check_length("k", k, layout, placement, "kv", rank)
    bias_has_rows = _bias_has_rows(bias, rows, placement)
    q_len, kv_len = placement.length("q"), placement.length("kv")
    needs = tuple(torch.is_grad_enabled() and t is not None and t.requires_grad for t in request.tensors)
    call = whole_call(request, q_len, kv_len, needs, device, resize_bias=bias_has_rows is not False)
    problem = call.problem
    form_device = torch.device("cpu") if q.is_meta else q.device  # the ranges of a mask have values
    schedule = _cached_schedule(problem, call.mask, strategy, mesh, placement, form_device)
    problems = tuple(tuple(piece_problem(problem, piece) for piece in round_.pieces) for round_ in schedule.rounds)
    return GlobalRequest(call, placement, schedule, problems, bias_has_rows)


def check_local(request: Request) -> None:
    """Check this rank's arguments as far as they do not depend on the whole sequence; raises InputError."""
    (q, k, v, *_), options = request.tensors, request.options
    layout = options.layout
    check_layout(layout)
    for name, tensor in zip(Tensors._fields, request.tensors, strict=True):
        if tensor is not None or name not in OPTIONAL_TENSORS:
            check_tensor(name, tensor)
    if torch._C._functorch.peek_interpreter_stack() is not None or has_tangent(request.tensors):
        must = "be None under torch.func, vmap and forward-mode differentiation: the exchanges have no such derivative"
        hint = "loss.backward() or torch.autograd.grad over ranks, torch.func in one process"
        raise InputError("context_parallel", must, "ranks", hint=hint)
    if any(tensor.is_meta for tensor in checked_mask(options.mask).tensors):
        raise InputError(
            "mask",
            "hold values under context parallelism: the ranks plan their work from them",
            "a meta tensor",
            hint="q, k and v may be meta tensors for undivided.explain; lengths, offsets and ids may not",
        )
    check_axes(q, k, v, layout, None)
    if options.k_scale is not None or options.v_scale is not None:
        raise InputError(
            "k_scale" if options.k_scale is not None else "v_scale",
            "be None under context parallelism: the ranks exchange keys and values in the dtype of q",
            "a tensor",
            hint="undivided.quantization.dequantize(k, k_scale, q.dtype)",
        )
    check_dtypes_and_devices(q, k, v)
    heads = _layout.sizes(q.shape, layout)[2]
    check_optional_tensors(request.tensors, heads)
    if options.pages is not None:
        raise InputError(
            "pages",
            "be None under context parallelism: a block table describes the pool of one rank, keys lie on all ranks",
            "a block table",
            hint="ContextPagedKVCache generates over pages that are spread over ranks, ContextParallel.decode over "
            "keys",
        )
    if options.dropout_p and options.dropout_seed is None:
        raise InputError(
            "dropout_seed",
            "be given under context parallelism, the same on every rank",
            "None",
            hint="dropout_seed=step: the pattern is a function of the seed, and each rank would draw a different one",
        )


def check_values(q: Tensor) -> None:
    """Raise InputError for a meta tensor: the ranks exchange values."""
    if isinstance(q, Tensor) and q.is_meta:
        hint = "undivided.explain takes meta tensors"
        raise InputError("q", "hold values under context parallelism", "a meta tensor", hint=hint)


def _check_length(name: str, tensor: Tensor, layout: Layout, placement: Placement, side: Side, rank: int) -> None:
    length, expected = tensor.shape[SEQUENCE_AXIS[layout]], placement.rows(side)[rank].numel()
    if length != expected:
        raise InputError(
            name,
            f"have rank {rank}'s {expected} of {placement.length(side)} tokens",
            f"{length} in {list(tensor.shape)}",
            hint=f"cp.bind(q_len, kv_len, mask), then {name} = cp.shard({name}, layout={layout!r}, of={side!r})",
        )


def _bias_has_rows(bias: Tensor | None, rows: int, placement: Placement) -> bool | None:
    """Whether the bias has one row per query of this rank, and not one row for all queries; None if that is unknown."""
    if bias is None or bias.dim() < 2:
        return False
    if bias.shape[-2] not in (1, rows):
        raise InputError(
            "bias",
            f"have 1 or this rank's {rows} query rows, and all keys",
            list(bias.shape),
            hint="bias = cp.shard(bias, dim=-2): its rows are those of this rank, its keys those of the whole",
        )
    if bias.shape[-2] != 1:
        return True
    if rows > 1:
        return False
    return None if single_row_is_ambiguous(placement) else max(map(torch.Tensor.numel, placement.q)) <= 1


def agree_on_bias_rows(request: GlobalRequest, axes: Sequence[Communicator]) -> bool:
    """Whether the bias has one row per query; gathered from all ranks if a rank with a single row cannot tell."""
    if request.problem.bias is None or axes[1].world == 1:
        return request.bias_has_rows is not False
    if not single_row_is_ambiguous(request.placement):
        return bool(request.bias_has_rows)
    return bool(torch.cat(gather_all(axes, torch.tensor([bool(request.bias_has_rows)], device="cpu"))).any())


def single_row_is_ambiguous(placement: Placement) -> bool:
    """Whether some ranks hold one row and others more: one row of bias is then either that rank's row or broadcast."""
    counts = {rows.numel() for rows in placement.q}
    return 1 in counts and max(counts) > 1


def whole_call(
    request: Request, q_len: int, kv_len: int, needs: tuple[bool, ...], device: str | None = None, *, resize_bias: bool
) -> Call:
    """The call over the tokens of all ranks, validated on tensors without contents.

    needs, device: as for `normalise`. resize_bias: the bias has one row per query of this rank.
    """
    (q, k, v, *optional), axis = request.tensors, SEQUENCE_AXIS[request.options.layout]
    q_meta, k_meta, v_meta = (_resized_meta(t, axis, n) for t, n in ((q, q_len), (k, kv_len), (v, kv_len)))
    bias, sinks, slopes = (None if t is None else torch.empty_like(t, device="meta") for t in optional)
    if bias is not None and resize_bias:
        bias = _resized_meta(bias, -2, q_len)
    request = request._replace(tensors=Tensors(q_meta, k_meta, v_meta, bias, sinks, slopes))
    return normalise(request, device or q.device.type, needs)[0]


def _resized_meta(tensor: Tensor, axis: int, length: int) -> Tensor:
    """A meta tensor of the same dtype and shape, but with `length` entries along an axis."""
    shape = list(tensor.shape)
    shape[axis] = length
    return torch.empty(shape, dtype=tensor.dtype, device="meta")


def _cached_schedule(
    problem: Problem, mask: Mask, strategy: Strategy, mesh: Mesh, placement: Placement, device: torch.device
) -> Schedule:
    """The schedule, cached on the mask."""
    with_positions = bool(problem.features & {"alibi", "dropout"})
    sizes = problem.batch, problem.heads, problem.kv_heads
    key = ("schedule", sizes, strategy, mesh, placement, device, with_positions)

    def build() -> Schedule:
        with torch.inference_mode(False), torch.no_grad():
            form = mask.normal_form(problem.batch, problem.heads, problem.q_len, problem.kv_len, device)
            return _schedule.build(form, placement, strategy, mesh, problem.heads, problem.kv_heads, with_positions)

    return mask.cached(key, build)


def _comparable_bias_axes(request: GlobalRequest) -> str | None:
    """The axes of the bias, without that of queries if a rank may be unable to tell whether it is broadcast."""
    axes = request.problem.bias
    return axes if axes is None or not single_row_is_ambiguous(request.placement) else axes[:2] + axes[3:]


def shared_arguments(request: GlobalRequest, strategy: Strategy) -> dict[str, object]:
    """The values that must be the same on every rank, by argument."""
    call, problem, placement = request.call, request.problem, request.placement
    seed = call.dropout_seed
    return {
        "q": describe_queries(problem),
        "k": describe_sizes(tokens=problem.kv_len, heads=problem.kv_heads, value_size=problem.v_dim),
        "mask": describe_mask(call.mask),
        "strategy": strategy,
        "placement": f"{placement.digest:x}",
        "scale": call.scale,
        "softcap": call.softcap,
        "dropout_p": (call.dropout_p, seed if isinstance(seed, int) or seed is None else int(seed)),
        "requires_grad": dict(zip(Tensors._fields, call.needs, strict=True)),
        "bias": _comparable_bias_axes(request),
        "features": sorted(problem.features),
    }


def with_four_bias_axes(tensors: Tensors) -> Tensors:
    """This rank's tensors, with the bias as [B|1, H|1, R|1, K|1]."""
    bias = tensors.bias
    if bias is None or bias.dim() == 4:
        return tensors
    return tensors._replace(bias=bias[(None,) * (4 - bias.dim())])

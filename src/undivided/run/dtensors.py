"""Attention of DTensors: each rank attends to what it holds, and nothing is sent.

Heads and sequences of a batch are independent, so a rank that holds some of them computes their part of the result. q
decides: over each axis of its mesh it is replicated, or sharded on its batch, on its heads or, with a `ContextParallel`
over the same ranks, on its sequence. The other tensors are sharded alike or replicated. Of a replicated one, a rank
takes what its queries need, and its gradient is a partial sum over the ranks. Masks are plain and describe the whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from undivided.arguments import layout as _layout
from undivided.arguments.layout import Layout
from undivided.arguments.tensors import is_dtensor, is_observed
from undivided.errors import InputError
from undivided.masks._selection import Selection, select_part
from undivided.request.checks import check_layout, check_ranks, checked_mask
from undivided.request.normalise import normalise
from undivided.request.request import Request, Tensors
from undivided.run import autograd, compile
from undivided.run.prepare import prepare
from undivided.selection.policy import policy

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement

Span = tuple[int, int]
Axes = Mapping[str, int | None]
Result = Tensor | tuple[Tensor, Tensor]

_AXES: Mapping[str, Axes] = {
    "bshd": {"batch": 0, "sequence": 1, "heads": 2},
    "sbhd": {"batch": 1, "sequence": 0, "heads": 2},
    "bhsd": {"batch": 0, "sequence": 2, "heads": 1},
    "thd": {"batch": None, "sequence": 0, "heads": 1},
}
"""The axes of q, k and v that may be sharded, by layout."""


class Context(Protocol):
    """The part of `undivided.ContextParallel` that is used here."""

    def attention(self, request: Request) -> Result:
        """The result for this rank's tokens."""

    def process_groups(self) -> list[list[int]]:
        """The global ranks of each of its groups."""


class Division(NamedTuple):
    """How q is placed. roles: what q shards over each axis of the mesh: "batch", "heads", "sequence" or None."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    roles: tuple[str | None, ...]
    layout: Layout

    def result(self, result: Result) -> Result:
        """A rank's out, or (out, lse), as DTensors of the whole."""
        from torch.distributed.tensor import DTensor, Replicate, Shard

        if isinstance(result, Tensor):
            return DTensor.from_local(result, self.mesh, self.placements)
        axes = {"heads": 0, "sequence": 1} if self.layout == "thd" else {"batch": 0, "heads": 1, "sequence": 2}
        placements = [Replicate() if role is None else Shard(axes[role]) for role in self.roles]
        out, lse = result
        return self.result(out), DTensor.from_local(lse, self.mesh, placements)  # type: ignore[return-value]


def attention(request: Request, switches: str = "-") -> Result:
    """The result of a request that must be dispatched: of DTensors from their local parts, of others as one operator.

    switches: PyTorch's, for a call that depends on them.
    """
    if not has_dtensors(request):
        return compile.attention(request, switches)
    request, division = local_request(request, None)
    if torch.compiler.is_compiling() or is_observed(*request.tensors[:3], request.options.mask, *request.tensors[3:]):
        return division.result(compile.attention(request, switches))
    backend, deterministic, batch_invariant = request[2:]
    allowed = policy(backend, deterministic, "" if switches == "-" else switches, batch_invariant)
    decision, call, tensors = prepare(request, allowed)
    return division.result(autograd.run(decision.backend, call, tensors))


def context_attention(request: Request, context: Context) -> Result:
    """The result of a request over the ranks of a context, which may be of DTensors."""
    if not has_dtensors(request):
        return context.attention(request)
    request, division = local_request(request, context)
    return division.result(context.attention(request))


def has_dtensors(request: Request) -> bool:
    """Whether one of the tensors is a DTensor."""
    return any(is_dtensor(tensor) for tensor in request.tensors)


def local_request(request: Request, context: Context | None) -> tuple[Request, Division]:
    """This rank's part of a request of DTensors, with plain tensors, and how the result is placed.

    Raises:
        InputError: an argument is wrong in the whole, or is placed so that ranks would have to communicate.
    """
    tensors = _checked_tensors(request)
    options = request.options
    division = _division(tensors["q"], options.layout, context)
    if not torch.compiler.is_compiling():
        _check_whole(request)
    _, _, heads, _ = _layout.sizes(tensors["q"].shape, options.layout)
    kv_heads = _layout.sizes(tensors["k"].shape, options.layout)[2]
    batch = _layout.sizes(tensors["q"].shape, options.layout)[0]
    axes = _AXES[options.layout]
    own_batch = _span("q", tensors["q"], axes["batch"], batch)
    own_heads = _span("q", tensors["q"], axes["heads"], heads)
    own_kv = own_heads[0] * kv_heads // heads, -(-own_heads[1] * kv_heads // heads)
    for name in ("k", "v"):
        _span(name, tensors[name], axes["heads"], kv_heads)
    _check_groups(heads // kv_heads, own_heads[1] - own_heads[0])
    own: dict[str, Mapping[str, Span]] = {
        name: {"batch": own_batch, "heads": own_kv if name in ("k", "v") else own_heads} for name in tensors
    }
    local = {name: _local(name, t, _axes(name, t, options.layout), own[name], division) for name, t in tensors.items()}
    selection = Selection(batch, own_batch, heads, own_heads)
    mask = options.mask
    if mask is not None or options.dropout_p:
        mask = select_part(checked_mask(mask), selection, bool(options.dropout_p))
    local_tensors = Tensors(*(local.get(name) for name in Tensors._fields))  # type: ignore[arg-type]
    return request._replace(tensors=local_tensors, options=options._replace(mask=mask)), division


def _checked_tensors(request: Request) -> dict[str, DTensor]:
    """The tensors that are given, by name; InputError unless all are DTensors of q's mesh."""
    given = {name: t for name, t in request.tensors._asdict().items() if t is not None}
    options = request.options
    first = next(name for name, tensor in given.items() if is_dtensor(tensor))
    for name, tensor in given.items():
        if not is_dtensor(tensor):
            kind = "a plain tensor" if isinstance(tensor, Tensor) else type(tensor).__name__
            hint = f"torch.distributed.tensor.distribute_tensor({name}, {first}.device_mesh, [Replicate(), ..])"
            raise InputError(name, f"be a DTensor as {first} is, not a mixture", kind, hint=hint)
    for name, value in (("pages", options.pages), ("k_scale", options.k_scale), ("v_scale", options.v_scale)):
        if value is not None:
            must = "be None with DTensors: a cache belongs to one rank"
            raise InputError(name, must, type(value).__name__, hint="q.to_local(): each rank attends to its own cache")
    if options.dropout_p and options.dropout_seed is None:
        must = "be given with DTensors, the same on every rank"
        hint = "dropout_seed=step of undivided.attention: each rank would draw a different one"
        raise InputError("dropout_seed", must, "None", hint=hint)
    mesh = given["q"].device_mesh
    if mesh.get_coordinate() is None:
        raise InputError("q", "be on a mesh that contains this rank", f"{mesh}")
    for name, tensor in given.items():
        if tensor.device_mesh != mesh:
            raise InputError(name, f"be on the mesh of q, {mesh}", f"{tensor.device_mesh}")
    return given


def _check_whole(request: Request) -> None:
    """Check the arguments over all ranks, on tensors without contents."""
    tensors = request.tensors
    check_layout(request.options.layout)
    meta = [None if t is None else torch.empty(t.shape, dtype=t.dtype, device="meta") for t in tensors]
    needs = tuple(torch.is_grad_enabled() and t is not None and t.requires_grad for t in tensors)
    normalise(request._replace(tensors=Tensors._make(meta)), tensors.q.device.type, needs)


def _division(q: DTensor, layout: Layout, context: Context | None) -> Division:
    """The roles of the axes of q's mesh."""
    check_layout(layout)
    check_ranks(q, q, q, layout, None)
    mesh = q.device_mesh
    roles = tuple(_role(q, dim, layout) for dim in range(mesh.ndim))
    sharded = [dim for dim, role in enumerate(roles) if role == "sequence"]
    if context is None and sharded:
        raise _refusal(
            "q",
            q,
            sharded[0],
            "be replicated or sharded on batch or heads, without context_parallel",
            hint="or pass context_parallel=undivided.ContextParallel(group) of the ranks that share the sequence",
        )
    if context is not None:
        groups = context.process_groups()
        found = [torch.distributed.get_process_group_ranks(mesh.get_group(dim)) for dim in sharded]
        if found != groups:
            axes = ", ".join(str(_axis_name(mesh, dim)) for dim in sharded) or "none"
            raise InputError(
                "q",
                f"be sharded on its sequence (axis {_AXES[layout]['sequence']}) over the ranks of context_parallel, "
                f"{groups}",
                f"sequence over mesh axes: {axes}, with ranks {found}",
                hint="DTensor.from_local(context.shard(q, layout), mesh, placements), and "
                "ContextParallel(mesh['context'])",
            )
    return Division(mesh, q.placements, roles, layout)


def _role(q: DTensor, dim: int, layout: Layout) -> str | None:
    """What q shards over an axis of its mesh; None if it is replicated."""
    axis = _shard_axis("q", q, dim)
    if axis is None:
        return None
    for role, of_role in _AXES[layout].items():
        if axis == of_role:
            return role
    raise _refusal("q", q, dim, "not be sharded on the head size: a score needs all of it")


def _shard_axis(name: str, tensor: DTensor, dim: int) -> int | None:
    """The axis that a tensor shards over an axis of its mesh; None if it is replicated."""
    from torch.distributed.tensor import Shard

    placement = tensor.placements[dim]
    if placement.is_replicate():
        return None
    if type(placement) is Shard:
        return int(placement.dim) % tensor.dim()
    raise _refusal(name, tensor, dim, "be sharded or replicated")


def _axes(name: str, tensor: DTensor, layout: Layout) -> Axes:
    """The axes of a tensor that follow those of q; None for one that it lacks or broadcasts."""
    if name in ("q", "k", "v"):
        return _AXES[layout]
    from_the_end = {
        "bias": {"batch": -4, "heads": -3, "sequence": -2},
        "sinks": {"heads": -1},
        "alibi_slopes": {"batch": -2, "heads": -1},
    }[name]
    found: dict[str, int | None] = {"batch": None, "heads": None, "sequence": None}
    for role, place in from_the_end.items():
        axis = tensor.dim() + place
        if axis >= 0 and (name != "bias" or tensor.shape[axis] > 1) and not (role == "batch" and layout == "thd"):
            found[role] = axis
    return found


def _local(name: str, tensor: DTensor, axes: Axes, own: Mapping[str, Span], division: Division) -> Tensor:
    """This rank's part of a tensor, plain and differentiable."""
    from torch.distributed.tensor import Partial, Replicate

    gradients: list[Any] = []
    replicated: set[str | None] = set()
    for dim, role in enumerate(division.roles):
        placed, axis = _shard_axis(name, tensor, dim), None if role is None else axes[role]
        whole_needed = role == "sequence" and axis is not None
        if (placed is None and whole_needed) or (placed is not None and placed != axis):
            raise _refusal(name, tensor, dim, f"follow q, which {_words(role)} there", axis, only=whole_needed)
        if placed is not None:
            if role in replicated:
                raise _refusal(
                    name, tensor, dim, f"shard its {role} over the axis before too, as q does, or be replicated"
                )
            gradients.append(tensor.placements[dim])
        else:
            replicated.add(role)
            gradients.append(Replicate() if role is None else Partial())
    local: Tensor = tensor.to_local(grad_placements=gradients)
    for role in ("batch", "heads"):
        axis = axes[role]
        if axis is None:
            continue
        (start, stop), (first, last) = _span(name, tensor, axis, tensor.shape[axis]), own[role]
        if (first, last) != (start, stop):
            local = local.narrow(axis, first - start, last - first)
    return local


def _span(name: str, tensor: DTensor, axis: int | None, size: int) -> Span:
    """The first index of this rank along an axis, and one past its last."""
    if axis is None:
        return 0, size
    start, mesh = 0, tensor.device_mesh
    coordinate = cast(Sequence[int], mesh.get_coordinate())
    for dim in range(mesh.ndim):
        if _shard_axis(name, tensor, dim) != axis:
            continue
        if size % mesh.size(dim):
            raise _refusal(name, tensor, dim, f"have equal shards: {size} is not a multiple of {mesh.size(dim)} ranks")
        size //= mesh.size(dim)
        start += coordinate[dim] * size
    return start, start + size


def _check_groups(group: int, own: int) -> None:
    """InputError if the query heads of a rank are parts of several groups with one key head each."""
    if own % group and group % own:
        must = f"have whole groups on each rank ({group} query heads per key head), or parts of one group"
        hint = "shard the heads over a number of ranks that divides the key heads, or that they divide"
        raise InputError("q", must, f"{own} query heads", hint=hint)


def _words(role: str | None) -> str:
    return "is replicated" if role is None else f"shards its {role}"


def _axis_name(mesh: DeviceMesh, dim: int) -> str:
    names = mesh.mesh_dim_names
    return str(dim) if names is None else repr(names[dim])


def _refusal(
    name: str, tensor: DTensor, dim: int, must: str, axis: int | None = None, only: bool = False, hint: str = ""
) -> InputError:
    """The error for the placement over an axis of the mesh; the hint has the placements that are accepted.

    axis: the axis to shard; None suggests to replicate. only: replicated is not accepted.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    mesh = tensor.device_mesh
    words = []
    for n, placement in enumerate(tensor.placements):
        if n == dim:
            placement = Replicate() if axis is None else Shard(axis)
        words.append("Replicate()" if isinstance(placement, Replicate | Partial) else f"Shard({placement.dim})")  # type: ignore[attr-defined]
    advice = f"{name}.redistribute(placements=[{', '.join(words)}])" + (f", {hint}" if hint else "")
    if only:
        advice = f"DTensor.from_local(context.shard({name}, ..), mesh, [{', '.join(words)}])"
    got = f"{tensor.placements[dim]} over mesh axis {_axis_name(mesh, dim)}"
    return InputError(name, must, got, hint=advice)

"""Attention of DTensors: each rank attends to what it holds, and nothing is sent.

Heads and sequences of a batch are independent, so a rank that holds some of them computes their part of the result. q
decides: over each axis of its mesh it is replicated, or sharded on its batch, on its heads or, with a `ContextParallel`
over the same ranks, on its sequence. The other tensors are sharded alike or replicated. Of a replicated one, a rank
takes what its queries need, and its gradient is a partial sum over the ranks. Masks are plain and describe the whole.

A `RankPart` follows from shapes and placements alone and is cached. Whether it refuses does not depend on the rank: a
rank that raises alone would leave the others waiting.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from undivided.arguments import layout as _layout
from undivided.arguments.layout import Layout
from undivided.arguments.tensors import is_dtensor
from undivided.errors import InputError
from undivided.masks._slice import CallSlice, slice_mask
from undivided.request.checks import check_axes, check_layout, checked_mask
from undivided.request.normalise import normalise
from undivided.request.request import Request, Tensors
from undivided.request.result import Output

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement

Span = tuple[int, int]
Axes = Mapping[str, int | None]
Groups = tuple[tuple[int, ...], ...]
_AXES: Mapping[str, Axes] = {layout: axes._asdict() for layout, axes in _layout.AXES.items()}
"""The axes of q, k and v that may be sharded, by layout."""

_AXES_FROM_THE_END: Mapping[str, Mapping[str, int]] = {
    "bias": {"batch": -4, "heads": -3, "sequence": -2},
    "sinks": {"heads": -1},
    "alibi_slopes": {"batch": -2, "heads": -1},
}


class PlacedTensor(NamedTuple):
    """A tensor of the call: its name, its shape over all ranks, and its placement over each axis of the mesh."""

    name: str
    shape: torch.Size
    placements: tuple[Placement, ...]


class TensorSlice(NamedTuple):
    """What a rank takes of a tensor. gradients: how the gradient of the local tensor is placed. narrowed: (axis, first,
    length) of what its queries need of it."""

    gradients: tuple[Placement, ...]
    narrowed: tuple[tuple[int, int, int], ...]

    def local(self, tensor: DTensor) -> Tensor:
        """The slice, plain and differentiable."""
        local: Tensor = tensor.to_local(grad_placements=self.gradients)
        for axis, first, length in self.narrowed:
            local = local.narrow(axis, first, length)
        return local


class RankPart(NamedTuple):
    """What this rank does.

    slices: of the tensors, by name. own: its sequences and heads. placements: those of q, and of out.
    """

    mesh: DeviceMesh
    slices: Mapping[str, TensorSlice]
    own: CallSlice
    placements: tuple[Placement, ...]
    lse_placements: tuple[Placement, ...]

    def result(self, result: Output) -> Output:
        """A rank's out, or (out, lse), as DTensors of the whole."""
        from torch.distributed.tensor import DTensor

        if isinstance(result, Tensor):
            return DTensor.from_local(result, self.mesh, self.placements)
        out, lse = result
        whole: Any = DTensor.from_local(lse, self.mesh, self.lse_placements)
        return DTensor.from_local(out, self.mesh, self.placements), whole


def has_dtensors(request: Request) -> bool:
    """Whether one of the tensors is a DTensor."""
    return any(is_dtensor(tensor) for tensor in request.tensors)


def local_request(request: Request, context_groups: Sequence[Sequence[int]] | None = None) -> tuple[Request, RankPart]:
    """This rank's part of a request of DTensors, with plain tensors, and the `RankPart` that places the result.

    Args:
        request: one for which `has_dtensors` is True.
        context_groups: the global ranks of each group of its `ContextParallel`; None without one.

    Raises:
        InputError: an argument is wrong in the whole, or is placed so that ranks would have to communicate.
    """
    options = request.options
    check_layout(options.layout)
    by_name = _checked_tensors(request)
    check_axes(by_name["q"], by_name["k"], by_name["v"], options.layout, None)
    groups = None if context_groups is None else tuple(map(tuple, context_groups))
    placed = tuple([PlacedTensor(name, tensor.shape, tensor.placements) for name, tensor in by_name.items()])
    mesh = by_name["q"].device_mesh
    arguments = mesh, tuple(mesh.get_coordinate() or ()), options.layout, placed, groups
    if torch.compiler.is_compiling():
        part = _rank_part(*arguments)
    else:
        try:
            # an equal mesh may be of a group that was destroyed
            part = _cached_rank_part(*arguments)._replace(mesh=mesh)
        except TypeError:  # a symbolic size has no hash
            part = _rank_part(*arguments)
        _check_whole(request)
    mask = options.mask
    if mask is not None or options.dropout_p:
        mask = slice_mask(checked_mask(mask), part.own, bool(options.dropout_p))
    local = {name: part.slices[name].local(tensor) for name, tensor in by_name.items()}
    tensors = Tensors(*[local.get(name) for name in Tensors._fields])  # type: ignore[arg-type]
    return request._replace(tensors=tensors, options=options._replace(mask=mask)), part


def _checked_tensors(request: Request) -> dict[str, DTensor]:
    """The tensors of the request, by name; InputError unless all are DTensors on the mesh of q."""
    by_name: dict[str, Any] = {n: t for n, t in zip(Tensors._fields, request.tensors, strict=True) if t is not None}
    options = request.options
    first = next(name for name, tensor in by_name.items() if is_dtensor(tensor))
    for name, tensor in by_name.items():
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
    mesh = by_name["q"].device_mesh
    for name, tensor in by_name.items():
        if tensor.device_mesh != mesh:
            raise InputError(name, f"be on the mesh of q, {mesh}", f"{tensor.device_mesh}")
    return by_name


def _check_whole(request: Request) -> None:
    """Check the arguments over all ranks, on tensors without contents."""
    tensors = request.tensors
    meta = [None if t is None else torch.empty(t.shape, dtype=t.dtype, device="meta") for t in tensors]
    needs = tuple(torch.is_grad_enabled() and t is not None and t.requires_grad for t in tensors)
    normalise(request._replace(tensors=Tensors._make(meta)), tensors.q.device.type, needs)


def _rank_part(
    mesh: DeviceMesh,
    coordinate: tuple[int, ...],
    layout: Layout,
    placed: tuple[PlacedTensor, ...],
    groups: Groups | None,
) -> RankPart:
    """The part of a rank, for tensors of these shapes and placements.

    coordinate: of the rank in the mesh. groups: the ranks of the context, if there is one.
    """
    from torch.distributed.tensor import Replicate, Shard

    q, k, v = placed[:3]
    if not coordinate:
        raise InputError("q", "be on a mesh that contains this rank", f"{mesh}")
    roles = tuple(_role(mesh, q, dim, _AXES[layout]) for dim in range(mesh.ndim))
    _check_context(mesh, layout, q, roles, groups)
    batch, _, heads, _ = _layout.sizes(q.shape, layout)
    kv_heads = _layout.sizes(k.shape, layout)[2]
    axes = _AXES[layout]
    own_batch = _span(mesh, coordinate, q, axes["batch"], batch)
    own_heads = _span(mesh, coordinate, q, axes["heads"], heads)
    for tensor in (k, v):
        _span(mesh, coordinate, tensor, axes["heads"], kv_heads)
    group = max(heads // max(kv_heads, 1), 1)
    _check_groups(group, own_heads[1] - own_heads[0])
    own_kv = own_heads[0] // group, -(-own_heads[1] // group)
    slices = {}
    for tensor in placed:
        own = {"batch": own_batch, "heads": own_kv if tensor in (k, v) else own_heads}
        slices[tensor.name] = _tensor_slice(mesh, coordinate, tensor, _axes(tensor, layout), own, roles)
    lse_axes = {"heads": 0, "sequence": 1} if layout == "thd" else {"batch": 0, "heads": 1, "sequence": 2}
    lse_placements = tuple([Replicate() if role is None else Shard(lse_axes[role]) for role in roles])
    return RankPart(mesh, slices, CallSlice(batch, own_batch, heads, own_heads), q.placements, lse_placements)


_cached_rank_part = functools.lru_cache(256)(_rank_part)


def _check_context(
    mesh: DeviceMesh, layout: Layout, q: PlacedTensor, roles: Sequence[str | None], groups: Groups | None
) -> None:
    """InputError unless q shards its sequence over exactly the ranks of the context."""
    sharded = [dim for dim, role in enumerate(roles) if role == "sequence"]
    if groups is None:
        if sharded:
            must = "be replicated or sharded on batch or heads, without context_parallel"
            hint = "or pass context_parallel=undivided.ContextParallel(group) of the ranks that share the sequence"
            raise _refusal(mesh, q, sharded[0], must, hint=hint)
        return
    sequence_groups = tuple([tuple(torch.distributed.get_process_group_ranks(mesh.get_group(dim))) for dim in sharded])
    if sequence_groups != groups:
        axis, names = _AXES[layout]["sequence"], ", ".join(_axis_name(mesh, dim) for dim in sharded) or "none"
        raise InputError(
            "q",
            f"be sharded on its sequence (axis {axis}) over the ranks of context_parallel, {list(map(list, groups))}",
            f"sequence over mesh axes: {names}, with ranks {list(map(list, sequence_groups))}",
            hint="DTensor.from_local(context.shard(q, layout), mesh, placements), and ContextParallel(mesh['context'])",
        )


def _role(mesh: DeviceMesh, q: PlacedTensor, dim: int, axes: Axes) -> str | None:
    """What q shards over an axis of its mesh: "batch", "heads", "sequence"; None if it is replicated."""
    axis = _shard_axis(mesh, q, dim)
    if axis is None:
        return None
    for role, of_role in axes.items():
        if axis == of_role:
            return role
    raise _refusal(mesh, q, dim, "not be sharded on the head size: a score needs all of it")


def _shard_axis(mesh: DeviceMesh, tensor: PlacedTensor, dim: int) -> int | None:
    """The axis that a tensor shards over an axis of its mesh; None if it is replicated."""
    from torch.distributed.tensor import Shard

    placement = tensor.placements[dim]
    if placement.is_replicate():
        return None
    if type(placement) is Shard:
        return int(placement.dim) % len(tensor.shape)
    raise _refusal(mesh, tensor, dim, "be sharded or replicated")


def _axes(tensor: PlacedTensor, layout: Layout) -> Axes:
    """The axes of a tensor that follow those of q; None for one that it lacks or broadcasts."""
    if tensor.name in ("q", "k", "v"):
        return _AXES[layout]
    axes: dict[str, int | None] = {"batch": None, "heads": None, "sequence": None}
    for role, place in _AXES_FROM_THE_END[tensor.name].items():
        axis = len(tensor.shape) + place
        broadcast = tensor.name == "bias" and axis >= 0 and tensor.shape[axis] == 1
        if axis >= 0 and not broadcast and not (role == "batch" and layout == "thd"):
            axes[role] = axis
    return axes


def _tensor_slice(
    mesh: DeviceMesh,
    coordinate: tuple[int, ...],
    tensor: PlacedTensor,
    axes: Axes,
    own: Mapping[str, Span],
    roles: Sequence[str | None],
) -> TensorSlice:
    """What this rank takes of a tensor, if its queries are those of `own`."""
    from torch.distributed.tensor import Partial, Replicate

    gradients: list[Any] = []
    replicated: set[str | None] = set()
    for dim, role in enumerate(roles):
        shard, axis = _shard_axis(mesh, tensor, dim), None if role is None else axes[role]
        whole_needed = role == "sequence" and axis is not None
        if (shard is None and whole_needed) or (shard is not None and shard != axis):
            words = "is replicated" if role is None else f"shards its {role}"
            raise _refusal(mesh, tensor, dim, f"follow q, which {words} there", axis, only=whole_needed)
        if shard is None:
            replicated.add(role)
            gradients.append(Replicate() if role is None else Partial())
            continue
        if role in replicated:
            must = f"shard its {role} over the axis before too, as q does, or be replicated"
            raise _refusal(mesh, tensor, dim, must)
        gradients.append(tensor.placements[dim])
    narrowed = []
    for role, (first, last) in own.items():
        axis = axes[role]
        if axis is not None:
            start, stop = _span(mesh, coordinate, tensor, axis, tensor.shape[axis])
            if (first, last) != (start, stop):
                narrowed.append((axis, first - start, last - first))
    return TensorSlice(tuple(gradients), tuple(narrowed))


def _span(mesh: DeviceMesh, coordinate: tuple[int, ...], tensor: PlacedTensor, axis: int | None, size: int) -> Span:
    """The first index of this rank along an axis, and one past its last."""
    if axis is None:
        return 0, size
    start = 0
    for dim in range(mesh.ndim):
        if _shard_axis(mesh, tensor, dim) != axis:
            continue
        if size % mesh.size(dim):
            must = f"have equal shards: {size} is not a multiple of {mesh.size(dim)} ranks"
            raise _refusal(mesh, tensor, dim, must)
        size //= mesh.size(dim)
        start += coordinate[dim] * size
    return start, start + size


def _check_groups(group: int, own: int) -> None:
    """InputError if the query heads of a rank are parts of several groups with one key head each."""
    if own and own % group and group % own:
        must = f"have whole groups on each rank ({group} query heads per key head), or parts of one group"
        hint = "shard the heads over a number of ranks that divides the key heads, or that they divide"
        raise InputError("q", must, f"{own} query heads", hint=hint)


def _axis_name(mesh: DeviceMesh, dim: int) -> str:
    names = mesh.mesh_dim_names
    return str(dim) if names is None else repr(names[dim])


def _refusal(
    mesh: DeviceMesh,
    tensor: PlacedTensor,
    dim: int,
    must: str,
    axis: int | None = None,
    only: bool = False,
    hint: str = "",
) -> InputError:
    """The error for the placement over an axis of the mesh; the hint has the placements that are accepted.

    axis: the axis to shard; None suggests to replicate. only: replicated is not accepted.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    name, words = tensor.name, []
    for n, placement in enumerate(tensor.placements):
        if n == dim:
            placement = Replicate() if axis is None else Shard(axis)
        words.append("Replicate()" if isinstance(placement, Replicate | Partial) else f"Shard({placement.dim})")  # type: ignore[attr-defined]
    advice = f"{name}.redistribute(placements=[{', '.join(words)}])" + (f", {hint}" if hint else "")
    if only:
        advice = f"DTensor.from_local(context.shard({name}, ..), mesh, [{', '.join(words)}])"
    got = f"{tensor.placements[dim]} over mesh axis {_axis_name(mesh, dim)}"
    return InputError(name, must, got, hint=advice)

"""The axes (ring, heads) of a process group, a `DeviceMesh`, TransformerEngine's pair or a simulated group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from undivided.context_parallel._schedule import Mesh, Strategy
from undivided.context_parallel.exchange.collectives import Communicator, ProcessGroup, SingleRank
from undivided.context_parallel.exchange.groups import check_grid, group_of
from undivided.context_parallel.exchange.simulate import SimulatedGroup
from undivided.errors import InputError


def rank_mesh(strategy: Strategy, rank: int | None, world: int | None) -> Mesh:
    """The mesh coordinates of a rank without a group, which are enough to shard."""
    if type(rank) is not int or type(world) is not int or not 0 <= rank < world:
        raise InputError("rank", "be given with world, from 0 to world - 1", f"rank={rank!r}, world={world!r}")
    ring_world, heads_world = (1, world) if strategy == "all_to_all" else (world, 1)
    return Mesh.from_rank(rank, ring_world, heads_world)


def group_axes(group: Any, strategy: Strategy) -> tuple[Communicator, Communicator]:
    """The communicators (ring, heads) of a group; see `ContextParallel` for what a group may be."""
    axes = list(_communicators(group))
    expected = 2 if strategy == "ring+all_to_all" else 1
    if len(axes) != expected:
        names = getattr(group, "mesh_dim_names", None) or ()
        hint = f"one axis of the mesh, such as mesh[{names[0] if names else 'context'!r}]"
        if expected == 2:
            hint = "torch.distributed.device_mesh.init_device_mesh('cpu', (2, 2), mesh_dim_names=('ring', 'heads'))"
        must = f"have {expected} {'axes [ring, heads]' if expected == 2 else 'axis'} for strategy={strategy!r}"
        raise InputError("group", must, f"{len(axes)} {names}" if names else len(axes), hint=hint)
    if expected == 2:
        return axes[0], axes[1]
    return (SingleRank(), axes[0]) if strategy == "all_to_all" else (axes[0], SingleRank())


def check_device_type(mesh: Any, kind: str) -> None:
    """Raise InputError if parameters of a type of device are to be divided over a mesh of another type."""
    if kind not in (mesh.device_type, "meta"):
        shape, names = tuple(mesh.shape), mesh.mesh_dim_names
        hint = (
            f"move the module to {mesh.device_type!r}, or init_device_mesh({kind!r}, {shape}, mesh_dim_names={names})"
        )
        raise InputError(
            "mesh", f"be of the device type of the parameters ({kind!r})", repr(mesh.device_type), hint=hint
        )


def _communicators(group: Any) -> Iterator[Communicator]:
    """One communicator for each axis of the group."""
    if isinstance(group, SimulatedGroup):
        yield from (group.axis(0), group.axis(1)) if group.is_mesh else (group,)
        return
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        raise InputError(
            "group",
            "be a process group, a DeviceMesh or a simulated group",
            repr(group),
            hint="call torch.distributed.init_process_group() first; or use simulate(world, function); or give rank= "
            "and world= if you only shard",
        )
    if isinstance(group, list | tuple):  # TransformerEngine's order: heads, then ring
        for member in reversed(group):
            yield from _communicators(member)
    elif hasattr(group, "mesh_dim_names"):
        if group.ndim == 2:
            check_grid(group)
        yield from (ProcessGroup(group_of(group, dim, "group")) for dim in range(group.ndim))
    elif group is None or isinstance(group, dist.ProcessGroup) or group is dist.GroupMember.NON_GROUP_MEMBER:
        yield ProcessGroup(group)
    else:
        hint = 'mesh.get_group("context") of a DeviceMesh, or torch.distributed.new_group(ranks) with this rank'
        raise InputError("group", "be a process group, a DeviceMesh or a simulated group", repr(group), hint=hint)

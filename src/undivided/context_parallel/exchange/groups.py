"""Process groups and meshes that cannot be used.

All processes make a group or a mesh together, and those that are not in it cannot use it.

Contexts and layers may still hold a group that `torch.distributed.destroy_process_group` has ended. PyTorch's
collectives raise an error about registration for it, or return without doing anything.

In the group of a mesh's axis, the ranks of processes follow their numbers, not their places in the mesh. If the numbers
do not ascend, the two orders differ, and parts of a tensor would change places without an error.
"""

from __future__ import annotations

from typing import Any

from torch import distributed

from undivided.errors import InputError


def check_exists(group: Any, argument: str = "group") -> None:
    """InputError if a process group of torch.distributed was destroyed, or has other processes only. argument: the name
    for the error."""
    if group is distributed.GroupMember.NON_GROUP_MEMBER:
        raise _foreign(argument, "a group of other processes")
    if not isinstance(group, distributed.ProcessGroup):
        return
    try:
        distributed.get_process_group_ranks(group)
    except (KeyError, ValueError) as error:
        raise _destroyed(argument, "a process group") from error


def group_of(mesh: Any, axis: int | str = 0, argument: str = "mesh") -> Any:
    """The process group of an axis of a `DeviceMesh`; InputError if it was destroyed, or has other processes only.
    argument: the name for the error."""
    if mesh.get_coordinate() is None:
        raise _foreign(argument, f"the processes {mesh.mesh.flatten().tolist()}")
    try:
        return mesh.get_group(axis)
    except RuntimeError as error:
        if "Could not resolve the process group" not in str(error):
            raise
        raise _destroyed(argument, "a DeviceMesh") from error


def check_ascending(mesh: Any, argument: str = "mesh") -> None:
    """InputError unless the numbers of the processes ascend along every axis of a `DeviceMesh`, or of the mesh of which
    it is an axis."""
    whole = mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh  # the same verdict on all processes
    for processes in (whole.mesh, mesh.mesh):
        if any(bool((processes.diff(dim=dim) <= 0).any()) for dim in range(processes.ndim)):
            hint = "init_device_mesh numbers them so; PyTorch divides tensors wrongly over others"
            must = "have processes whose numbers ascend along every axis"
            raise InputError(argument, must, str(processes.tolist()), hint=hint)


def check_grid(mesh: Any) -> None:
    """InputError unless all rows of a `DeviceMesh` [ring, heads] have the same order of processes, and all columns."""
    for dim in (0, 1):
        order = mesh.mesh.argsort(dim).argsort(dim)
        if bool((order != order.select(1 - dim, 0).unsqueeze(1 - dim)).any()):
            hint = "init_device_mesh numbers the processes in the order of the rows"
            must = "have the same order of processes in all rows, and in all columns"
            raise InputError("group", must, str(mesh.mesh.tolist()), hint=hint)


def _foreign(argument: str, processes: str) -> InputError:
    hint = "only the processes of a group or a mesh may use it"
    rank = distributed.get_rank() if distributed.is_initialized() else None
    return InputError(argument, f"contain this process ({rank})", processes, hint=hint)


def _destroyed(argument: str, what: str) -> InputError:
    return InputError(
        argument,
        "exist",
        f"{what} from before torch.distributed.destroy_process_group()",
        hint="after init_process_group, make the groups and meshes again, and everything that was made from them: "
        "ContextParallel(group), the ranks of layers and caches",
    )

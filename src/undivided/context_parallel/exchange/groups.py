"""Process groups that `torch.distributed.destroy_process_group` has ended, which contexts and layers may still hold.

PyTorch's collectives raise an error about registration for them, or return without doing anything.
"""

from __future__ import annotations

from typing import Any

from torch import distributed

from undivided.errors import InputError


def check_exists(group: Any, argument: str = "group") -> None:
    """InputError if a process group of torch.distributed was destroyed. argument: the name for the error."""
    if not isinstance(group, distributed.ProcessGroup):  # what new_group returns to other processes
        return
    try:
        distributed.get_process_group_ranks(group)
    except (KeyError, ValueError) as error:
        raise _destroyed(argument, "a process group") from error


def group_of(mesh: Any, axis: int | str = 0) -> Any:
    """The process group of an axis of a `DeviceMesh`; InputError if it was destroyed."""
    try:
        return mesh.get_group(axis)
    except RuntimeError as error:
        if "Could not resolve the process group" not in str(error):
            raise
        raise _destroyed("mesh", "a DeviceMesh") from error


def _destroyed(argument: str, what: str) -> InputError:
    return InputError(
        argument,
        "exist",
        f"{what} from before torch.distributed.destroy_process_group()",
        hint="after init_process_group, make the groups and meshes again, and everything that was made from them: "
        "ContextParallel(group), the ranks of layers and caches",
    )

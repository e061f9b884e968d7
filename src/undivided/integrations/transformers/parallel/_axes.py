"""The axes of a mesh, by name."""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from undivided.context_parallel.exchange.groups import group_of
from undivided.errors import InputError, did_you_mean

AXES = ("data", "context", "tensor")
"""What the axes of a mesh may be: batches, tokens of each sequence, heads and features of each layer."""


def checked_mesh(mesh: Any) -> DeviceMesh:
    """The mesh, if its axes are known.

    Args:
        mesh: what a caller gave.

    Returns:
        The same mesh.

    Raises:
        InputError: it is not a mesh, has an axis without a name or with an unknown one, does not contain this process,
            or is from before `torch.distributed.destroy_process_group`.
    """
    if not isinstance(mesh, DeviceMesh):
        raise InputError("mesh", "be a DeviceMesh", type(mesh).__name__, hint=_hint((4,), ("context",)))
    names = mesh.mesh_dim_names or ()
    unknown = [name for name in names if name not in AXES]
    if unknown or not names:
        must = f"have axes with names out of {', '.join(map(repr, AXES))}"
        got = f"the names {names}" if names else "no names"
        hint = did_you_mean(unknown[0], AXES) if unknown else None
        raise InputError("mesh", must, got, hint=hint or _hint(tuple(mesh.shape), AXES[-mesh.ndim :]))
    for name in names:
        group_of(mesh, name)
    return mesh


def _hint(shape: tuple[int, ...], names: tuple[str, ...]) -> str:
    """How to make a mesh with these axes."""
    return f"torch.distributed.device_mesh.init_device_mesh('cpu', {shape}, mesh_dim_names={names})"


def size(mesh: DeviceMesh, axis: str) -> int:
    """The number of ranks along an axis; 1 if the mesh does not have it.

    Args:
        mesh: a checked mesh.
        axis: its name.

    Returns:
        A number of ranks.
    """
    names = mesh.mesh_dim_names or ()
    return mesh.size(names.index(axis)) if axis in names else 1

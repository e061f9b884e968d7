"""``undivided.backends()``: every backend, and whether this machine (or a described one) can run it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from undivided.arguments.checks import check_type
from undivided.backends import all_backends
from undivided.backends._base import Backend
from undivided.machine import Machine, format_version
from undivided.masks import FULL
from undivided.request.problem import Problem

PLAIN_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class BackendRow:
    """One backend. `why_not` is empty if it is available; `how_to_get` may be empty too."""

    name: str
    family: str
    available: bool
    why_not: str
    version: str | None
    summary: str
    how_to_get: str = ""


class BackendTable(tuple[BackendRow, ...]):
    """The rows, in order of name; ``str()`` aligns them for reading."""

    __slots__ = ()

    def __str__(self) -> str:
        cells = [("name", "family", "available", "version", "")]
        for row in self:
            note = row.summary if row.available else "; ".join(filter(None, (row.why_not, row.how_to_get)))
            cells.append((row.name, row.family, "yes" if row.available else "no", row.version or "-", note))
        widths = [max(len(line[column]) for line in cells) for column in range(4)]
        lines = ("  ".join([*(c.ljust(w) for c, w in zip(line, widths, strict=False)), line[4]]) for line in cells)
        return "\n".join(line.rstrip() for line in lines)


def backends(machine: Machine | None = None) -> BackendTable:
    """Every backend: name, family, whether it is available or why not, version, summary.

    Available means that plain attention (no mask, head size 64, 16-bit or fp32) can run; `undivided.explain` answers
    for one exact problem.

    Args:
        machine: the machine to describe; None for this one, with all its devices.

    Returns:
        A tuple of `BackendRow`, in order of name; ``print`` it for the table.

    >>> import undivided
    >>> [row.available for row in undivided.backends() if row.name == "reference"]
    [True]
    >>> a100 = undivided.Machine(device="cuda", compute_capability=(8, 0))
    >>> [row.available for row in undivided.backends(a100) if row.name == "torch_flash"]
    [True]
    """
    if machine is not None:
        check_type("machine", machine, Machine, "an undivided.Machine or None")
    machines = _this_machine() if machine is None else [machine]
    return BackendTable(_row(backend, machines) for backend in all_backends())


def _this_machine() -> list[Machine]:
    """This machine as seen by tensors on the CPU, and as seen by tensors on its GPU if it has one."""
    return [Machine.this("cpu"), *([Machine.this("cuda")] if torch.cuda.is_available() else [])]


def _row(backend: Backend, machines: Sequence[Machine]) -> BackendRow:
    refusals = [why for machine in machines if (why := _why_not(backend, machine))]
    available = len(refusals) < len(machines)
    lacks_gpu = all(backend.needs_gpu(machine) for machine in machines)
    why_not = "" if available else "needs a CUDA GPU" if lacks_gpu else refusals[-1]
    return BackendRow(
        name=backend.name,
        family=backend.family,
        available=available,
        why_not=why_not,
        version=_version(backend, machines[-1], available),
        summary=backend.summary_on(machines[-1]),
        how_to_get="" if lacks_gpu else backend.how_to_get,
    )


def _why_not(backend: Backend, machine: Machine) -> str:
    if missing := backend.unavailable(machine):
        return missing
    refusals = [backend.reasons(_plain(machine, dtype), machine) for dtype in PLAIN_DTYPES]
    fewest: list[str] = min(refusals, key=len)
    return "; ".join(fewest)


def _plain(machine: Machine, dtype: torch.dtype) -> Problem:
    """Attention without a mask or any other option: every available backend can run it."""
    device = machine.device or ("cuda" if machine.compute_capability or machine.hip else "cpu")
    return Problem(
        device=device,
        dtype=dtype,
        layout="bshd",
        batch=1,
        heads=8,
        kv_heads=8,
        q_len=512,
        kv_len=512,
        qk_dim=64,
        v_dim=64,
        mask=FULL.structure,
        align=None,
        features=frozenset(),
    )


def _version(backend: Backend, machine: Machine, available: bool) -> str | None:
    """The version of the first installed package that it needs; torch's version if it needs none."""
    for name, _, _ in backend.limits.packages:
        if version := machine.version(name):
            return f"{name} {format_version(version)}"
    return f"torch {machine.torch}" if available else None

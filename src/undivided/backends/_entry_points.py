"""Backends of other packages, found by the entry points of the group ``undivided.backends``."""

from __future__ import annotations

import logging
from collections.abc import Collection
from importlib.metadata import EntryPoint, entry_points

from undivided.backends._base import Backend, Limits
from undivided.machine import Machine
from undivided.request.problem import Problem

GROUP = "undivided.backends"


class FailedBackend(Backend):
    """The stand-in for an entry point that gave no backend. It refuses every problem, with the cause."""

    limits = Limits(devices=frozenset(), dtypes=frozenset())

    def __init__(self, entry: EntryPoint, cause: str) -> None:
        package = _package(entry)
        self.name = self.family = entry.name  # type: ignore[misc]
        self.summary = f"the backend of {package}"  # type: ignore[misc]
        self.how_to_get = f"fix, or uninstall {package}"  # type: ignore[misc]
        self._cause = f"the entry point {entry.name} = {entry.value} of {package} gave no backend: {cause}"

    def rank(self, problem: Problem, machine: Machine) -> float:
        """After every backend."""
        return float("inf")

    def unavailable(self, machine: Machine) -> str | None:
        """The reason why the entry point gave no backend."""
        return self._cause

    def needs_gpu(self, machine: Machine) -> bool:
        """False: no device helps."""
        return False

    def reasons(self, problem: Problem, machine: Machine) -> list[str]:
        """The reason why the entry point gave no backend."""
        return [self._cause]


def installed_backends(taken: Collection[str]) -> list[Backend]:
    """The backend of every entry point, by name; a `FailedBackend` for each that cannot be loaded.

    An entry point whose name is taken is logged and not loaded, because a name selects one backend.

    Args:
        taken: the names of backends that exist already.
    """
    backends: dict[str, Backend] = {}
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value)):
        if entry.name in taken or entry.name in backends:
            text = "the entry point %s = %s of %s is ignored: another backend has this name"
            logging.getLogger("undivided").warning(text, entry.name, entry.value, _package(entry))
        else:
            backends[entry.name] = _load(entry)
    return list(backends.values())


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist else "an unknown package"


def _load(entry: EntryPoint) -> Backend:
    try:
        backend = entry.load()
    except Exception as error:  # code of others: whatever it raises must not end attention
        return FailedBackend(entry, f"{type(error).__name__}: {error}")
    if not isinstance(backend, Backend):
        return FailedBackend(entry, f"it must be an instance of undivided.backends.Backend, got {backend!r:.80}")
    for name in ("name", "family", "summary"):
        if not isinstance(getattr(backend, name, None), str):
            return FailedBackend(entry, f"its attribute {name} must be a str")
    if not isinstance(getattr(backend, "limits", None), Limits):
        return FailedBackend(entry, "its attribute limits must be a Limits")
    if backend.name != entry.name:
        return FailedBackend(entry, f"its name must be that of its entry point, got {backend.name!r}")
    return backend

"""Every backend: one file or folder each, or an entry point of another package.

A file or folder ends in ``BACKEND = ...`` and needs no registration; its rank stands in the table of
`undivided.selection.order`. A package names its backend in the entry points of the group ``undivided.backends``.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil

from undivided.backends._base import Backend
from undivided.backends._entry_points import installed_backends
from undivided.errors import InputError, did_you_mean

FAMILY_ALIASES = {"unfused": "math"}


@functools.cache
def all_backends() -> tuple[Backend, ...]:
    """The backends, by name. The first decision imports them; later ones find them in this cache."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    ours = [module.BACKEND for module in modules if hasattr(module, "BACKEND")]
    others = installed_backends({backend.name for backend in ours})
    return tuple(sorted([*ours, *others], key=lambda backend: backend.name))


@functools.cache
def names_and_families() -> frozenset[str]:
    """Every string that ``backend=`` accepts."""
    words = {word for backend in all_backends() for word in (backend.name, backend.family)}
    return frozenset(words | set(FAMILY_ALIASES))


def has_name(backend: Backend, word: str) -> bool:
    """Whether this string is the backend's name or family."""
    return word == backend.name or FAMILY_ALIASES.get(word, word) == backend.family


def get(name: str) -> Backend:
    """The backend of this name; InputError if there is none."""
    for backend in all_backends():
        if backend.name == name:
            return backend
    names = [backend.name for backend in all_backends()]
    raise InputError("backend", f"be one of {', '.join(names)}", repr(name), did_you_mean(name, names))

"""Public names that are imported at first use, for the ``__getattr__`` of a package."""

import importlib
import sys
from collections.abc import Mapping


def first_use(package: str, names: Mapping[str, str], name: str) -> object:
    """A public name of a package, which keeps it from then on.

    Args:
        package: the name of the package.
        names: the module of each name, without "undivided.".
        name: what was looked up; AttributeError if it is not among the names.
    """
    if name not in names:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"undivided.{names[name]}"), name)
    setattr(sys.modules[package], name, value)
    return value

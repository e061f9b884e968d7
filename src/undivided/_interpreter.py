"""Refuses subinterpreters: PyTorch does not support them, and its import there never returns."""

import importlib


def is_main() -> bool:
    """Whether this is the main interpreter of the process; True if this Python does not say."""
    for name in ("_interpreters", "_xxsubinterpreters"):  # Python 3.13 and later; before
        try:
            current = importlib.import_module(name).get_current()
        except (ImportError, AttributeError):
            continue
        return int(current[0] if isinstance(current, tuple) else current) == 0
    return True


if not is_main():
    raise ImportError(
        "undivided cannot be imported in a subinterpreter, because PyTorch cannot: use a process, for example "
        "multiprocessing.get_context('spawn').Process"
    )

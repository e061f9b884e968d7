"""Real documents of very different lengths: files of Python's library, which every user has."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from undivided.errors import InputError

_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "idlelib", "__pycache__"})


@dataclass(frozen=True)
class Document:
    """One file. A token is a byte."""

    name: str
    text: bytes

    def __len__(self) -> int:
        return len(self.text)


def collect(count: int, shortest: int, longest: int) -> list[Document]:
    """`count` files with sizes spread evenly on a logarithmic scale; the same files for the same Python.

    Raises:
        InputError: this Python has too few source files (an embedded one may have none).
    """
    library = Path(sysconfig.get_path("stdlib"))
    sizes = sorted((size, name) for name, size in library_files() if shortest <= size)
    if len(sizes) < count:
        raise InputError(
            "documents", f"be found: {count} source files of Python's library", f"{len(sizes)} in {library}"
        )
    names = []
    for index in range(count):
        target = shortest * (longest / shortest) ** (index / max(count - 1, 1))
        nearest = min(sizes, key=lambda entry: (abs(entry[0] - target), entry[1]))
        sizes.remove(nearest)
        names.append(nearest[1])
    return [Document(name, (library / name).read_bytes()[:longest]) for name in names]


def library_files() -> Iterator[tuple[str, int]]:
    """(name, size in bytes) of every source file of Python's library, without tests."""
    library = Path(sysconfig.get_path("stdlib"))
    for pattern in ("*.py", "*/*.py"):
        for path in library.glob(pattern):
            if path.parent.name not in _NOT_LIBRARY:
                yield path.relative_to(library).as_posix(), path.stat().st_size

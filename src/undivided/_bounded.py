"""Dictionaries whose size is bounded, for what is found again by a key."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Bounded(dict[K, V]):
    """A dictionary of at most `most` entries: one that is full is emptied before it takes another key. Reading costs
    nothing more, and what is still needed is computed again.

    >>> squares = Bounded(2)
    >>> for n in range(3):
    ...     squares[n] = n * n
    >>> squares
    {2: 4}
    """

    def __init__(self, most: int) -> None:
        self.most = most

    def __setitem__(self, key: K, value: V) -> None:
        if len(self) >= self.most and key not in self:
            self.clear()
        super().__setitem__(key, value)

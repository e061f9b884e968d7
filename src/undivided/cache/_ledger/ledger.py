"""The interface of a ledger, and plans of memory for new tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol, Self

from undivided.cache._ledger.prefixes import Node
from undivided.cache._storage import Counts


class MemoryPlan(NamedTuple):
    """Memory for new tokens, not yet committed.

    Args:
        lengths: tokens of every sequence after the commit.
        copies: pages to copy, (from, to), before tokens are written, because another sequence shares the first.
        tables: the new pages of each sequence whose pages change.
        fresh: the pages that were free, or in the index of prefixes.
        forgotten: the nodes that the index of prefixes gives up for them.
    """

    lengths: Counts
    copies: Sequence[tuple[int, int]] = ()
    tables: Mapping[int, list[int]] = MappingProxyType({})
    fresh: Sequence[int] = ()
    forgotten: Sequence[Node] = ()


class Ledger(Protocol):
    """The interface of a ledger."""

    @property
    def lengths(self) -> Counts:
        """The tokens of each sequence."""

    def truncate(self, lengths: Counts) -> None:
        """Drop the last tokens of each sequence, down to these lengths, which are at most the current ones."""

    def fork_copies(self, pairs: Sequence[tuple[int, int]]) -> tuple[Sequence[tuple[int, int]], int]:
        """Pages to copy, (from, to), and the number of their rows, before `fork` of these pairs."""

    def fork(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Make sequences copies of others, (from, to), all at once."""

    def free(self, sequence: int) -> None:
        """Drop a sequence."""

    def plan(self, counts: Counts) -> MemoryPlan:
        """A plan for this number of new tokens of each sequence; InputError if they do not fit."""

    def commit(self, plan: MemoryPlan) -> None:
        """Apply the last plan."""

    def rows(self, plan: MemoryPlan, sequence: int, count: int) -> list[int]:
        """The rows of a sequence's last `count` tokens in the flattened pool, after the plan."""

    def copy(self) -> Self:
        """An equal ledger."""

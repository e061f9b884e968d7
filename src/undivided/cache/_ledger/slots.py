"""`Slots`: the ledger of a cache with a slot per sequence."""

from __future__ import annotations

from collections.abc import Sequence

from undivided.cache._ledger.ledger import MemoryPlan
from undivided.cache._storage import Counts
from undivided.errors import InputError


class Slots:
    """A ledger in which page b belongs to sequence b."""

    def __init__(self, batch: int, max_len: int) -> None:
        self.lengths: Counts = (0,) * batch
        self.max_len = max_len

    def plan(self, counts: Counts) -> MemoryPlan:
        lengths = tuple([length + count for length, count in zip(self.lengths, counts, strict=True)])
        if max(lengths) > self.max_len:
            n = lengths.index(max(lengths))
            must = f"leave every sequence within max_len={self.max_len} tokens"
            hint = "increase max_len, free(i) a sequence that has ended, or truncate(lengths)"
            raise InputError("k", must, f"{counts[n]} new after {self.lengths[n]} in sequence {n}", hint=hint)
        return MemoryPlan(lengths)

    def commit(self, plan: MemoryPlan) -> None:
        self.lengths = plan.lengths

    def rows(self, plan: MemoryPlan, sequence: int, count: int) -> list[int]:
        end = sequence * self.max_len + plan.lengths[sequence]
        return list(range(end - count, end))

    def truncate(self, lengths: Counts) -> None:
        self.lengths = lengths

    def fork_copies(self, pairs: Sequence[tuple[int, int]]) -> tuple[Sequence[tuple[int, int]], int]:
        moved = [pair for pair in pairs if pair[0] != pair[1]]
        return moved, max((self.lengths[source] for source, _ in moved), default=0)

    def fork(self, pairs: Sequence[tuple[int, int]]) -> None:
        after = list(self.lengths)
        for source, target in pairs:
            after[target] = self.lengths[source]
        self.lengths = tuple(after)

    def free(self, sequence: int) -> None:
        self.lengths = (*self.lengths[:sequence], 0, *self.lengths[sequence + 1 :])

    def copy(self) -> Slots:
        """An equal ledger."""
        twin = Slots(len(self.lengths), self.max_len)
        twin.lengths = self.lengths
        return twin

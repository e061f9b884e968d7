"""`SpreadPages`: the pages of sequences over ranks. Page p of every sequence is on rank ``p % world``.

Every rank keeps the ledgers of all ranks, which are numbers on the host. So all ranks refuse the same requests
without a message, and know which rank writes which token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from undivided.cache._ledger import Pages, Plan
from undivided.cache._storage import Counts


class RankPages(Pages):
    """The ledger of one rank, with the fix for a cache over ranks in its errors."""

    hint = "free(i) a sequence that has ended, truncate(lengths), or increase num_pages, the pages of each rank"


class SpreadPlan(NamedTuple):
    """Memory for new tokens: tokens of every sequence after the commit, and the plan of each rank."""

    lengths: Counts
    ranks: tuple[Plan, ...]


class SpreadPages:
    """The ledgers of all ranks, and the lengths of whole sequences."""

    def __init__(self, num_pages: int, page_size: int, batch: int, world: int) -> None:
        self.page_size, self.world = page_size, world
        self.lengths: Counts = (0,) * batch
        self.ranks = [RankPages(num_pages, page_size, batch) for _ in range(world)]

    def held(self, rank: int, length: int) -> int:
        """The tokens that a rank holds of a sequence of this length.

        >>> pages = SpreadPages(8, 4, 1, world=2)
        >>> pages.held(0, 10), pages.held(1, 10)
        (6, 4)
        """
        size, world = self.page_size, self.world
        full, rest = divmod(length, size)
        return size * ((full - rank + world - 1) // world) + (rest if full % world == rank else 0)

    def held_by(self, rank: int, lengths: Counts) -> Counts:
        """`held`, of every sequence."""
        return tuple([self.held(rank, length) for length in lengths])

    def holds(self, rank: int, position: int) -> bool:
        """Whether a rank holds the token at a position."""
        return position // self.page_size % self.world == rank

    def plan(self, counts: Counts) -> SpreadPlan:
        """A plan for this number of new tokens of each sequence; InputError if a rank has too few pages."""
        lengths = tuple([length + count for length, count in zip(self.lengths, counts, strict=True)])
        plans = []
        for rank, ledger in enumerate(self.ranks):
            after = self.held_by(rank, lengths)
            plans.append(ledger.plan(tuple([a - b for a, b in zip(after, ledger.lengths, strict=True)])))
        return SpreadPlan(lengths, tuple(plans))

    def commit(self, plan: SpreadPlan) -> None:
        """Apply the last plan."""
        for ledger, own in zip(self.ranks, plan.ranks, strict=True):
            ledger.commit(own)
        self.lengths = plan.lengths

    def truncate(self, lengths: Counts) -> None:
        """Drop the last tokens of each sequence, down to these lengths, which are at most the current ones."""
        for rank, ledger in enumerate(self.ranks):
            ledger.truncate(self.held_by(rank, lengths))
        self.lengths = lengths

    def fork_copies(self, pairs: Sequence[tuple[int, int]]) -> tuple[Sequence[tuple[int, int]], int]:
        """None: pages are shared, and copied when a sequence writes to them."""
        del pairs
        return (), 0

    def fork(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Make sequences copies of others, (from, to), all at once. Pages are shared."""
        lengths = list(self.lengths)
        for source, target in pairs:
            lengths[target] = self.lengths[source]
        for ledger in self.ranks:
            ledger.fork(pairs)
        self.lengths = tuple(lengths)

    def free(self, sequence: int) -> None:
        """Drop a sequence."""
        for ledger in self.ranks:
            ledger.free(sequence)
        self.lengths = (*self.lengths[:sequence], 0, *self.lengths[sequence + 1 :])

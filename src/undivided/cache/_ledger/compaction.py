"""Tokens that were appended last and of which some stay, such as the accepted path of a draft tree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import eq
from typing import Generic, NamedTuple, TypeVar

from undivided.arguments.checks import as_integer
from undivided.cache._checks import as_list
from undivided.cache._ledger.ledger import Ledger, MemoryPlan
from undivided.cache._ledger.pages import Pages
from undivided.cache._storage import Storage
from undivided.errors import InputError

L = TypeVar("L", bound=Ledger)


def checked_indices(argument: str, indices: object, drafted: int) -> list[int]:
    """The indices, if they ascend within the drafted tokens; otherwise InputError."""
    values = as_list(argument, indices, "be a list of ints")
    checked = [as_integer(f"{argument}[{n}]", value, 0) for n, value in enumerate(values)]
    for n, index in enumerate(checked):
        if index >= drafted:
            raise InputError(f"{argument}[{n}]", f"be one of the {drafted} tokens that were appended last", index)
        if n and index <= checked[n - 1]:
            raise InputError(argument, "ascend, as a path from the root does", checked)
    return checked


class Compaction(NamedTuple, Generic[L]):
    """The last tokens of some sequences, compacted, not yet committed.

    Args:
        ledger: the ledger without the tokens that move or are dropped.
        plan: its plan for those that move.
        source, target: rows of the flattened pools, before and after, of each token that moves.
    """

    ledger: L
    plan: MemoryPlan
    source: list[int]
    target: list[int]

    def read(self, storages: Iterable[Storage]) -> list[Callable[[], None]]:
        """The writes of the moved tokens in every storage. Everything is read before the first one writes: if memory
        does not suffice, nothing has changed."""
        return [storage.prepared_move(self.source, self.target, self.plan.copies) for storage in storages]

    def write(self, writes: Iterable[Callable[[], None]]) -> None:
        """Write what was read, then add the moved tokens to the ledger, which the caller uses from before on: if an
        interrupt ends this, the ledger has none of them."""
        for write in writes:
            write()
        self.ledger.commit(self.plan)


def compact(ledger: L, kept: Mapping[int, tuple[int, Sequence[int]]]) -> Compaction[L]:
    """The compaction of the last tokens of some sequences.

    Args:
        ledger: unchanged.
        kept: by sequence: the number of its last tokens, and which of them stay.

    Raises:
        InputError: pages were evicted after these tokens were appended, or shared pages cannot be copied.
    """
    lengths, counts = list(ledger.lengths), [0] * len(ledger.lengths)
    moved: dict[int, Sequence[int]] = {}
    for sequence, (drafted, indices) in kept.items():
        in_place = sum(map(eq, indices, range(drafted)))  # the indices ascend, so these are the first ones
        moved[sequence] = indices[in_place:]
        lengths[sequence] -= drafted - in_place
        counts[sequence] = len(moved[sequence])
        evicted = ledger.evicted[sequence] if isinstance(ledger, Pages) else 0
        if evicted > lengths[sequence] and (indices or lengths[sequence]):  # `truncate` allows dropping all tokens
            must, got = "be given before pages are evicted", "an eviction after these tokens were appended"
            raise InputError("indices", must, got, hint="keep(indices), then evict(mask)")
    after = ledger.copy()
    after.truncate(tuple(lengths))
    plan, current = after.plan(tuple(counts)), MemoryPlan(ledger.lengths)
    source: list[int] = []
    target: list[int] = []
    for sequence, indices in moved.items():
        rows = ledger.rows(current, sequence, kept[sequence][0])
        source += [rows[index] for index in indices]
        target += after.rows(plan, sequence, len(indices))
    return Compaction(after, plan, source, target)

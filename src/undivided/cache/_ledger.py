"""Ledgers: where every token is stored, as lengths, pages and reference counts on the host, without tensors.

One ledger serves all layers, because they hold the same tokens. `plan` reserves memory and changes nothing, so that a
refused request has no effect. Tokens are written to the rows of the plan, then `commit` applies it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol, Self, TypeVar

from torch import Tensor

from undivided.arguments.checks import as_integer
from undivided.cache._prefixes import PrefixIndex
from undivided.cache._storage import Counts, Storage
from undivided.errors import InputError

EVICTED = -1
"""The entry of an evicted page in the list of a sequence's pages."""


class Plan(NamedTuple):
    """Memory for new tokens, not yet committed.

    Args:
        lengths: tokens of every sequence after the commit.
        copies: pages to copy, (from, to), before tokens are written, because another sequence shares the first.
        tables: the new pages of each sequence whose pages change.
        fresh: the pages that were free.
    """

    lengths: Counts
    copies: Sequence[tuple[int, int]] = ()
    tables: Mapping[int, list[int]] = MappingProxyType({})
    fresh: Sequence[int] = ()


class SequenceLedger(Protocol):
    """The part of a ledger that changes whole sequences."""

    @property
    def lengths(self) -> Counts:
        """The tokens of each sequence."""
        ...

    def truncate(self, lengths: Counts) -> None:
        """Drop the last tokens of each sequence, down to these lengths, which are at most the current ones."""
        ...

    def fork_copies(self, pairs: Sequence[tuple[int, int]]) -> tuple[Sequence[tuple[int, int]], int]:
        """Pages to copy, (from, to), and the number of their rows, before `fork` of these pairs."""
        ...

    def fork(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Make sequences copies of others, (from, to), all at once."""
        ...

    def free(self, sequence: int) -> None:
        """Drop a sequence."""
        ...


class Ledger(SequenceLedger, Protocol):
    """The interface of a ledger."""

    def plan(self, counts: Counts) -> Plan:
        """A plan for this number of new tokens of each sequence; InputError if they do not fit."""
        ...

    def commit(self, plan: Plan) -> None:
        """Apply the last plan."""
        ...

    def rows(self, plan: Plan, sequence: int, count: int) -> list[int]:
        """The rows of a sequence's last `count` tokens in the flattened pool, after the plan."""
        ...

    def copy(self) -> Self:
        """An equal ledger."""
        ...


class Slots:
    """A ledger in which page b belongs to sequence b."""

    def __init__(self, batch: int, max_len: int) -> None:
        self.lengths: Counts = (0,) * batch
        self.max_len = max_len

    def plan(self, counts: Counts) -> Plan:
        lengths = tuple([length + count for length, count in zip(self.lengths, counts, strict=True)])
        if max(lengths) > self.max_len:
            n = lengths.index(max(lengths))
            raise InputError(
                "k",
                f"leave every sequence within max_len={self.max_len} tokens",
                f"{counts[n]} new after {self.lengths[n]} in sequence {n}",
                hint="increase max_len, free(i) a sequence that has ended, or truncate(lengths)",
            )
        return Plan(lengths)

    def commit(self, plan: Plan) -> None:
        self.lengths = plan.lengths

    def rows(self, plan: Plan, sequence: int, count: int) -> list[int]:
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


class Pages:
    """A ledger in which a sequence is a list of pages. Sequences share pages; a shared page is copied before a write.

    `argument` and `hint` are the argument and the fix in the error for too few pages.
    """

    argument = "k"
    hint = "free(i) a sequence that has ended, truncate(lengths), or increase num_pages"

    def __init__(self, num_pages: int, page_size: int, batch: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self.lengths: Counts = (0,) * batch
        self.tables: list[list[int]] = [[] for _ in range(batch)]
        self.references = [0] * num_pages
        self.unused = list(range(num_pages - 1, -1, -1))  # taken from the end: page 0 first
        self.evicted = [0] * batch  # tokens that each sequence had at its last eviction; fewer must not remain
        self.prefixes = PrefixIndex(page_size)
        self.changes = 0  # of the tables, so that copies of them can be refreshed

    def plan(self, counts: Counts) -> Plan:
        lengths = tuple([length + count for length, count in zip(self.lengths, counts, strict=True)])
        needs = self._needs(lengths, counts)
        needed = sum(grow + copy for _, grow, copy in needs)
        if needed > len(self.unused) and not self._reclaim(needed - len(self.unused)):
            raise InputError(
                self.argument,
                f"fit into the {self.free_pages} free pages of {self.num_pages} (page_size {self.page_size})",
                f"tokens that need {needed}",
                hint=self.hint,
            )
        if not needs:
            return Plan(lengths)
        fresh = self.unused[: -needed - 1 : -1]
        following = iter(fresh)
        copies, tables = [], {}
        for n, grow, copy in needs:
            pages = list(self.tables[n])
            if copy:
                copies.append((pages[-1], next(following)))
                pages[-1] = copies[-1][1]
            tables[n] = pages + [next(following) for _ in range(grow)]
        return Plan(lengths, copies, tables, fresh)

    @property
    def free_pages(self) -> int:
        """The number of pages that no sequence uses; the index of prefixes gives its own up if they are needed."""
        return len(self.unused) + self.prefixes.droppable(self.references)

    def _reclaim(self, count: int) -> bool:
        """Free so many pages of the index, or none if it has fewer; whether it had enough."""
        if self.prefixes.droppable(self.references) < count:
            return False
        self._release(self.prefixes.drop(self.references, count))
        return True

    def remember(self, sequence: int, tokens: Sequence[int]) -> None:
        """Index the full pages that hold these tokens, the first ones of a sequence."""
        for page in self.prefixes.add(tokens, self.tables[sequence]):
            self.references[page] += 1

    def match(self, sequence: int, tokens: Sequence[int]) -> int:
        """Give an empty sequence the pages of the longest indexed prefix; the number of its tokens."""
        assert not self.lengths[sequence]
        pages = self.prefixes.find(tokens)
        for page in pages:
            self.references[page] += 1
        count = len(pages) * self.page_size
        self.tables[sequence] = pages
        self.lengths = (*self.lengths[:sequence], count, *self.lengths[sequence + 1 :])
        self.changes += 1
        return count

    def _needs(self, lengths: Counts, counts: Counts) -> list[tuple[int, int, bool]]:
        """(sequence, pages to add, whether to copy its last page) for each sequence that needs pages."""
        needs: list[tuple[int, int, bool]] = []
        leaving: dict[int, int] = {}  # number of sequences that copy a shared page; the last one may keep it
        for n, count in enumerate(counts):
            if not count:
                continue
            pages = self.tables[n]
            copy = False
            if self.lengths[n] % self.page_size:  # the last page is written to
                last = pages[-1]
                copy = self.references[last] - leaving.get(last, 0) > 1
                if copy:
                    leaving[last] = leaving.get(last, 0) + 1
            grow = -(-lengths[n] // self.page_size) - len(pages)
            if grow or copy:
                needs.append((n, grow, copy))
        return needs

    def commit(self, plan: Plan) -> None:
        self.lengths = plan.lengths
        if not plan.tables:
            return
        del self.unused[len(self.unused) - len(plan.fresh) :]
        for page in plan.fresh:
            self.references[page] = 1
        for source, _ in plan.copies:
            self.references[source] -= 1
        for n, pages in plan.tables.items():
            self.tables[n] = pages
        self.changes += 1

    def rows(self, plan: Plan, sequence: int, count: int) -> list[int]:
        rows: list[int] = []
        size, end = self.page_size, plan.lengths[sequence]
        pages = plan.tables.get(sequence) or self.tables[sequence]
        at = end - count
        if count == 1:  # decoding
            return [pages[at // size] * size + at % size]
        while at < end:  # one page per pass
            stop = min(end, (at // size + 1) * size)
            first = pages[at // size] * size + at % size
            rows.extend(range(first, first + stop - at))
            at = stop
        return rows

    def evict(self, sequence: int, places: Sequence[int]) -> int:
        """Release the pages at these places in the list of a sequence; how many were not released before."""
        pages = self.tables[sequence]
        held = [place for place in places if pages[place] != EVICTED]
        if held:
            self._release([pages[place] for place in held])
            for place in held:
                pages[place] = EVICTED
            self.evicted[sequence] = self.lengths[sequence]
            self.changes += 1
        return len(held)

    def truncate(self, lengths: Counts) -> None:
        for n, length in enumerate(lengths):
            if 0 < length < self.evicted[n]:
                raise InputError(
                    f"lengths[{n}]",
                    f"be 0 or at least the {self.evicted[n]} tokens that sequence {n} had when pages were evicted",
                    length,
                    hint="evict after the rejected tokens were truncated",
                )
        for n, length in enumerate(lengths):
            self.evicted[n] = self.evicted[n] if length else 0
            keep = -(-length // self.page_size)
            pages = self.tables[n]
            if keep < len(pages):
                self._release(pages[keep:])
                self.tables[n] = pages[:keep]
                self.changes += 1
        self.lengths = lengths

    def fork_copies(self, pairs: Sequence[tuple[int, int]]) -> tuple[Sequence[tuple[int, int]], int]:
        return (), 0

    def fork(self, pairs: Sequence[tuple[int, int]]) -> None:
        tables, lengths, evicted = list(self.tables), list(self.lengths), list(self.evicted)
        for source, target in pairs:
            for page in self.tables[source]:
                if page != EVICTED:
                    self.references[page] += 1
            tables[target], lengths[target] = list(self.tables[source]), self.lengths[source]
            evicted[target] = self.evicted[source]
        for _, target in pairs:
            self._release(self.tables[target])
        self.tables, self.lengths, self.evicted = tables, tuple(lengths), evicted
        self.changes += 1

    def free(self, sequence: int) -> None:
        self._release(self.tables[sequence])
        self.tables[sequence], self.evicted[sequence] = [], 0
        self.lengths = (*self.lengths[:sequence], 0, *self.lengths[sequence + 1 :])
        self.changes += 1

    def _release(self, pages: Sequence[int]) -> None:
        for page in reversed(pages):
            if page == EVICTED:
                continue
            self.references[page] -= 1
            if not self.references[page]:
                self.unused.append(page)

    def copy(self) -> Pages:
        """An equal ledger, with the same index of prefixes."""
        twin = type(self)(0, self.page_size, 0)
        twin.num_pages, twin.lengths, twin.changes = self.num_pages, self.lengths, self.changes
        twin.tables = [list(pages) for pages in self.tables]
        twin.references, twin.unused, twin.evicted = list(self.references), list(self.unused), list(self.evicted)
        twin.prefixes = self.prefixes
        return twin


L = TypeVar("L", bound=Ledger)


def checked_indices(argument: str, indices: object, drafted: int) -> list[int]:
    """The indices, if they ascend within the drafted tokens; otherwise InputError."""
    values = indices.tolist() if isinstance(indices, Tensor) else indices
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise InputError(argument, "be a list of ints", type(indices).__name__)
    found = [as_integer(f"{argument}[{n}]", value, 0) for n, value in enumerate(values)]
    for n, index in enumerate(found):
        if index >= drafted:
            raise InputError(f"{argument}[{n}]", f"be one of the {drafted} tokens that were appended last", index)
        if n and index <= found[n - 1]:
            raise InputError(argument, "ascend, as a path from the root does", found)
    return found


def keep(ledger: L, storages: Iterable[Storage], kept: Mapping[int, tuple[int, Sequence[int]]]) -> L:
    """The ledger after the last tokens of some sequences were compacted in every storage.

    Args:
        ledger: unchanged.
        kept: by sequence: the number of its last tokens, and which of them stay.

    Raises:
        InputError: pages of these tokens were evicted, or shared pages cannot be copied. Nothing changes.
    """
    lengths, counts = list(ledger.lengths), [0] * len(ledger.lengths)
    for sequence, (drafted, indices) in kept.items():
        lengths[sequence] -= drafted
        counts[sequence] = len(indices)
    after = ledger.copy()
    after.truncate(tuple(lengths))
    plan, now = after.plan(tuple(counts)), Plan(ledger.lengths)
    source: list[int] = []
    target: list[int] = []
    for sequence, (drafted, indices) in kept.items():
        rows = ledger.rows(now, sequence, drafted)
        source += [rows[index] for index in indices]
        target += after.rows(plan, sequence, len(indices))
    for storage in storages:
        storage.move(source, target, plan.copies)
    after.commit(plan)
    return after

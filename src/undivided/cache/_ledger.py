"""Which token lies where: lengths, pages and references, on the host and without a tensor in it.

One ledger may serve many layers, for they all hold the same tokens. A ledger is asked for a `Plan` first, which changes
nothing; what is refused has therefore done nothing. Tokens are written where the plan says, and `commit` makes it true.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

from undivided.cache._storage import Counts
from undivided.errors import InputError


class Plan(NamedTuple):
    """Room for new tokens, found but not yet taken.

    lengths: of every sequence once the tokens are there.
    copies: pages to copy, (from, to), before the tokens are written, for the first is shared with another sequence.
    tables: the pages of each sequence that has other ones than before.
    fresh: the pages that were nobody's.
    """

    lengths: Counts
    copies: Sequence[tuple[int, int]] = ()
    tables: Mapping[int, list[int]] = MappingProxyType({})
    fresh: Sequence[int] = ()


class Ledger(Protocol):
    """What the caches ask of their bookkeeping."""

    @property
    def lengths(self) -> Counts:
        """The tokens of each sequence."""
        ...

    def plan(self, counts: Counts) -> Plan:
        """Room for so many new tokens of each sequence; InputError where there is none."""
        ...

    def commit(self, plan: Plan) -> None:
        """Take the room of the last plan."""
        ...

    def rows(self, plan: Plan, sequence: int, count: int) -> list[int]:
        """The rows of a sequence's last `count` tokens in the flattened pool, once the plan's are there."""
        ...

    def truncate(self, lengths: Counts) -> None:
        """Forget the last tokens: so many remain of each sequence, never more than there are."""
        ...

    def forked(self, pairs: Sequence[tuple[int, int]]) -> tuple[Sequence[tuple[int, int]], int]:
        """Pages to copy, (from, to), and how many of their rows, before `fork` of these sequences (from, to)."""
        ...

    def fork(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Make sequences the same as others, (from, to), all at once."""
        ...

    def free(self, sequence: int) -> None:
        """Forget a sequence."""
        ...


class Slots:
    """Page b holds sequence b, and nothing else."""

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
                hint="a larger max_len; free(i) a sequence that has ended; truncate(lengths)",
            )
        return Plan(lengths)

    def commit(self, plan: Plan) -> None:
        self.lengths = plan.lengths

    def rows(self, plan: Plan, sequence: int, count: int) -> list[int]:
        end = sequence * self.max_len + plan.lengths[sequence]
        return list(range(end - count, end))

    def truncate(self, lengths: Counts) -> None:
        self.lengths = lengths

    def forked(self, pairs: Sequence[tuple[int, int]]) -> tuple[Sequence[tuple[int, int]], int]:
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
        """Another ledger that says the same."""
        twin = Slots(len(self.lengths), self.max_len)
        twin.lengths = self.lengths
        return twin


class Pages:
    """A sequence is a list of pages; sequences that begin alike may share them, and copy one before they write to it.

    argument, hint: what to blame where there are too few pages, and how to repair it.
    """

    argument = "k"
    hint = "free(i) a sequence that has ended, truncate(lengths), or more num_pages"

    def __init__(self, num_pages: int, page_size: int, batch: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self.lengths: Counts = (0,) * batch
        self.tables: list[list[int]] = [[] for _ in range(batch)]
        self.references = [0] * num_pages
        self.unused = list(range(num_pages - 1, -1, -1))  # taken from the end: page 0 first
        self.changes = 0  # counted, so that whoever mirrors the tables knows when to do it again

    def plan(self, counts: Counts) -> Plan:
        lengths = tuple([length + count for length, count in zip(self.lengths, counts, strict=True)])
        needs = self._needs(lengths, counts)
        wanted = sum(grow + copy for _, grow, copy in needs)
        if wanted > len(self.unused):
            raise InputError(
                self.argument,
                f"fit into the {len(self.unused)} free pages of {self.num_pages} (page_size {self.page_size})",
                f"tokens that need {wanted}",
                hint=self.hint,
            )
        if not needs:
            return Plan(lengths)
        fresh = self.unused[: -wanted - 1 : -1]
        following = iter(fresh)
        copies, tables = [], {}
        for n, grow, copy in needs:
            pages = list(self.tables[n])
            if copy:
                copies.append((pages[-1], next(following)))
                pages[-1] = copies[-1][1]
            tables[n] = pages + [next(following) for _ in range(grow)]
        return Plan(lengths, copies, tables, fresh)

    def _needs(self, lengths: Counts, counts: Counts) -> list[tuple[int, int, bool]]:
        """(sequence, pages to add, whether its last page is to be copied) of those that need any."""
        needs: list[tuple[int, int, bool]] = []
        leaving: dict[int, int] = {}  # of a shared page: sequences that copy it, the last may keep it
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
        size, pages = self.page_size, plan.tables.get(sequence, self.tables[sequence])
        end = plan.lengths[sequence]
        at = end - count
        while at < end:  # a page at a time
            stop = min(end, (at // size + 1) * size)
            first = pages[at // size] * size + at % size
            rows.extend(range(first, first + stop - at))
            at = stop
        return rows

    def truncate(self, lengths: Counts) -> None:
        for n, length in enumerate(lengths):
            keep = -(-length // self.page_size)
            pages = self.tables[n]
            if keep < len(pages):
                self._release(pages[keep:])
                self.tables[n] = pages[:keep]
                self.changes += 1
        self.lengths = lengths

    def forked(self, pairs: Sequence[tuple[int, int]]) -> tuple[Sequence[tuple[int, int]], int]:
        return (), 0

    def fork(self, pairs: Sequence[tuple[int, int]]) -> None:
        tables, lengths = list(self.tables), list(self.lengths)
        for source, target in pairs:
            for page in self.tables[source]:
                self.references[page] += 1
            tables[target], lengths[target] = list(self.tables[source]), self.lengths[source]
        for _, target in pairs:
            self._release(self.tables[target])
        self.tables, self.lengths = tables, tuple(lengths)
        self.changes += 1

    def free(self, sequence: int) -> None:
        self._release(self.tables[sequence])
        self.tables[sequence] = []
        self.lengths = (*self.lengths[:sequence], 0, *self.lengths[sequence + 1 :])
        self.changes += 1

    def _release(self, pages: Sequence[int]) -> None:
        for page in reversed(pages):
            self.references[page] -= 1
            if not self.references[page]:
                self.unused.append(page)

    def copy(self) -> Pages:
        """Another ledger that says the same."""
        twin = type(self)(0, self.page_size, 0)
        twin.num_pages, twin.lengths, twin.changes = self.num_pages, self.lengths, self.changes
        twin.tables = [list(pages) for pages in self.tables]
        twin.references, twin.unused = list(self.references), list(self.unused)
        return twin

"""`Pages`: the ledger of sequences that take pages from a pool, or from the pools of several ranks."""

from __future__ import annotations

import itertools
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from undivided.cache._ledger.ledger import MemoryPlan
from undivided.cache._ledger.prefixes import Node, PrefixIndex
from undivided.cache._storage import Counts
from undivided.errors import CacheFullError, InputError

EVICTED = -1
"""The entry of an evicted page in the list of a sequence's pages."""

Places = tuple[tuple[int, int], ...]
"""Places in the list of a sequence's pages, as ascending ranges (first, stop) that do not touch."""


class PageNeed(NamedTuple):
    """The places in the list of a sequence's pages, from first to stop, that need a page.

    copies_first: the page at the first place is a copy of the page there, which another sequence shares.
    """

    sequence: int
    first: int
    stop: int
    copies_first: bool


class Pages:
    """A ledger in which a sequence is a list of pages. Sequences share pages; a shared page is copied before a write.

    With several ranks, each has `num_pages`, and page p of every sequence is on rank ``p % ranks``: page 3 of rank 1 of
    4 has the number 3 * 4 + 1. Every rank keeps this ledger of all ranks, so that all refuse the same requests without
    a message. `argument` and `hint` are the argument and the fix in the error for too few pages.

    An exception may come between any two lines, from the handler of a signal such as Ctrl-C. So a change replaces the
    tables and what belongs to them in one line, between taking new pages and releasing old ones: the ledger is as
    before or as after, and at worst a page is lost.
    """

    argument = "k"
    hint = "free(i) a sequence that has ended, truncate(lengths), or increase num_pages"

    def __init__(self, num_pages: int, page_size: int, batch: int, ranks: int = 1) -> None:
        self.num_pages, self.page_size, self.ranks = num_pages, page_size, ranks
        self.lengths: Counts = (0,) * batch
        self.tables: list[list[int]] = [[] for _ in range(batch)]  # a list is replaced, never changed: see BlockTable
        total = num_pages * ranks
        self.references = array("i", bytes(4 * total))  # arrays, because a copy of a list takes ten times as long
        # of each rank, taken from the end: page 0 first
        self.unused = [array("i", range(total - ranks + rank, -1, -ranks)) for rank in range(ranks)]
        # tokens that each sequence had at its last eviction; `truncate` must not leave fewer, except for 0
        self.evicted = [0] * batch
        self.evicted_places: list[Places] = [()] * batch
        self.prefixes = PrefixIndex(page_size, ranks)
        self._of_ranks: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
        """The results of `pages_on_rank`, each after the sequence's pages."""
        self._identity = object()
        self.changes = 0  # number of changes of the tables, so that copies of them can be refreshed
        self._digest = -1, 0  # (number of changes, digest of the tables after them)

    def plan(self, counts: Counts) -> MemoryPlan:
        lengths = tuple([length + count for length, count in zip(self.lengths, counts, strict=True)])
        needs = self._needs(lengths, counts)
        if not needs:
            return MemoryPlan(lengths)
        forgotten = self._reclaimed(needs)
        following = [
            itertools.chain([node.page for node in forgotten if node.page % self.ranks == rank], reversed(pages))
            for rank, pages in enumerate(self.unused)
        ]
        copies, tables, fresh = [], {}, []
        for n, first, stop, copies_first in needs:
            pages = [next(following[place % self.ranks]) for place in range(first, stop)]
            if copies_first:
                copies.append((self.tables[n][first], pages[0]))
            tables[n] = self.tables[n][:first] + pages
            fresh += pages
        return MemoryPlan(lengths, copies, tables, fresh, forgotten)

    @property
    def free_pages(self) -> Counts:
        """The number of pages of each rank that no sequence uses; the index of prefixes gives its own up if they are
        needed."""
        indexed = self._followed_prefixes().unused
        return tuple([len(pages) + count for pages, count in zip(self.unused, indexed, strict=True)])

    def _reclaimed(self, needs: Sequence[PageNeed]) -> Sequence[Node]:
        """The nodes of the index that must be removed to meet these needs; InputError if that is impossible."""
        needed = [0] * self.ranks
        for need in needs:
            for place in range(need.first, need.stop):
                needed[place % self.ranks] += 1
        missing = [count - len(pages) for count, pages in zip(needed, self.unused, strict=True)]
        if max(missing) <= 0:
            return ()
        selected = self._followed_prefixes().select(missing)
        found = Counter(node.page % self.ranks for node in selected)
        for rank, count in enumerate(missing):
            if count > found[rank]:
                where, of_rank = (f" on rank {rank}", ", the pages of each rank") if self.ranks > 1 else ("", "")
                free = self.free_pages[rank]
                must = f"fit into the {free} free pages of {self.num_pages}{where} (page_size {self.page_size})"
                raise CacheFullError(self.argument, must, f"tokens that need {needed[rank]}", hint=self.hint + of_rank)
        return selected

    def remember(self, sequence: int, tokens: Sequence[int]) -> None:
        """Index the full pages that hold these tokens, the first ones of a sequence."""
        self._followed_prefixes().add(tokens, self.tables[sequence], self.references)

    def forget(self) -> None:
        """Give up all pages of the index of prefixes; sequences keep theirs."""
        self._release(self.prefixes.clear())

    def match(self, sequence: int, tokens: Sequence[int]) -> int:
        """Give an empty sequence the pages of the longest indexed prefix; the number of its tokens."""
        assert not self.lengths[sequence]
        pages = self._followed_prefixes().find(tokens)
        for page in pages:
            self._retain(page)
        if pages:
            self.prefixes.use(pages[-1])
        count = len(pages) * self.page_size
        tables = list(self.tables)
        tables[sequence] = pages
        lengths = _with_entry(self.lengths, sequence, count)
        self.tables, self.lengths, self.changes = tables, lengths, self.changes + 1
        return count

    def _needs(self, lengths: Counts, counts: Counts) -> list[PageNeed]:
        """The pages that sequences need for these numbers of new tokens, after which they have these lengths."""
        needs: list[PageNeed] = []
        leaving: dict[int, int] = {}  # number of sequences that copy a shared page; the last one may keep it
        for n, count in enumerate(counts):
            if not count:
                continue
            pages = self.tables[n]
            copies_first = False
            if self.lengths[n] % self.page_size:  # the last page is written to
                last = pages[-1]
                copies_first = self.references[last] - leaving.get(last, 0) > 1
                if copies_first:
                    leaving[last] = leaving.get(last, 0) + 1
            first, stop = len(pages) - copies_first, -(-lengths[n] // self.page_size)
            if first < stop:
                needs.append(PageNeed(n, first, stop, copies_first))
        return needs

    def commit(self, plan: MemoryPlan) -> None:
        if not plan.tables:
            self.lengths = plan.lengths
            return
        self.prefixes.remove(plan.forgotten)
        self._release([node.page for node in plan.forgotten])
        for page in plan.fresh:
            self.unused[page % self.ranks].pop()
            self.references[page] = 1
        tables = list(self.tables)
        for n, pages in plan.tables.items():
            tables[n] = pages
        self.tables, self.lengths, self.changes = tables, plan.lengths, self.changes + 1
        self._release([source for source, _ in plan.copies])

    def digest(self) -> int:
        """A number from 0 to 2**64 - 1 that differs between ledgers with different pages; the same in every process."""
        if self._digest[0] != self.changes:
            self._digest = self.changes, hash(tuple(map(tuple, self.tables))) & (2**64 - 1)
        return self._digest[1]

    def pages_on_rank(self, rank: int, sequence: int) -> list[int]:
        """The pages of a sequence on a rank, numbered within it."""
        pages = self.tables[sequence]
        if self.ranks == 1:
            return pages
        found = self._of_ranks.get((rank, sequence))
        if found is None or found[0] is not pages:  # the same list as before, so that BlockTable keeps its row
            found = self._of_ranks[rank, sequence] = pages, [page // self.ranks for page in pages[rank :: self.ranks]]
        return found[1]

    def rows(self, plan: MemoryPlan, sequence: int, count: int) -> list[int]:
        rows: list[int] = []
        size, end = self.page_size, plan.lengths[sequence]
        pages = plan.tables.get(sequence) or self.tables[sequence]
        token = end - count
        if count == 1:  # decoding
            return [pages[token // size] * size + token % size]
        while token < end:  # one page per pass
            stop = min(end, (token // size + 1) * size)
            first = pages[token // size] * size + token % size
            rows.extend(range(first, first + stop - token))
            token = stop
        return rows

    def held_places(self, sequence: int) -> list[int]:
        """The places of the full pages of a sequence that are not evicted."""
        evicted, full = self.evicted_places[sequence], self.lengths[sequence] // self.page_size
        starts, stops = [0, *(stop for _, stop in evicted)], [*(first for first, _ in evicted), full]
        return [place for start, stop in zip(starts, stops, strict=True) for place in range(start, stop)]

    def evict(self, sequence: int, places: Sequence[int]) -> None:
        """Release the pages at some of the held places of a sequence."""
        if not places:
            return
        tables, evicted, evicted_places = list(self.tables), list(self.evicted), list(self.evicted_places)
        before = tables[sequence]
        tables[sequence] = pages = list(before)
        for place in places:
            pages[place] = EVICTED
        evicted[sequence] = self.lengths[sequence]
        evicted_places[sequence] = _with_places(evicted_places[sequence], places)
        self._replace(tables, self.lengths, evicted, evicted_places)
        self._release([before[place] for place in places])

    def truncate(self, lengths: Counts) -> None:
        shorter = [n for n, (old, new) in enumerate(zip(self.lengths, lengths, strict=True)) if old != new]
        for n in shorter:
            if 0 < lengths[n] < self.evicted[n]:
                must = f"be 0 or at least the {self.evicted[n]} tokens that sequence {n} had when pages were evicted"
                hint = "evict after the rejected tokens were truncated"
                raise InputError(f"lengths[{n}]", must, lengths[n], hint=hint)
        if not shorter:
            return
        tables, evicted, evicted_places = list(self.tables), list(self.evicted), list(self.evicted_places)
        released: list[list[int]] = []
        for n in shorter:
            if not lengths[n]:
                evicted[n], evicted_places[n] = 0, ()
            keep = -(-lengths[n] // self.page_size)
            if keep < len(tables[n]):
                released.append(tables[n][keep:])
                tables[n] = tables[n][:keep]
        self._replace(tables, lengths, evicted, evicted_places)
        for pages in released:
            self._release(pages)

    def fork_copies(self, pairs: Sequence[tuple[int, int]]) -> tuple[Sequence[tuple[int, int]], int]:
        return (), 0

    def fork(self, pairs: Sequence[tuple[int, int]]) -> None:
        tables, lengths = list(self.tables), list(self.lengths)
        evicted, evicted_places = list(self.evicted), list(self.evicted_places)
        for source, target in pairs:
            for page in self.tables[source]:
                if page != EVICTED:
                    self._retain(page)
            tables[target], lengths[target] = self.tables[source], self.lengths[source]
            evicted[target], evicted_places[target] = self.evicted[source], self.evicted_places[source]
        released = [self.tables[target] for _, target in pairs]
        self._replace(tables, tuple(lengths), evicted, evicted_places)
        for pages in released:
            self._release(pages)

    def free(self, sequence: int) -> None:
        tables, evicted, evicted_places = list(self.tables), list(self.evicted), list(self.evicted_places)
        pages = tables[sequence]
        tables[sequence], evicted[sequence], evicted_places[sequence] = [], 0, ()
        self._replace(tables, _with_entry(self.lengths, sequence, 0), evicted, evicted_places)
        self._release(pages)

    def _replace(
        self, tables: list[list[int]], lengths: Counts, evicted: list[int], evicted_places: list[Places]
    ) -> None:
        """Replace all of them at once, before the pages that are no longer in the tables are released."""
        state = tables, lengths, evicted, evicted_places, self.changes + 1
        self.tables, self.lengths, self.evicted, self.evicted_places, self.changes = state

    def _release(self, pages: Sequence[int]) -> None:
        for page in reversed(pages):
            if page == EVICTED:
                continue
            self.references[page] -= 1
            if self.references[page] == 1 and self.prefixes:
                self._followed_prefixes().set_used(page, False)
            elif not self.references[page]:
                self.unused[page % self.ranks].append(page)

    def _retain(self, page: int) -> None:
        if self.references[page] == 1 and self.prefixes:
            self._followed_prefixes().set_used(page, True)
        self.references[page] += 1

    def _followed_prefixes(self) -> PrefixIndex:
        """The index of prefixes, which follows this ledger; it may have followed a copy that was dropped."""
        if self.prefixes.ledger is not self._identity:
            self.prefixes.follow(self._identity, self.references)
        return self.prefixes

    def copy(self) -> Pages:
        """An equal ledger, with the same index of prefixes, which follows the copy from now on."""
        twin = type(self)(0, self.page_size, 0, self.ranks)
        twin.num_pages, twin.lengths, twin.changes = self.num_pages, self.lengths, self.changes
        twin.tables, twin.references = list(self.tables), self.references[:]
        twin.evicted, twin.evicted_places = list(self.evicted), list(self.evicted_places)
        twin.unused = [pages[:] for pages in self.unused]
        twin._of_ranks = dict(self._of_ranks)
        twin.prefixes = self._followed_prefixes()
        twin.prefixes.ledger = twin._identity
        return twin


def _with_entry(counts: Counts, sequence: int, count: int) -> Counts:
    """The counts, with `count` for this sequence."""
    return (*counts[:sequence], count, *counts[sequence + 1 :])


def _with_places(ranges: Places, places: Sequence[int]) -> Places:
    """The ranges with more places, of which none is in one of them."""
    joined: list[tuple[int, int]] = []
    for first, stop in sorted([*ranges, *((place, place + 1) for place in places)]):
        if joined and joined[-1][1] == first:
            first = joined.pop()[0]
        joined.append((first, stop))
    return tuple(joined)

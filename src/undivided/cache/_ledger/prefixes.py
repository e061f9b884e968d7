"""An index of full pages by the tokens that they and all pages before them hold, so that a new sequence can share them.

It holds a reference to each of its pages, so that they outlive their sequences, and gives up the least recently used
ones when the pool has no free page.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, MutableSequence, Sequence
from dataclasses import dataclass

Tokens = tuple[int, ...]


@dataclass(eq=False, slots=True)
class Node:
    """A page in the index, after its parent's page.

    Args:
        parent: the node of the page before; None for the first page of a sequence.
        tokens: the token ids of the page.
        page: its number.
        is_used: whether a sequence uses the page.
        users: 1 if a sequence does, and 1 for each child that has users. Without users the page can be given up.
        last_use: a later use has a larger number; a node's is larger than those of its children.
        queued_as: `last_use` of its entry in the queue of pages to give up; -1 without an entry.
    """

    parent: Node | None
    tokens: Tokens
    page: int
    is_used: bool = False
    users: int = 0
    last_use: int = -1
    queued_as: int = -1


class PrefixIndex:
    """Pages by their tokens and those before them.

    Which pages can be given up is kept up to date, so that to take one, or to count them, does not read the index. It
    follows the references of one ledger, `ledger`; another one calls `follow` first. While a method changes the index,
    `ledger` is None: if an exception from the handler of a signal ends it, the next method is called after `follow`.
    """

    def __init__(self, page_size: int, ranks: int) -> None:
        self.page_size = page_size
        self._start(ranks, [])

    def _start(self, ranks: int, nodes: Sequence[Node]) -> None:
        """Begin with these nodes, the least recently used first, of no ledger yet."""
        self.ledger: object = None
        self.unused = [0] * ranks
        """The number of pages of each rank that can be given up: no sequence uses them, nor a page after them."""
        by_tokens = {(node.parent, node.tokens): node for node in nodes}
        by_page = {node.page: node for node in nodes}
        self._nodes, self._by_page = by_tokens, by_page
        self._queue: list[tuple[int, Node]] = []  # a heap; entries that no longer count are dropped when they come up
        self._uses = len(nodes)

    def __getstate__(self) -> tuple[int, int, list[tuple[int | None, Tokens, int]]]:
        """The page size, the ranks, and (number of the parent, tokens, page) of each node, the least recently used
        first.

        A flat list: `copy` and `pickle` would recurse from every node to its parent, a page at a time.
        """
        numbers = {id(node): n for n, node in enumerate(self)}
        parents = [None if node.parent is None else numbers[id(node.parent)] for node in self]
        rows = [(n, node.tokens, node.page) for n, node in zip(parents, self, strict=True)]
        return self.page_size, len(self.unused), rows

    def __setstate__(self, state: tuple[int, int, list[tuple[int | None, Tokens, int]]]) -> None:
        self.page_size, ranks, rows = state
        nodes = [Node(None, tokens, page, last_use=n) for n, (_, tokens, page) in enumerate(rows)]
        for node, (parent, *_) in zip(nodes, rows, strict=True):
            node.parent = None if parent is None else nodes[parent]
        self._start(ranks, nodes)

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        """The least recently used first; a node comes after its children."""
        return iter(sorted(self._nodes.values(), key=lambda node: node.last_use))

    def follow(self, ledger: object, references: Sequence[int]) -> None:
        """Follow the references of a ledger from now on. references: the number of each page."""
        self.ledger, self.unused, self._queue = None, [0] * len(self.unused), []
        for node in self._nodes.values():
            node.is_used, node.users, node.queued_as = references[node.page] > 1, 0, -1
        for node in self:
            node.users += node.is_used
            if not node.users:
                self._offer(node, 1)
            elif node.parent is not None:
                node.parent.users += 1
        self.ledger = ledger

    def set_used(self, page: int, is_used: bool) -> None:
        """Note whether a sequence uses a page; without effect for a page that is not in the index."""
        node = self._by_page.get(page)
        if node is None or node.is_used == is_used:
            return
        ledger, self.ledger = self.ledger, None
        node.is_used = is_used
        self._change_users(node, 1 if is_used else -1)
        self.ledger = ledger

    def add(self, tokens: Sequence[int], pages: Sequence[int], references: MutableSequence[int]) -> None:
        """Index the full pages of a sequence, which uses them.

        Args:
            tokens: the token ids of the sequence from its start.
            pages: its pages. A negative entry, an evicted page, ends what can be indexed, and so does a page that is
                indexed with other tokens.
            references: the number of each page; each that was not indexed before gets one more.
        """
        ledger, self.ledger = self.ledger, None
        parent: Node | None = None
        for page_tokens, page in zip(self._page_tokens(tokens), pages, strict=False):
            if page < 0:
                break
            node = self._nodes.get((parent, page_tokens))
            if node is None:
                if page in self._by_page:
                    break
                node = Node(parent, page_tokens, page, True, 1)
                references[page] += 1
                self._nodes[parent, page_tokens] = self._by_page[page] = node
                self._change_users(parent, 1)
            parent = node
        self._use(parent)
        self.ledger = ledger

    def find(self, tokens: Sequence[int]) -> list[int]:
        """The pages of the longest indexed prefix; `use` them."""
        pages: list[int] = []
        parent: Node | None = None
        for page_tokens in self._page_tokens(tokens):
            node = self._nodes.get((parent, page_tokens))
            if node is None:
                break
            pages.append(node.page)
            parent = node
        return pages

    def use(self, page: int) -> None:
        """Mark a page of the index, and those before it, as used last."""
        ledger, self.ledger = self.ledger, None
        self._use(self._by_page[page])
        self.ledger = ledger

    def select(self, missing: Sequence[int]) -> list[Node]:
        """The least recently used nodes whose removal frees enough pages, as far as there are such; each after its
        children.

        Args:
            missing: how many pages are needed of each rank, which is the page modulo the number of ranks.
        """
        ledger, self.ledger = self.ledger, None
        selected: list[Node] = []
        missing = list(missing)
        while self._queue and max(missing) > 0:
            last_use, node = heapq.heappop(self._queue)
            if node.queued_as != last_use:
                continue
            node.queued_as = -1
            if not node.users:
                selected.append(node)
                missing[node.page % len(missing)] -= 1
        for node in selected:  # they stay until `remove`
            self._enqueue(node)
        self.ledger = ledger
        return selected

    def remove(self, nodes: Sequence[Node]) -> None:
        """Forget these nodes, which have no users, each after its children."""
        ledger, self.ledger = self.ledger, None
        for node in nodes:
            del self._nodes[node.parent, node.tokens], self._by_page[node.page]
            self.unused[node.page % len(self.unused)] -= 1
            node.queued_as = -1
        self.ledger = ledger

    def clear(self) -> list[int]:
        """Forget all; the pages that were indexed."""
        pages = list(self._by_page)
        self._start(len(self.unused), [])
        return pages

    def _change_users(self, node: Node | None, change: int) -> None:
        """Add to the users of a node, and to those of the nodes before it that have their first one or lose their last
        one."""
        while node is not None:
            had_users = node.users > 0
            node.users += change
            if had_users == (node.users > 0):
                return
            self._offer(node, -change)
            node = node.parent

    def _offer(self, node: Node, change: int) -> None:
        """Count a node that can be given up from now on, or no longer."""
        self.unused[node.page % len(self.unused)] += change
        if change > 0:
            self._enqueue(node)

    def _enqueue(self, node: Node) -> None:
        if node.queued_as == node.last_use:
            return
        if len(self._queue) > 2 * len(self._nodes) + 64:  # most entries no longer count
            self._queue = [entry for entry in self._queue if entry[1].queued_as == entry[0]]
            heapq.heapify(self._queue)
        node.queued_as = node.last_use
        heapq.heappush(self._queue, (node.last_use, node))

    def _page_tokens(self, tokens: Sequence[int]) -> Iterator[Tokens]:
        size = self.page_size
        return (tuple(tokens[start : start + size]) for start in range(0, len(tokens) - size + 1, size))

    def _use(self, node: Node | None) -> None:
        """Mark a node and those before it as used last, the first page as the latest of all."""
        chain: list[Node] = []
        while node is not None:
            chain.append(node)
            node = node.parent
        self._uses += len(chain)
        for n, node in enumerate(reversed(chain)):  # a page before those after it, whose number is smaller
            node.last_use = self._uses - n
            if not node.users:
                self._enqueue(node)

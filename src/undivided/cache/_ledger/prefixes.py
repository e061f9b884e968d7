"""An index of full pages by the tokens that they and all pages before them hold, so that a new sequence can share them.

It holds a reference to each of its pages, so that they outlive their sequences, and gives up the least recently used
ones when the pool has no free page.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Tokens = tuple[int, ...]


@dataclass(eq=False, slots=True)
class Node:
    """A page in the index, after its parent's page.

    Args:
        parent: the node of the page before; None for the first page of a sequence.
        tokens: the token ids of the page.
        page: its number.
        children: number of nodes whose parent it is.
    """

    parent: Node | None
    tokens: Tokens
    page: int
    children: int = 0


class PrefixIndex:
    """Pages by their tokens and those before them, the least recently used first."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._nodes: OrderedDict[tuple[Node | None, Tokens], Node] = OrderedDict()

    def __getstate__(self) -> tuple[int, list[tuple[int | None, Tokens, int]]]:
        """The page size, and (number of the parent, tokens, page) of each node, the least recently used first.

        A flat list: `copy` and `pickle` would recurse from every node to its parent, a page at a time.
        """
        numbers = {id(node): n for n, node in enumerate(self)}
        parents = [None if node.parent is None else numbers[id(node.parent)] for node in self]
        return self.page_size, [(n, node.tokens, node.page) for n, node in zip(parents, self, strict=True)]

    def __setstate__(self, state: tuple[int, list[tuple[int | None, Tokens, int]]]) -> None:
        self.page_size, rows = state
        nodes = [Node(None, tokens, page) for _, tokens, page in rows]
        for node, (parent, *_) in zip(nodes, rows, strict=True):
            if parent is not None:
                node.parent = nodes[parent]
                nodes[parent].children += 1
        self._nodes = OrderedDict(((node.parent, node.tokens), node) for node in nodes)

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def add(self, tokens: Sequence[int], pages: Sequence[int]) -> list[int]:
        """Index the full pages of a sequence; the pages that were not indexed before.

        Args:
            tokens: the token ids of the sequence from its start.
            pages: its pages; a negative entry, an evicted page, ends what can be indexed.
        """
        added: list[int] = []
        parent: Node | None = None
        for page_tokens, page in zip(self._page_tokens(tokens), pages, strict=False):
            if page < 0:
                break
            node = self._nodes.get((parent, page_tokens))
            if node is None:
                node = self._nodes[parent, page_tokens] = Node(parent, page_tokens, page)
                if parent is not None:
                    parent.children += 1
                added.append(page)
            parent = node
        self._use(parent)
        return added

    def find(self, tokens: Sequence[int]) -> list[int]:
        """The pages of the longest indexed prefix."""
        pages: list[int] = []
        parent: Node | None = None
        for page_tokens in self._page_tokens(tokens):
            node = self._nodes.get((parent, page_tokens))
            if node is None:
                break
            pages.append(node.page)
            parent = node
        self._use(parent)
        return pages

    def select(self, references: Sequence[int], missing: Sequence[int]) -> list[Node]:
        """The least recently used nodes whose removal frees enough pages, as far as there are such: nothing but the
        index refers to them.

        Args:
            references: number of references of each page.
            missing: how many pages are needed of each rank, which is the page modulo the number of ranks.
        """
        selected: list[Node] = []
        missing = list(missing)
        children: dict[int, int] = {}  # selected children of a node
        for node in self:  # a node comes after its children
            if max(missing) <= 0:
                break
            if references[node.page] == 1 and node.children == children.get(id(node), 0):
                selected.append(node)
                children[id(node.parent)] = children.get(id(node.parent), 0) + 1
                missing[node.page % len(missing)] -= 1
        return selected

    def remove(self, nodes: Sequence[Node]) -> None:
        """Forget these nodes, each after its children."""
        for node in nodes:
            del self._nodes[node.parent, node.tokens]
            if node.parent is not None:
                node.parent.children -= 1

    def droppable(self, references: Sequence[int]) -> list[int]:
        """The pages that can be forgotten: no sequence uses them, nor a page after them."""
        used: set[int] = set()
        for node in self:
            ancestor: Node | None = node if references[node.page] > 1 else None
            while ancestor is not None and id(ancestor) not in used:
                used.add(id(ancestor))
                ancestor = ancestor.parent
        return [node.page for node in self if id(node) not in used]

    def _page_tokens(self, tokens: Sequence[int]) -> Iterator[Tokens]:
        size = self.page_size
        return (tuple(tokens[start : start + size]) for start in range(0, len(tokens) - size + 1, size))

    def _use(self, node: Node | None) -> None:
        """Mark a node and those before it as used last, the first page as the latest of all."""
        while node is not None:
            self._nodes.move_to_end((node.parent, node.tokens))
            node = node.parent

"""Random appends, truncations, forks and frees of a cache, against plain lists of tensors."""

from __future__ import annotations

from collections import Counter

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from token_lists import POISON, joined, parted
from torch import Tensor

import undivided
from undivided import InputError, KVCache, PagedKVCache, masks

BATCH, MAX_LEN, PAGES, PAGE_SIZE = 3, 14, 9, 4
KV_HEADS, DIM, VALUE_DIM = 1, 2, 3

SEQUENCES = st.integers(0, BATCH - 1)
MASKS = {
    "causal": masks.causal(),
    "window": masks.window(3, 0),
    "chunks": masks.chunks(3) & masks.causal(),
    "everything": masks.window(None, None),
}


class CacheMachine(RuleBasedStateMachine):
    """`self.held`: the keys and the values of each sequence, [n, heads, size], kept by appending to lists."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = 0  # appended so far; each token has a number of its own
        self.held: list[tuple[Tensor, Tensor]] = []

    @initialize(paged=st.booleans(), layout=st.sampled_from(["bshd", "sbhd", "bhsd", "thd"]))
    def start(self, paged: bool, layout: str) -> None:
        sizes = {"value_dim": VALUE_DIM, "dtype": torch.float32, "layout": layout}
        self.cache: KVCache | PagedKVCache
        if paged:
            self.cache = PagedKVCache(PAGES, PAGE_SIZE, KV_HEADS, DIM, batch=BATCH, **sizes)
        else:
            self.cache = KVCache(BATCH, MAX_LEN, KV_HEADS, DIM, **sizes)
        self.cache._storage.k.fill_(POISON)
        self.cache._storage.v.fill_(POISON)
        self.held = [self.new(0)] * BATCH

    def new(self, count: int) -> tuple[Tensor, Tensor]:
        """Keys and values of new tokens, different from all earlier ones."""
        at = torch.arange(self.tokens, self.tokens + count, dtype=torch.float32).view(count, 1, 1)
        self.tokens += count
        return torch.sin(at + torch.arange(DIM)), torch.cos(at + torch.arange(VALUE_DIM))

    @rule(counts=st.lists(st.integers(0, 6), min_size=BATCH, max_size=BATCH), padding=st.integers(0, 2))
    def append(self, counts: list[int], padding: int) -> None:
        self.put(counts, max(counts) + padding, True)

    @rule(count=st.integers(0, 6))
    def append_as_many_to_each(self, count: int) -> None:
        self.put([count] * BATCH, count, self.cache.layout == "thd")

    def put(self, counts: list[int], length: int, with_lengths: bool) -> None:
        new = [self.new(count) for count in counts]
        k, v = (joined([tokens[n] for tokens in new], self.cache.layout, length) for n in range(2))
        before, fits = self.seen(), self.may_fit(counts)
        try:
            self.cache.append(k, v, lengths=counts if with_lengths else None)
        except InputError:
            assert not self.surely_fits(counts)
            assert self.seen() == before
            return
        assert fits
        self.held = [(torch.cat([a, c]), torch.cat([b, d])) for (a, b), (c, d) in zip(self.held, new, strict=True)]

    def seen(self) -> object:
        cache = self.cache
        return cache.lengths, isinstance(cache, PagedKVCache) and (cache.block_table.tolist(), cache.free_pages)

    def surely_fits(self, counts: list[int]) -> bool:
        """Whether the tokens fit even if every growing sequence copies its last page."""
        if isinstance(self.cache, KVCache):
            return self.may_fit(counts)
        needed = sum(self.grown(n, count) + (count > 0) for n, count in enumerate(counts))
        return needed <= self.cache.free_pages

    def may_fit(self, counts: list[int]) -> bool:
        if isinstance(self.cache, KVCache):
            return all(len(k) + count <= MAX_LEN for (k, _), count in zip(self.held, counts, strict=True))
        return sum(self.grown(n, count) for n, count in enumerate(counts)) <= self.cache.free_pages

    def grown(self, sequence: int, count: int) -> int:
        length = len(self.held[sequence][0])
        return -(-(length + count) // PAGE_SIZE) - -(-length // PAGE_SIZE)

    @rule(parts=st.lists(st.floats(0, 1), min_size=BATCH, max_size=BATCH))
    def truncate(self, parts: list[float]) -> None:
        lengths = [round(part * len(k)) for part, (k, _) in zip(parts, self.held, strict=True)]
        self.cache.truncate(lengths)
        self.held = [(k[:n], v[:n]) for n, (k, v) in zip(lengths, self.held, strict=True)]

    @rule(src=SEQUENCES, dst=SEQUENCES)
    def fork(self, src: int, dst: int) -> None:
        self.cache.fork(src, dst)
        self.held[dst] = self.held[src]

    @rule(order=st.lists(SEQUENCES, min_size=BATCH, max_size=BATCH))
    def fork_all_at_once(self, order: list[int]) -> None:
        self.cache.fork(order, list(range(BATCH)))
        self.held = [self.held[n] for n in order]

    @rule(i=SEQUENCES)
    def free(self, i: int) -> None:
        self.cache.free(i)
        self.held[i] = self.held[i][0][:0], self.held[i][1][:0]

    @precondition(lambda self: any(len(k) for k, _ in self.held))
    @rule(name=st.sampled_from(sorted(MASKS)), data=st.data())
    def attend(self, name: str, data: st.DataObject) -> None:
        counts = [data.draw(st.integers(0, min(len(k), 4))) for k, _ in self.held]
        queries = [torch.randn(count, 2 * KV_HEADS, DIM) for count in counts]
        layout = self.cache.layout
        out = self.cache.attend(joined(queries, layout), MASKS[name], q_lengths=counts)
        for got, q, (k, v) in zip(parted(out, layout, counts), queries, self.held, strict=True):
            before = torch.zeros(len(k) - len(q), *q.shape[1:])
            whole = torch.cat([before, q]).unsqueeze(0)
            want = undivided.attention(whole, k[None], v[None], layout="bshd", mask=MASKS[name], backend="reference")
            torch.testing.assert_close(got, want[0, len(before) :])

    @invariant()
    def holds_what_was_put_there(self) -> None:
        if not self.held:
            return
        assert self.cache.lengths == tuple(len(k) for k, _ in self.held)
        storage = self.cache._storage
        for n, (k, v) in enumerate(self.held):
            pages = self.cache.block_table[n] if isinstance(self.cache, PagedKVCache) else torch.tensor([n])
            assert torch.equal(storage.k[pages].flatten(0, 1)[: len(k)], k)
            assert torch.equal(storage.v[pages].flatten(0, 1)[: len(v)], v)

    @invariant()
    def counts_its_pages(self) -> None:
        """A page is free, or in as many sequences as its reference count; a sequence has no unneeded page."""
        if not self.held or not isinstance(self.cache, PagedKVCache):
            return
        ledger = self.cache._ledger
        used = Counter(page for pages in ledger.tables for page in pages)
        assert [used[page] for page in range(PAGES)] == list(ledger.references)
        assert sorted(ledger.unused[0]) == [page for page in range(PAGES) if not used[page]]
        assert [len(pages) for pages in ledger.tables] == [-(-len(k) // PAGE_SIZE) for k, _ in self.held]

    def teardown(self) -> None:
        if self.held and isinstance(self.cache, PagedKVCache):
            for n in range(BATCH):
                self.cache.free(n)
            assert self.cache.free_pages == PAGES


def test_a_cache_is_a_list_of_tensors() -> None:
    how = settings(max_examples=80, stateful_step_count=25, deadline=None, derandomize=True, database=None)
    run_state_machine_as_test(CacheMachine, settings=how)  # type: ignore[no-untyped-call]

"""Random programs of operations on a `ContextPagedKVCache`, each compared with a `PagedKVCache` of one process.

    python tests/support/caches/cache_programs.py --programs 300 --seed 0

The program of a seed fixes ranks, page size, layout and format, then draws operations: append, attend, fork, truncate,
free, remember, match, keep and evict, also with arguments that are refused. After each, lengths and errors of the two
caches agree, a refused operation has changed nothing, and outputs agree. Memory that holds no token is NaN.
"""

from __future__ import annotations

import argparse
import random
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from token_lists import POISON, joined, parted
from torch import Tensor

import undivided
from undivided import InputError, PagedKVCache, masks
from undivided.context_parallel import ContextPagedKVCache, simulate

BATCH, KV_HEADS, MAX_LEN, VOCABULARY, STEPS = 3, 2, 40, 2, 30
WINDOW = masks.window(5, 0) | masks.sinks(3)
MASKS = {
    "causal": None,
    "window": WINDOW,
    "narrower": masks.window(3, 0) | masks.sinks(1),
    "every": masks.window(None, None),
    "chunks": masks.chunks(5) & masks.causal(align="bottom_right"),
}
Outcome = tuple[object, str]
"""What an operation returned, and its error."""


class Program:
    """One rank's run of a program."""

    def __init__(self, seed: int, group: Any) -> None:
        self.rng = rng = random.Random(seed)
        self.draws = torch.Generator().manual_seed(seed)
        page_size, layout = rng.choice([1, 2, 3, 5]), rng.choice(["bshd", "sbhd", "bhsd", "thd"])
        quantize = rng.choice([None, None, "int8", "fp8_e4m3", "int4"])
        self.dim = 32 if quantize == "int4" else 8
        pages = rng.choice([6, 10, 60])  # of each rank; the first two are too few for long sequences
        sizes: dict[str, Any] = {"batch": BATCH, "dtype": torch.float32, "layout": layout, "quantize": quantize}
        context = undivided.ContextParallel(group, check=rng.random() < 0.5)
        self.cache = ContextPagedKVCache(context, pages, page_size, KV_HEADS, self.dim, **sizes)
        self.alone = PagedKVCache(2000, page_size, KV_HEADS, self.dim, **sizes)
        table = torch.Generator().manual_seed(seed + 1)
        # keys of a token follow from the token and its position, so that equal prefixes have equal keys
        self.k, self.v = torch.randn(2, MAX_LEN, VOCABULARY, KV_HEADS, self.dim, generator=table)
        for cache in (self.cache, self.alone):
            for pool in (cache.k, cache.v) if quantize is None else (cache.k_scale, cache.v_scale):
                assert pool is not None
                pool.fill_(POISON)
        self.tokens: list[list[int]] = [[] for _ in range(BATCH)]
        self.appended: list[int] | None = None
        self.evicting = rng.random() < 0.4
        self.done: Counter[str] = Counter()

    def run(self) -> tuple[Counter[str], int]:
        """The operations that had an effect, and the digest of the ledger, the same on every rank."""
        operations = [self.append, self.append, self.append_and_keep, self.attend, self.fork, self.truncate]
        operations += [self.free, self.remember, self.match] + [self.evict] * (2 * self.evicting)
        for _ in range(STEPS):
            operation = self.rng.choice(operations)
            name = operation.__name__
            if operation():
                self.done[name] += 1
            self.check()
        return self.done, self.cache._ledger.digest()

    def both(self, call: Callable[[Any], object]) -> Outcome | None:
        """The outcome of a call of both caches; None if it was refused, or did not fit into the pages of a rank."""
        before = self.state()
        try:
            found = call(self.cache)
        except InputError as error:
            assert self.state() == before, "a refused request changes nothing"
            self.done["refused"] += 1
            if "free pages" not in (text := str(error)):
                with pytest.raises(InputError, match=f"^{re.escape(text)}$"):
                    call(self.alone)
            return None
        return found, str(call(self.alone))

    def state(self) -> object:
        """What a refused request must not change."""
        ledger = self.cache._ledger
        tables = [list(pages) for pages in ledger.tables]
        return ledger.lengths, tables, list(ledger.evicted), self.cache.held, sum(self.cache.free_pages)

    def new_tokens(self) -> tuple[list[list[int]], list[Tensor]]:
        """Ids of new tokens of each sequence, and their keys and values in the cache's layout."""
        counts = [self.rng.choice([0, 1, 1, 2, 7]) for _ in range(BATCH)]
        lengths = self.cache.lengths
        counts = [min(count, MAX_LEN - length) for count, length in zip(counts, lengths, strict=True)]
        ids = [[self.rng.randrange(VOCABULARY) for _ in range(count)] for count in counts]
        tensors = []
        for table in (self.k, self.v):
            rows = [table[n : n + len(new)] for n, new in zip(lengths, ids, strict=True)]
            own = [row[range(len(new)), new] for row, new in zip(rows, ids, strict=True)]
            tensors.append(joined(own, self.cache.layout))
        return ids, tensors

    def append(self) -> bool:
        """New tokens, which may not fit."""
        ids, (k, v) = self.new_tokens()
        counts = [len(new) for new in ids]
        if self.both(lambda cache: cache.append(k, v, counts)) is None:
            return False
        self.tokens = [old + new for old, new in zip(self.tokens, ids, strict=True)]
        self.appended = counts
        return True

    def append_and_keep(self) -> bool:
        """New tokens of which some stay; their keys keep the positions that they were appended at."""
        if not self.append():
            return False
        assert self.appended is not None
        indices = [sorted(self.rng.sample(range(n), self.rng.randint(0, n))) for n in self.appended]
        if self.rng.random() < 0.1:
            indices[0] = [7]
        if self.both(lambda cache: cache.keep(indices)) is None:
            return False
        for n, (count, kept) in enumerate(zip(self.appended, indices, strict=True)):
            ids = self.tokens[n]
            first = len(ids) - count
            self.tokens[n] = ids[:first] + [ids[first + index] for index in kept]
            if kept != list(range(len(kept))):  # their keys are not those of their new positions
                self.tokens[n] = [-1]
        return True

    def attend(self) -> bool:
        """Queries of the last tokens under a random mask, which may show what was evicted."""
        lengths, layout = self.cache.lengths, self.cache.layout
        if not any(lengths):
            return False
        counts = [min(length, self.rng.choice([0, 1, 1, 3])) for length in lengths]
        rows = [torch.randn(count, 2 * KV_HEADS, self.dim, generator=self.draws) for count in counts]
        q, name = joined(rows, layout), self.rng.choice(list(MASKS))
        options: dict[str, Any] = {"sinks": torch.randn(2 * KV_HEADS, generator=self.draws)}
        if self.rng.random() < 0.3:
            options["alibi_slopes"] = undivided.alibi_slopes(2 * KV_HEADS)
        outs: list[Tensor] = []

        def call(cache: Any) -> None:
            outs.append(cache.attend(q, MASKS[name], counts, **options))

        if self.both(call) is None:
            return False
        for found, expected in zip(*(parted(out, layout, counts) for out in outs), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        return True

    def fork(self) -> bool:
        """Some sequences become copies of others, all at once."""
        src = [self.rng.randrange(BATCH) for _ in range(2)]
        dst = [self.rng.randrange(BATCH) for _ in range(2)]
        if self.both(lambda cache: cache.fork(src, dst)) is None:
            return False
        before = list(self.tokens)
        for source, target in zip(src, dst, strict=True):
            self.tokens[target] = list(before[source])
        return True

    def truncate(self) -> bool:
        """Fewer tokens, possibly fewer than the last eviction allows."""
        lengths = [max(0, n - self.rng.choice([0, 0, 1, 2, 9])) for n in self.cache.lengths]
        if self.both(lambda cache: cache.truncate(lengths)) is None:
            return False
        self.tokens = [ids[:n] for ids, n in zip(self.tokens, lengths, strict=True)]
        return True

    def free(self) -> bool:
        """A sequence ends."""
        i = self.rng.randrange(BATCH)
        self.both(lambda cache: cache.free(i))
        self.tokens[i] = []
        return True

    def remember(self) -> bool:
        """The tokens of a sequence are indexed, unless `keep` moved some of them."""
        i = self.rng.randrange(BATCH)
        ids = self.tokens[i]
        return -1 not in ids and self.both(lambda cache: cache.remember(ids, i)) is not None

    def match(self) -> bool:
        """A sequence starts with indexed pages; those that a rank gave up are missing."""
        i, source = self.rng.randrange(BATCH), self.rng.randrange(BATCH)
        prompt = [*self.tokens[source], self.rng.randrange(VOCABULARY)]
        if -1 in prompt:
            return False
        if self.rng.random() < 0.7:
            self.both(lambda cache: cache.free(i))
            self.tokens[i] = []
        outcome = self.both(lambda cache: cache.match(prompt, i))
        if outcome is None:
            return False
        found, alone = int(str(outcome[0])), int(outcome[1])
        assert found <= alone
        assert found % self.cache.page_size == 0
        if found < alone:
            self.alone.truncate([found if n == i else length for n, length in enumerate(self.alone.lengths)])
        self.tokens[i] = prompt[:found]
        return found > 0

    def evict(self) -> bool:
        """Pages that the window has left are released."""
        outcome = self.both(lambda cache: cache.evict(WINDOW))
        assert outcome is not None
        assert str(outcome[0]) == outcome[1]
        return outcome[1] != "0"

    def check(self) -> None:
        """Raises AssertionError unless the caches agree, and every page is free or referred to."""
        cache, ledger = self.cache, self.cache._ledger
        assert cache.lengths == self.alone.lengths
        used = Counter(page for table in ledger.tables for page in table if page >= 0)
        used.update(node.page for node in ledger.prefixes)
        assert [used[page] for page in range(len(ledger.references))] == list(ledger.references)
        for rank, unused in enumerate(ledger.unused):
            assert sorted(unused) == [n for n in range(rank, len(ledger.references), ledger.ranks) if not used[n]]
        for table in ledger.tables:
            assert all(page < 0 or page % ledger.ranks == place % ledger.ranks for place, page in enumerate(table))


def run_program(seed: int) -> Counter[str]:
    """The operations of the program that had an effect, on each of its ranks."""
    ranks = simulate(2 + seed % 3, lambda group: Program(seed, group).run())
    assert all(found == ranks[0] for found in ranks), "ranks differ"
    return ranks[0][0]


def main() -> None:
    """Runs as many programs as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    done: Counter[str] = Counter()
    for seed in range(options.seed, options.seed + options.programs):
        try:
            done += run_program(seed)
        except BaseException:
            print(f"seed {seed}", flush=True)
            raise
    print(dict(done))


if __name__ == "__main__":
    main()

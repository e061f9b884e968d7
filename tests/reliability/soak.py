"""Long runs: memory must not grow, bounded caches stay bounded, and no page of a paged cache is lost.

    python tests/reliability/soak.py calls --count 100000
    python tests/reliability/soak.py serving --seconds 7200

`calls` makes calls of mixed shapes, masks, dtypes and layouts, with gradients, and compares the memory of the process
after a warm-up with that at the end. `serving` appends, attends, forks, truncates, keeps, frees, remembers and matches
sequences of a paged cache at random, and compares it with plain lists of tensors after every step. The exit status is 1
if a check fails.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

import undivided
from undivided import PagedKVCache, masks
from undivided.masks.normal_form import ranges
from undivided.request import normalise
from undivided.selection import decision, policy

BOUNDED: dict[str, tuple[Callable[[], Mapping[object, object]], int]] = {
    "forms of masks without tensors": (lambda: ranges._shared_forms, ranges.SHARED_FORMS),
    "problems of requests": (lambda: normalise._problems, normalise._problems.most),
    "decisions": (lambda: decision._decisions, decision._decisions.most),
    "decisions of classes of problems": (lambda: decision._by_class, decision._by_class.most),
    "policies": (lambda: policy._policies, policy._policies.most),
}
"""Maps of the process that live as long as it, and the largest number of entries of each."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GROWTH_LIMIT = 64 << 20
"""Bytes by which the process may grow after the warm-up: what the bounded maps and the allocator hold at most."""


def resident_bytes() -> int:
    """The memory of the process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def random_call(rng: random.Random) -> None:
    """One call of `attention`, with gradients in a third of the cases."""
    dtype, layout = rng.choice(DTYPES), rng.choice(["bshd", "bhsd", "sbhd", "thd"])
    heads = rng.choice([1, 2, 4])
    group, dim = rng.choice([1, 2]), rng.choice([8, 16, 64])
    q_len, batch = rng.randint(1, 48), rng.randint(1, 3)
    kv_len = q_len + rng.randint(0, 40)
    if layout == "thd":
        cut = rng.randint(0, q_len)
        kv_len = q_len
        mask = masks.documents([0, cut, q_len]) & masks.causal()
    else:
        mask = rng.choice([
            lambda: masks.causal("bottom_right"),
            lambda: masks.window(rng.randint(1, 30), 0, "bottom_right"),
            lambda: masks.lengths([rng.randint(1, kv_len) for _ in range(batch)]),
            lambda: masks.dense(torch.rand(q_len, kv_len) < 0.5),
            lambda: masks.blocks(q_len, 16, [[0, rng.randrange(-(-kv_len // 16))]]),
            lambda: masks.FULL,
        ])()  # fmt: skip
    sizes = {
        "bshd": lambda s, h: (batch, s, h, dim), "bhsd": lambda s, h: (batch, h, s, dim),
        "sbhd": lambda s, h: (s, batch, h, dim), "thd": lambda s, h: (s, h, dim),
    }[layout]  # fmt: skip
    train = rng.random() < 1 / 3
    q = torch.randn(sizes(q_len, heads * group), dtype=dtype, requires_grad=train)
    k, v = (torch.randn(sizes(kv_len, heads), dtype=dtype, requires_grad=train) for _ in range(2))
    softcap = rng.choice([None, None, 5.0 + rng.random()])
    out = undivided.attention(q, k, v, layout=layout, mask=mask, softcap=softcap)
    if train:
        torch.autograd.grad(out.float().sum(), (q, k, v))


def check_bounds() -> None:
    """Raises AssertionError if a bounded map is larger than its bound."""
    for name, (read, limit) in BOUNDED.items():
        assert len(read()) <= limit, f"{name}: {len(read())} entries, limit {limit}"


def soak_calls(count: int, seed: int) -> None:
    """`count` calls; raises AssertionError if memory or a map grows beyond its bound."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    begin, after_warm_up = time.monotonic(), 0
    for n in range(1, count + 1):
        random_call(rng)
        if n == count // 5:
            gc.collect()
            after_warm_up = resident_bytes()
        if n % max(count // 10, 1) == 0:
            check_bounds()
            maps = ", ".join(f"{len(read())}/{limit}" for read, limit in BOUNDED.values())
            print(f"{n} calls, {time.monotonic() - begin:.0f} s, {resident_bytes() >> 20} MiB, maps {maps}", flush=True)
    gc.collect()
    growth = resident_bytes() - after_warm_up
    print(f"growth after the first fifth: {growth / 2**20:.1f} MiB", flush=True)
    assert growth < GROWTH_LIMIT, growth


class Model:
    """A paged cache and the same sequences as lists of tokens; a key is a function of the tokens before it."""

    BATCH, PAGES, PAGE_SIZE, KV_HEADS, HEADS, DIM = 6, 48, 4, 2, 4, 8

    def __init__(self, seed: int, quantize: str | None = None) -> None:
        self.rng = random.Random(seed)
        self.cache = PagedKVCache(
            self.PAGES,
            self.PAGE_SIZE,
            self.KV_HEADS,
            self.DIM,
            batch=self.BATCH,
            dtype=torch.float32,
            quantize=quantize,
        )
        self.tokens: list[list[int]] = [[] for _ in range(self.BATCH)]
        self.exact = quantize is None
        self.done: Counter[str] = Counter()

    def keys(self, tokens: list[int], start: int) -> tuple[Tensor, Tensor]:
        """The keys and values of tokens[start:], ``[n, heads, size]``: they depend on all earlier tokens."""
        sums = torch.tensor(tokens, dtype=torch.float64).cumsum(0)[start:]
        phase = sums[:, None, None] + torch.arange(self.KV_HEADS)[:, None] + 0.1 * torch.arange(self.DIM)
        return phase.sin().float(), phase.cos().float()

    def step(self) -> None:
        """One random operation, and the checks."""
        operation = self.rng.choice(["append"] * 4 + ["attend", "fork", "truncate", "keep", "free", "match"])
        getattr(self, operation)()
        self.done[operation] += 1
        self.check()

    def append(self, branching: bool = False) -> list[int]:
        """New tokens for some sequences; frees others first if the pool is full."""
        counts = [self.rng.choice([0, 0, 1, 1, 1, self.rng.randint(2, 11)]) for _ in range(self.BATCH)]
        if branching:
            counts = [min(count, 4) for count in counts]
        room = self.PAGES // self.BATCH * self.PAGE_SIZE - self.PAGE_SIZE
        for i, count in enumerate(counts):
            if len(self.tokens[i]) + count > room:
                self.cache.free(i)
                self.tokens[i] = []
        k, v = (torch.zeros(self.BATCH, max(counts), self.KV_HEADS, self.DIM) for _ in range(2))
        for i, count in enumerate(counts):
            self.tokens[i] += [self.rng.randrange(3) for _ in range(count)]
            if count:
                k[i, :count], v[i, :count] = self.keys(self.tokens[i], len(self.tokens[i]) - count)
        self.cache.append(k, v, lengths=counts)
        return counts

    def attend(self) -> None:
        """Compares the attention of one query per sequence with that over lists."""
        q = torch.randn(self.BATCH, 1, self.HEADS, self.DIM)
        counts = [int(bool(tokens)) for tokens in self.tokens]
        out = self.cache.attend(q, q_lengths=counts)
        for i, tokens in enumerate(self.tokens):
            if tokens:
                k, v = self.keys(tokens, 0)
                expected = undivided.attention(q[i : i + 1], k[None], v[None], layout="bshd")
                close = 1e-5 if self.exact else 0.2
                torch.testing.assert_close(out[i : i + 1], expected, rtol=close, atol=close)

    def fork(self) -> None:
        """One sequence becomes a copy of another."""
        src, dst = self.rng.sample(range(self.BATCH), 2)
        self.cache.fork(src, dst)
        self.tokens[dst] = list(self.tokens[src])

    def truncate(self) -> None:
        """Drops the last tokens of some sequences."""
        lengths = [len(tokens) - self.rng.randint(0, min(len(tokens), 3)) for tokens in self.tokens]
        self.cache.truncate(lengths)
        self.tokens = [tokens[:n] for tokens, n in zip(self.tokens, lengths, strict=True)]

    def keep(self) -> None:
        """Appends, then keeps a prefix of what was appended, as after a rejected draft."""
        counts = self.append(branching=True)
        kept = [self.rng.randint(0, count) for count in counts]
        self.cache.keep([list(range(n)) for n in kept])
        dropped = [count - n for count, n in zip(counts, kept, strict=True)]
        self.tokens = [tokens[: len(tokens) - n] for tokens, n in zip(self.tokens, dropped, strict=True)]

    def free(self) -> None:
        """Remembers a sequence in half of the cases, then ends it."""
        i = self.rng.randrange(self.BATCH)
        if self.rng.random() < 0.5 and self.tokens[i]:
            self.cache.remember(self.tokens[i], i)
        self.cache.free(i)
        self.tokens[i] = []

    def match(self) -> None:
        """Starts a sequence with the pages that hold its first tokens."""
        i, source = self.rng.sample(range(self.BATCH), 2)
        prompt = [*self.tokens[source], self.rng.randrange(3)]
        self.cache.free(i)
        found = self.cache.match(prompt, i)
        assert found <= len(prompt) - 1
        self.tokens[i] = prompt[:found]

    def check(self) -> None:
        """Raises AssertionError unless the cache holds the tokens, and every page is free or referred to."""
        cache, ledger = self.cache, self.cache._ledger
        assert cache.lengths == tuple(len(tokens) for tokens in self.tokens)
        used = Counter(page for table in ledger.tables for page in table)
        used.update(node.page for node in ledger.prefixes)
        assert [used[page] for page in range(self.PAGES)] == list(ledger.references)
        assert sorted(ledger.unused[0]) == [page for page in range(self.PAGES) if not used[page]]
        if self.exact:
            i = self.rng.randrange(self.BATCH)
            pages, (k, v) = cache.block_table[i].long(), self.keys(self.tokens[i], 0)
            assert torch.equal(cache._storage.k[pages].flatten(0, 1)[: len(k)], k)
            assert torch.equal(cache._storage.v[pages].flatten(0, 1)[: len(v)], v)

    def end(self) -> None:
        """Ends every sequence; only remembered pages remain in use."""
        for i in range(self.BATCH):
            self.cache.free(i)
        assert self.cache.free_pages == self.PAGES


def soak_serving(seconds: float, seed: int) -> None:
    """Steps of two caches, one of them quantised; raises AssertionError at the first difference."""
    torch.manual_seed(seed)
    models = [Model(seed), Model(seed + 1, quantize="int8")]
    begin = printed = time.monotonic()
    while (now := time.monotonic()) - begin < seconds:
        for model in models:
            model.step()
        if now - printed > max(seconds / 10, 1):
            printed = now
            steps = sum(model.done.total() for model in models)
            print(f"{steps} steps, {now - begin:.0f} s, {resident_bytes() >> 20} MiB", flush=True)
    for model in models:
        model.end()
        print(dict(model.done), flush=True)


def main() -> int:
    """Runs what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", choices=["calls", "serving"])
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=7200.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.run == "calls":
        soak_calls(options.count, options.seed)
    else:
        soak_serving(options.seconds, options.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())

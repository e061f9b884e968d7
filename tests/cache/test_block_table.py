"""The block table of a cache after every change of its sequences, and what `BlockTable` makes anew."""

import random

import pytest
import torch

import undivided
from undivided import masks
from undivided.cache._block_table import BlockTable

CPU = torch.device("cpu")


def expected(lists: list[list[int]]) -> torch.Tensor:
    table = torch.zeros(len(lists), max(1, *map(len, lists)), dtype=torch.int32)
    for row, pages in zip(table, lists, strict=True):
        for place, page in enumerate(pages):
            row[place] = max(page, 0)
    return table


@pytest.mark.parametrize("seed", range(5))
def test_the_table_follows_every_change_of_a_cache(seed: int) -> None:
    choose, batch = random.Random(seed), 6
    cache = undivided.PagedKVCache(96, page_size=4, kv_heads=1, head_dim=8, batch=batch, dtype=torch.float32)
    streaming = masks.window(7, 0) | masks.sinks(2)
    earlier: list[tuple[torch.Tensor, torch.Tensor]] = []
    for _ in range(60):
        i, action = choose.randrange(batch), choose.choice([*["append"] * 3, "fork", "free", "cut", "evict"])
        if action == "append":
            counts = [choose.choice([0, 1, 1, 5]) if length < 40 else 0 for length in cache.lengths]
            tokens = torch.randn(batch, 5, 1, 8)
            cache.append(tokens, tokens, lengths=counts)
        elif action == "fork":
            cache.fork(i, choose.randrange(batch))
        elif action == "free":
            cache.free(i)
        elif action == "cut" and not any(cache._ledger.evicted):
            cache.truncate([max(length - 3, 0) for length in cache.lengths])
        elif action == "evict":
            cache.evict(streaming)
        table = cache.block_table
        assert torch.equal(table, expected(cache._ledger.tables)), action
        assert table.dtype == torch.int32
        earlier.append((table, table.clone()))
    assert all(torch.equal(table, copy) for table, copy in earlier)


def test_only_lists_that_were_replaced_are_read() -> None:
    table, lists = BlockTable(), [[n, n + 1] for n in range(10)]
    first = table.of(lists, CPU)
    assert table.of(list(lists), CPU) is first
    lists[3].append(99)  # against the rule, so that a reading would be seen
    lists[4] = [7, 8, 9]
    second = table.of(lists, CPU)
    assert second[3].tolist() == [3, 4, 0]
    assert second[4].tolist() == [7, 8, 9]
    assert first[4].tolist() == [4, 5]


def test_tables_of_other_sizes_are_made_anew() -> None:
    table = BlockTable()
    assert table.of([], CPU).shape == (0, 1)
    assert table.of([[], []], CPU).tolist() == [[0], [0]]
    assert table.of([[4, -1, 5], [], [2]], CPU).tolist() == [[4, 0, 5], [0, 0, 0], [2, 0, 0]]
    wide = table.of([[1] * 5] * 4, CPU)
    assert wide.shape == (4, 5)
    short = [[1], [2], [3], [4]]
    assert table.of(short, CPU).tolist() == [[1], [2], [3], [4]]
    assert table.of([*short[:3], [5, 6]], CPU).tolist() == [[1, 0], [2, 0], [3, 0], [5, 6]]


def test_a_table_has_a_version_counter_in_inference_mode() -> None:
    table, lists = BlockTable(), [[n] for n in range(4)]
    with torch.inference_mode():
        assert not table.of(lists, CPU).is_inference()
        assert not table.of([*lists[:3], [9, 9]], CPU).is_inference()

"""The block table of a cache after every change of its sequences, and what `BlockTable` makes anew."""

import random

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import undivided
from undivided import InferenceParams, masks
from undivided.cache._block_table import BlockTable
from undivided.cache._ledger.pages import Pages

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


class Tables:
    """A `BlockTable` that is given lists as a new state each time."""

    def __init__(self) -> None:
        self.table, self.state = BlockTable(), 0

    def of(self, lists: list[list[int]]) -> torch.Tensor:
        self.state += 1
        return self.table.updated(self.state, lambda: list(lists), CPU)


def test_only_lists_that_were_replaced_are_read() -> None:
    tables, lists = Tables(), [[n, n + 1] for n in range(10)]
    first = tables.of(lists)
    assert tables.of(lists) is first
    lists[3].append(99)  # against the rule, so that a reading would be seen
    lists[4] = [7, 8, 9]
    second = tables.of(lists)
    assert second[3].tolist() == [3, 4, 0]
    assert second[4].tolist() == [7, 8, 9]
    assert first[4].tolist() == [4, 5]


def test_the_lists_of_other_sequences_stay_if_one_keeps_tokens_or_ends() -> None:
    params = InferenceParams(3, 64, 1, 8, torch.float32, is_paged=True, page_size=4)
    params.pre_step({"a": 9, "b": 9, "c": 9})
    (a, *_), ledger = params._batch.ledger.tables, params._batch.ledger
    params.keep({"b": [0, 4]})
    params.pre_step({"a": 0, "b": 1})
    assert params._batch.ledger is not ledger
    assert params._batch.ledger.tables[0] is a


def test_lists_of_a_known_state_are_not_read() -> None:
    tables = Tables()
    first = tables.of([[1, 2], [3]])
    assert tables.table.updated(tables.state, lambda: pytest.fail("read again"), CPU) is first
    meta = torch.device("meta")
    assert tables.table.updated(tables.state, lambda: [[1, 2], [3]], meta).device == meta


def test_tables_of_other_sizes_are_made_anew() -> None:
    tables = Tables()
    assert tables.of([]).shape == (0, 1)
    assert tables.of([[], []]).tolist() == [[0], [0]]
    assert tables.of([[4, -1, 5], [], [2]]).tolist() == [[4, 0, 5], [0, 0, 0], [2, 0, 0]]
    wide = tables.of([[1] * 5] * 4)
    assert wide.shape == (4, 5)
    short = [[1], [2], [3], [4]]
    assert tables.of(short).tolist() == [[1], [2], [3], [4]]
    assert tables.of([*short[:3], [5, 6]]).tolist() == [[1, 0], [2, 0], [3, 0], [5, 6]]


def test_a_table_has_a_version_counter_in_inference_mode() -> None:
    tables, lists = Tables(), [[n] for n in range(4)]
    with torch.inference_mode():
        assert not tables.of(lists).is_inference()
        assert not tables.of([*lists[:3], [9, 9]]).is_inference()


def test_a_fake_table_does_not_outlive_its_mode() -> None:
    cache = undivided.PagedKVCache(8, page_size=4, kv_heads=1, head_dim=8, batch=2, dtype=torch.float32)
    tokens, q = torch.randn(2, 5, 1, 8), torch.randn(2, 1, 1, 8)
    cache.append(tokens, tokens)
    for _ in range(2):  # without a table before, and with one
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert isinstance(cache.attend(torch.randn(2, 1, 1, 8)), FakeTensor)
        with FakeTensorMode():
            assert cache.block_table.shape == (2, 2)
        assert type(cache.attend(q)) is torch.Tensor
        assert cache.block_table.tolist() == [[0, 1], [2, 3]]


def test_rows_of_ranks_that_did_not_change_are_the_same_lists() -> None:
    """BlockTable finds the rows that changed by their lists; those of each rank were new ones in every step."""
    ledger = Pages(40, 4, 3, ranks=2)
    ledger.commit(ledger.plan((9, 9, 9)))
    before = [ledger.pages_on_rank(rank, n) for rank in range(2) for n in range(3)]
    ledger.commit(ledger.plan((4, 0, 0)))
    after = [ledger.copy().pages_on_rank(rank, n) for rank in range(2) for n in range(3)]
    assert [a is b for a, b in zip(before, after, strict=True)] == [False, True, True] * 2
    assert after[0] == [page // 2 for page in ledger.tables[0][0::2]]
    assert after[3] == [page // 2 for page in ledger.tables[0][1::2]]

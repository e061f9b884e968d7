"""keep: the accepted path of a draft tree becomes the last tokens of a sequence."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest
import torch
from torch import Tensor

import undivided
from undivided import InputError, masks
from undivided.cache._storage import Storage

BATCH, KV_HEADS, DIM = 3, 2, 8


def caches() -> dict[str, undivided.KVCache | undivided.PagedKVCache]:
    options = {"kv_heads": KV_HEADS, "head_dim": DIM, "dtype": torch.float32}
    return {
        "dense": undivided.KVCache(BATCH, 64, **options),
        "paged": undivided.PagedKVCache(num_pages=40, page_size=4, batch=BATCH, **options),
    }


def tokens(count: int) -> Tensor:
    return torch.randn(BATCH, count, KV_HEADS, DIM)


@pytest.mark.parametrize("kind", ["dense", "paged"])
def test_kept_tokens_are_those_of_a_list(kind: str) -> None:
    cache, rng = caches()[kind], random.Random(0)
    lists: list[list[Tensor]] = [[] for _ in range(BATCH)]
    for _ in range(12):
        count = rng.randint(1, 7)
        counts = [rng.randint(0, count) for _ in range(BATCH)]
        new = tokens(count)
        cache.append(new, -new, counts)
        indices = [sorted(rng.sample(range(n), rng.randint(0, n))) for n in counts]
        cache.keep(indices)
        for b, chosen in enumerate(indices):
            lists[b] += [new[b, index] for index in chosen]
        if max(cache.lengths) > 30:
            cache.truncate([0] * BATCH)
            lists = [[] for _ in range(BATCH)]
        assert cache.lengths == tuple(map(len, lists))
        q = torch.randn(BATCH, 1, 4, DIM)
        out = cache.attend(q, masks.window(None, None), [1] * BATCH)
        for b, rows in enumerate(lists):
            if rows:
                k = torch.stack(rows)[None]
                alone = undivided.attention(q[b : b + 1], k, -k, layout="bshd")
                assert torch.allclose(out[b], alone[0], atol=1e-5)


@pytest.mark.parametrize("kind", ["dense", "paged"])
def test_the_first_tokens_of_a_chain_are_not_moved(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[object] = []
    move = Storage.prepared_move
    monkeypatch.setattr(Storage, "prepared_move", lambda storage, *rows: moved.append(rows[0]) or move(storage, *rows))
    cache = caches()[kind]
    cache.append(tokens(3), tokens(3))
    for chain, expected in (([0, 1], []), ([0, 2], [2])):
        cache.keep([chain, [], []])
        assert moved.pop() == expected
        cache.truncate([0, 0, 0])
        cache.append(tokens(3), tokens(3))


def test_a_forked_page_is_copied_before_it_is_changed() -> None:
    cache = caches()["paged"]
    new = tokens(6)
    cache.append(new, new)
    cache.fork(0, 1)
    cache.append(tokens(3), tokens(3))
    cache.fork([0], [2])
    before = cache.attend(torch.ones(BATCH, 1, 4, DIM), masks.window(None, None), [1] * BATCH)[2]
    draft = tokens(5)
    cache.append(draft, draft, [5, 0, 0])
    cache.keep([[1, 4], [], []])
    after = cache.attend(torch.ones(BATCH, 1, 4, DIM), masks.window(None, None), [1] * BATCH)[2]
    assert torch.equal(before, after)
    assert cache.lengths == (11, 9, 9)


def test_inference_params_keep_by_sequence() -> None:
    params = undivided.InferenceParams(
        max_batch_size=2, max_sequence_length=32, num_heads_kv=KV_HEADS, head_dim_k=DIM, dtype=torch.float32
    )
    params.pre_step(OrderedDict(a=4, b=3))
    new = torch.randn(2, 4, KV_HEADS, DIM)
    for layer in (1, 2):
        params.step(layer, new * layer, new, "bshd")
    params.keep({"a": [0, 3]})
    assert dict(params.sequences) == {"a": 2, "b": 3}
    params.pre_step(OrderedDict(a=1, b=1))
    k, *_ = params.step(2, new[:, :1] * 2, new[:, :1], "bshd")
    assert torch.equal(k[0, :3], 2 * torch.stack([new[0, 0], new[0, 3], new[0, 0]]))
    with pytest.raises(InputError, match=r"indices\['a'\]\[0\] must be one of the 1 tokens"):
        params.keep({"a": [1]})
    with pytest.raises(InputError, match="indices must be the id of a sequence"):
        params.keep({"c": []})


@pytest.mark.parametrize("kind", ["dense", "paged"])
def test_wrong_indices_are_refused_and_change_nothing(kind: str) -> None:
    cache = caches()[kind]
    with pytest.raises(InputError, match="indices must be given directly after append"):
        cache.keep([[]] * BATCH)
    cache.append(tokens(3), tokens(3))
    for wrong, message in [
        ([[0]], "one list for each of the 3 sequences"),
        ([[0], [0], [3]], r"indices\[2\]\[0\] must be one of the 3 tokens"),
        ([[1, 1], [], []], r"indices\[0\] must ascend"),
        ([[0], [-1], []], r"indices\[1\]\[0\] must be at least 0"),
        ([[0], "01", []], r"indices\[1\] must be a list of ints"),
        (3, "indices must be a list of lists of ints, got int"),
        (torch.tensor(3), "indices must be a list of lists of ints, got Tensor"),
    ]:
        with pytest.raises(InputError, match=message):
            cache.keep(wrong)  # type: ignore[arg-type]
    assert cache.lengths == (3, 3, 3)
    cache.keep([[0, 1, 2], torch.tensor([2]), []])
    assert cache.lengths == (3, 1, 0)


def test_a_freed_sequence_leaves_its_place_and_pages() -> None:
    params = undivided.InferenceParams(
        max_batch_size=1, max_sequence_length=32, num_heads_kv=KV_HEADS, head_dim_k=DIM, dtype=torch.float32,
        is_paged=True, page_size=4, total_num_pages=4,
    )  # fmt: skip
    params.pre_step(OrderedDict(a=9))
    with pytest.raises(InputError, match="at most max_batch_size=1"):
        params.match([1, 2], "b")
    with pytest.raises(InputError, match="seq_id must be the id of a sequence"):
        params.free("b")
    params.free("a")
    assert params.match([1, 2], "b") == 0
    params.pre_step(OrderedDict(b=16))
    assert dict(params.sequences) == {"b": 16}


def test_tokens_whose_pages_were_evicted_are_refused() -> None:
    options = {"kv_heads": KV_HEADS, "head_dim": DIM, "dtype": torch.float32}
    cache = undivided.PagedKVCache(num_pages=40, page_size=4, batch=BATCH, **options)
    new, indices = tokens(20), [list(range(1, 20))] * BATCH
    for length in (20, 40):  # all tokens of the sequences, and the last ones
        cache.append(new, new)
        cache.evict(masks.window(3, 0))
        before = cache.block_table.clone(), cache.free_pages
        with pytest.raises(InputError, match="indices must be given before pages are evicted"):
            cache.keep(indices)
        assert cache.lengths == (length,) * BATCH
        assert torch.equal(cache.block_table, before[0])
        assert cache.free_pages == before[1]
    cache.keep([range(20)] * BATCH)  # drops nothing
    assert torch.equal(cache.block_table, before[0])
    cache.append(new[:, :2], new[:, :2])
    cache.keep([[1]] * BATCH)
    assert cache.lengths == (41,) * BATCH


def test_tokens_of_params_whose_pages_were_evicted_are_refused() -> None:
    params = undivided.InferenceParams(1, 64, KV_HEADS, DIM, torch.float32, is_paged=True, page_size=4)
    params.pre_step({"a": 20})
    params.step(1, *[tokens(20)[:1]] * 2)
    params.evict(masks.window(3, 0))
    with pytest.raises(InputError, match="inference_params must have a step"):
        params.keep({"a": [0]})

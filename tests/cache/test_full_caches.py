"""A cache without room says so by a type of its own, and is unchanged; the number of free pages is readable."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict

import pytest
import torch

from undivided import CacheFullError, ContextParallel, InferenceParams, InputError, KVCache, PagedKVCache
from undivided.context_parallel import simulate


def params(**options: object) -> InferenceParams:
    sizes = {"is_paged": True, "page_size": 4, "total_num_pages": 5}
    return InferenceParams(2, 64, 1, 8, torch.float32, **(sizes | options))  # type: ignore[arg-type]


def test_a_step_without_room_raises_an_error_of_its_own_and_the_next_one_works() -> None:
    cache = params()
    cache.pre_step(OrderedDict(a=8, b=8))
    assert cache.free_pages == 1
    with pytest.raises(CacheFullError, match=r"step_dict must fit into the 1 free pages of 5"):
        cache.pre_step(OrderedDict(a=1, b=1))
    with pytest.raises(CacheFullError, match="step_dict must hold at most max_batch_size=2 sequences"):
        cache.pre_step(OrderedDict(a=0, b=0, c=1))
    with pytest.raises(CacheFullError, match="must be one of at most max_batch_size=2 sequences"):
        cache.fork("a", "c")
    assert dict(cache.sequences) == {"a": 8, "b": 8}
    cache.pre_step(OrderedDict(a=1))  # b has ended
    assert cache.free_pages == 2


def test_a_sequence_that_is_too_long_by_itself_does_not_make_the_cache_full() -> None:
    cache, new = KVCache(1, 4, 1, 8, dtype=torch.float32), torch.zeros(1, 5, 1, 8)
    for call in (lambda: params().pre_step({"a": 65}), lambda: cache.append(new, new)):
        with pytest.raises(InputError) as caught:
            call()
        assert not isinstance(caught.value, CacheFullError)


def test_an_append_without_pages_raises_an_error_that_can_be_copied_and_combined() -> None:
    cache, new = PagedKVCache(2, 4, 1, 8, batch=2, dtype=torch.float32), torch.zeros(2, 6, 1, 8)
    with pytest.raises(CacheFullError, match="k must fit into the 2 free pages of 2") as caught:
        cache.append(new, new)
    error = caught.value
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (type(other), str(other), other.hint) == (CacheFullError, str(error), error.hint)
    combined = error.as_also(TypeError)
    for other in (combined, pickle.loads(pickle.dumps(combined))):
        assert isinstance(other, CacheFullError)
        assert isinstance(other, TypeError)
        assert str(other) == str(error)


def test_the_number_of_free_pages_is_in_the_text_of_paged_caches_only() -> None:
    cache = params()
    cache.pre_step({"a": 9})
    assert "page_size=4, free_pages=2, sequences" in repr(cache)
    rows = params(is_paged=False, page_size=None, total_num_pages=None)
    assert rows.free_pages is None
    assert "free_pages" not in repr(rows)


def test_over_ranks_the_number_is_that_of_the_rank_with_the_fewest() -> None:
    def on_rank(group: object) -> int | None:
        cache = params(context_parallel=ContextParallel(group))
        cache.pre_step({"a": 4 * 3})  # three pages: two on rank 0
        return cache.free_pages

    assert simulate(2, on_rank) == [3, 3]

"""Copies of caches and unpickled ones: of any length, and made in inference mode too."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from undivided import InferenceParams, KVCache, PagedKVCache

HEADS, KV_HEADS, DIM = 4, 2, 32
SIZES: dict[str, Any] = {"kv_heads": KV_HEADS, "head_dim": DIM}


def saved_and_loaded(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "save": saved_and_loaded,
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_an_index_of_a_long_prompt_is_copied(copied: Callable[[Any], Any]) -> None:
    prompt, other = list(range(1500)), [*range(700), -1, -2]
    cache = PagedKVCache(3000, 1, 1, 2, batch=2, dtype=torch.float32)
    new = torch.randn(1, 1500, 1, 2).expand(2, -1, -1, -1)
    cache.append(new, new, lengths=[1500, 702])
    cache.remember(other, 1)
    cache.remember(prompt, 0)
    cache.free(0)
    cache.free(1)
    twin = copied(cache)
    nodes = [
        [(node.tokens, node.page, node.parent and node.parent.page) for node in c._ledger.prefixes]
        for c in (cache, twin)
    ]
    assert nodes[0] == nodes[1]
    assert [parent for *_, parent in nodes[1]].count(None) == 1
    twin.append(new, new, lengths=[1499, 0])  # one page more than are free: the last one of `other`
    assert twin.match([*other, 0], 1) == 701
    assert cache.match([*other, 0], 1) == 702


def test_a_copied_index_is_independent() -> None:
    cache = PagedKVCache(8, 4, **SIZES, batch=1, dtype=torch.float32)
    new = torch.randn(1, 12, KV_HEADS, DIM)
    cache.append(new, new)
    cache.remember(list(range(8)), 0)
    twin = copy.deepcopy(cache)
    twin.remember(list(range(12)), 0)
    assert (len(cache._ledger.prefixes), len(twin._ledger.prefixes)) == (2, 3)


def tokens(dtype: torch.dtype, count: int = 1) -> list[Tensor]:
    """q, k and v, [1, count, H, D]."""
    return [torch.randn(1, count, heads, DIM, dtype=dtype) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def contiguous(dtype: torch.dtype, quantize: str | None) -> KVCache:
    return KVCache(1, 64, **SIZES, dtype=dtype, quantize=quantize)


def paged(dtype: torch.dtype, quantize: str | None) -> PagedKVCache:
    return PagedKVCache(16, 4, **SIZES, batch=1, dtype=dtype, quantize=quantize)


def one_step(cache: KVCache | PagedKVCache, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    cache.append(k, v)
    return cache.attend(q)


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize(
    ("dtype", "quantize"), [(torch.float32, None), (torch.float64, None), (torch.float32, "int8")], ids=str
)
@pytest.mark.parametrize("new_cache", [contiguous, paged])
def test_a_cache_that_is_copied_in_inference_mode_goes_on(
    new_cache: Callable[..., Any], dtype: torch.dtype, quantize: str | None, copied: Callable[[Any], Any]
) -> None:
    cache = new_cache(dtype, quantize)
    one_step(cache, *tokens(dtype, 5))
    with torch.inference_mode():
        twin = copied(cache)
        new = tokens(dtype)
        torch.testing.assert_close(one_step(twin, *new), one_step(cache, *new))
    assert not any(part.is_inference() for part in twin._storage._all_pools)
    new = tokens(dtype)
    torch.testing.assert_close(one_step(twin, *new), one_step(cache, *new))


@pytest.mark.parametrize("pages", [{}, {"is_paged": True, "page_size": 4}], ids=["contiguous", "paged"])
def test_params_that_are_copied_in_inference_mode_go_on(pages: dict[str, Any]) -> None:
    params = InferenceParams(2, 64, KV_HEADS, DIM, torch.float32, **pages)
    params.pre_step({"a": 5})
    params.attend(1, *tokens(torch.float32, 5))
    with torch.inference_mode():
        twin = copy.deepcopy(params)
    for _ in range(2):
        new = tokens(torch.float32)
        params.pre_step({"a": 1})
        twin.pre_step({"a": 1})
        torch.testing.assert_close(twin.attend(1, *new), params.attend(1, *new))


def test_a_block_table_without_version_counter_is_read() -> None:
    cache = paged(torch.float32, None)
    q, *_ = new = tokens(torch.float32, 5)
    expected = one_step(cache, *new)
    with torch.inference_mode():
        cache._table._tensor = cache.block_table.clone()
    torch.testing.assert_close(cache.attend(q), expected)

"""Calls of caches that run out of memory: nothing has changed, so that the caller can free memory and repeat them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import undivided

KV_HEADS, DIM = 2, 16


def new_tokens(batch: int, count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, count, KV_HEADS, DIM), torch.randn(batch, count, KV_HEADS, DIM)


def fail_once(monkeypatch: pytest.MonkeyPatch, name: str, call: int) -> None:
    """The call with this number, from 1, of a method of tensors is out of memory."""
    method, count = getattr(Tensor, name), 0

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count == call:
            raise torch.OutOfMemoryError("simulated")
        return method(*arguments, **options)

    monkeypatch.setattr(Tensor, name, counted)


def repeated(operation: Callable[[], None], name: str, failing: int) -> None:
    """Run an operation that fails at a call of a method of tensors, then repeat it."""
    with pytest.MonkeyPatch.context() as patch:
        fail_once(patch, name, failing)
        with pytest.raises(torch.OutOfMemoryError):
            operation()
    operation()


@pytest.mark.parametrize("failing", [1, 2, 3, 4, None])
@pytest.mark.parametrize("paged", [False, True])
def test_keep_can_be_repeated_after_a_failure_in_any_layer(paged: bool, failing: int | None) -> None:
    torch.manual_seed(0)
    params = undivided.InferenceParams(
        2, 32, KV_HEADS, DIM, torch.float32, is_paged=paged, page_size=4 if paged else None
    )
    for count in (5, 4):  # a prompt and a draft tree
        params.pre_step(OrderedDict(a=count))
        for layer in (1, 2):
            params.attend(layer, torch.randn(1, count, 4, DIM), *new_tokens(1, count))
    before = {layer: [t.clone() for t in params.convert_paged_to_nonpaged(layer)] for layer in (1, 2)}
    if failing is None:
        params.keep({"a": [1, 3]})
    else:
        repeated(lambda: params.keep({"a": [1, 3]}), "index_select", failing)
    params.pre_step(OrderedDict(a=0))
    assert params.sequences == {"a": 7}
    for layer, tensors in before.items():
        for after, tensor in zip(params.convert_paged_to_nonpaged(layer), tensors, strict=True):
            assert torch.equal(after[:, :7], tensor[:, [0, 1, 2, 3, 4, 6, 8]])


@pytest.mark.parametrize(("quantize", "failing"), [*((None, n) for n in (1, 2)), *(("int8", n) for n in (1, 2, 3, 4))])
def test_a_fork_that_swaps_sequences_can_be_repeated_after_a_failure_in_any_pool(
    quantize: str | None, failing: int
) -> None:
    cache = undivided.KVCache(2, 32, kv_heads=KV_HEADS, head_dim=DIM, dtype=torch.float32, quantize=quantize)
    cache.append(*new_tokens(2, 5))
    before = [pool[:, :5].clone() for pool in cache._storage._all_pools]
    repeated(lambda: cache.fork([1, 0], [0, 1]), "__getitem__", failing)
    for pool, values in zip(cache._storage._all_pools, before, strict=True):
        assert torch.equal(pool[:, :5], values.flip(0))


def test_keep_that_is_interrupted_while_it_writes_drops_the_tokens_and_cannot_be_repeated() -> None:
    cache = undivided.KVCache(1, 32, kv_heads=KV_HEADS, head_dim=DIM, dtype=torch.float32)
    cache.append(*new_tokens(1, 5))
    cache.append(*new_tokens(1, 4))
    first = cache.k[0, :6].clone()
    with pytest.MonkeyPatch.context() as patch:
        fail_once(patch, "index_copy_", 2)
        with pytest.raises(torch.OutOfMemoryError):
            cache.keep([[0, 3]])
    assert cache.lengths == (6,)  # token 0 stays in its place; token 3 moves
    assert torch.equal(cache.k[0, :6], first)
    with pytest.raises(undivided.InputError, match="another change"):
        cache.keep([[0, 3]])

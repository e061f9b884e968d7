"""Masks and what is derived from them go with the last reference, not at the next garbage collection: their memory,
which may be that of a GPU, would stay in use until then."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import undivided
from undivided import masks
from undivided.masks import Mask, _kept

DIM, HEADS = 16, 4
OFFSETS = [0, 3, 9]


@pytest.fixture(autouse=True)
def no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


MASKS: dict[str, Callable[[], Mask]] = {
    "dense": lambda: masks.dense(torch.rand(9, 9) < 0.5),
    "lengths": lambda: masks.lengths([5, 9]),
    "lengths and a window": lambda: masks.lengths([5, 9], [4, 9]) & masks.window(3, 0, align="bottom_right"),
    "prefix": lambda: masks.causal() | masks.prefix(torch.tensor([2, 3])),
    "predicate": lambda: masks.predicate(lambda b, h, q, k: q + k > 4),
    "tree": lambda: masks.tree([-1, 0, 0, 1, 1, 2, 2, 3, 3]),
    "blocks": lambda: masks.blocks(3, 3, torch.tensor([[[[0, 1], [1, 2], [2, -1]]]])),
}


def is_gone(mask: weakref.ref[Mask]) -> bool:
    _kept._recent.clear()  # small masks that layers may build again
    return mask() is None


def dense_call(mask: Mask) -> None:
    x = torch.randn(2, 9, HEADS, DIM, requires_grad=True)
    undivided.attention(x, x, x, layout="bshd", mask=mask).sum().backward()
    with torch.no_grad():
        for backend in ("native", "reference", "torch_flash"):
            try:
                undivided.attention(x, x, x, layout="bshd", mask=mask, backend=backend)
            except undivided.NoBackendError:
                continue
        undivided.explain(x, x, x, layout="bshd", mask=mask)


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_of_dense_calls_goes_with_its_last_reference(name: str) -> None:
    mask = MASKS[name]()
    dense_call(mask)
    gone = weakref.ref(mask)
    del mask
    assert is_gone(gone)


@pytest.mark.parametrize("options", [{}, {"alibi_slopes": torch.rand(HEADS)}, {"dropout_p": 0.5}, {"return_lse": True}])
def test_a_mask_of_packed_calls_goes_with_its_last_reference(options: dict[str, object]) -> None:
    mask = masks.documents(OFFSETS) & masks.causal()
    x = torch.randn(9, HEADS, DIM, requires_grad=True)
    result = undivided.attention(x, x, x, layout="thd", mask=mask, **options)  # type: ignore[call-overload]
    out: Tensor = result[0] if isinstance(result, tuple) else result
    out.sum().backward()
    gone = weakref.ref(mask)
    del mask, result, out
    assert is_gone(gone)


@pytest.mark.parametrize("layout", ["bshd", "thd"])
def test_a_mask_of_paged_calls_goes_with_its_last_reference(layout: str) -> None:
    pages = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)
    k, v = torch.randn(2, 4, 8, HEADS, DIM)
    if layout == "bshd":
        mask, q = masks.lengths([5, 9]), torch.randn(2, 1, HEADS, DIM)
    else:
        mask, q = masks.documents([0, 1, 2], [0, 5, 14]), torch.randn(2, HEADS, DIM)
    undivided.attention(q, k, v, layout=layout, mask=mask, pages=pages)  # type: ignore[call-overload]
    gone = weakref.ref(mask)
    del mask
    assert is_gone(gone)


@pytest.mark.parametrize("paged", [False, True])
def test_a_mask_of_a_cache_goes_with_its_last_reference(paged: bool) -> None:
    cache: undivided.KVCache | undivided.PagedKVCache
    if paged:
        cache = undivided.PagedKVCache(8, 4, HEADS, DIM, batch=2, dtype=torch.float32)
    else:
        cache = undivided.KVCache(2, 16, HEADS, DIM, dtype=torch.float32)
    mask = masks.window(3, 0, align="bottom_right") & masks.prefix(torch.tensor([20, 20]))
    for length in (5, 1, 1):
        q, k, v = torch.randn(3, 2, length, HEADS, DIM)
        cache.append(k, v)
        for _ in range(2):
            cache.attend(q, mask=mask)
    gone = weakref.ref(mask)
    del mask
    assert is_gone(gone)

"""What steps with caches prepare once and use again: block tables, their checks, and masks of packed sequences."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor

import undivided
from undivided import InferenceParams, InputError, KVCache, PagedKVCache, masks
from undivided.masks import Mask

HEADS, KV_HEADS, DIM = 4, 2, 8
LENGTHS = (13, 7, 10)
SLOPES = torch.tensor([[0.5, 0.25, 0.125, 1.0], [0.1, 0.2, 0.3, 0.4], [0.0, 1.0, 0.5, 0.25]])
KINDS: dict[str, tuple[Mask | None, dict[str, Any]]] = {
    "causal": (None, {}),
    "window": (masks.window(3, 0), {}),
    "window and sinks": (masks.window(3, 0) | masks.sinks(2), {"sinks": torch.ones(HEADS)}),
    "every key": (masks.window(None, None), {}),
    "chunks": (masks.chunks(4) & masks.causal(), {"softcap": 2.0}),
    "slopes per sequence": (None, {"alibi_slopes": SLOPES}),
    "a prefix per sequence": (masks.causal() & masks.prefix(torch.tensor([3, 7, 1])), {}),
}


def tokens(counts: tuple[int, ...]) -> list[Tensor]:
    """q, k and v of all sequences, [T, H, D]."""
    return [torch.randn(sum(counts), heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def packed_cache(kind: str) -> KVCache | PagedKVCache:
    sizes: dict[str, Any] = {"dtype": torch.float32, "layout": "thd"}
    if kind == "contiguous":
        return KVCache(3, 16, KV_HEADS, DIM, **sizes)
    return PagedKVCache(12, 4, KV_HEADS, DIM, batch=3, **sizes)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("kind", ["contiguous", "paged"])
def test_packed_sequences_with_equally_many_queries_equal_calls_of_their_own(kind: str, count: int, name: str) -> None:
    mask, options = KINDS[name]
    cache = packed_cache(kind)
    _, k, v = tokens(LENGTHS)
    cache.append(k, v, lengths=LENGTHS)
    q = torch.randn(3 * count, HEADS, DIM)
    out, lse = cache.attend(q, mask, [count] * 3, return_lse=True, **options)
    assert (out.shape, lse.shape) == ((3 * count, HEADS, DIM), (HEADS, 3 * count))
    for n, (keys, values) in enumerate(zip(k.split(LENGTHS), v.split(LENGTHS), strict=True)):
        own = masks.causal("bottom_right") if mask is None else mask & masks.window(None, None, align="bottom_right")
        if name == "a prefix per sequence":
            own = masks.causal("bottom_right") & masks.prefix((3, 7, 1)[n])
        more = dict(options, alibi_slopes=SLOPES[n]) if "alibi_slopes" in options else options
        rows = slice(n * count, (n + 1) * count)
        want, want_lse = undivided.attention(
            q[None, rows],
            keys[None],
            values[None],
            layout="bshd",
            mask=own,
            return_lse=True,
            backend="reference",
            **more,
        )
        torch.testing.assert_close(out[rows], want[0])
        torch.testing.assert_close(lse[:, rows], want_lse[0])


def test_packed_queries_refuse_a_bias_also_if_they_are_equally_many() -> None:
    cache = packed_cache("paged")
    _, k, v = tokens(LENGTHS)
    cache.append(k, v, lengths=LENGTHS)
    with pytest.raises(InputError, match="bias must be None in layout 'thd'"):
        cache.attend(torch.randn(3, HEADS, DIM), q_lengths=[1, 1, 1], bias=torch.zeros(1, 1, 1, 13))


def test_a_step_without_new_pages_keeps_its_block_table() -> None:
    params = InferenceParams(3, 32, KV_HEADS, DIM, torch.float32, is_paged=True, page_size=8, device="cpu")

    def table(**counts: int) -> Tensor:
        params.pre_step(OrderedDict(counts))
        return params.page_table

    first = table(a=5, b=6)
    assert table(a=1, b=1) is first
    grown = table(a=1, b=2)
    assert grown is not first
    assert grown.tolist() == [[0, 0], [1, 2]]
    assert table(b=1, a=0).tolist() == [[1, 2], [0, 0]]
    params.fork("b", "c")
    assert table(b=0, a=0, c=0).tolist() == [[1, 2], [0, 0], [1, 2]]
    assert table(c=1).tolist() == [[1, 2]]
    params.reset()
    assert table(x=1).tolist() == [[0]]


def test_a_block_table_that_changed_in_place_is_checked_again() -> None:
    q, pool = torch.randn(1, 1, HEADS, DIM), torch.randn(4, 8, KV_HEADS, DIM)
    table = torch.tensor([[2, 3]], dtype=torch.int32)

    def attend(length: int) -> Tensor:
        return undivided.attention(q, pool, pool, layout="bshd", pages=table, mask=masks.lengths([length]))

    attend(9)
    attend(10)
    table[0, 1] = 4
    attend(8)  # the second page is not read
    with pytest.raises(InputError, match=r"pages must number pages of the pool, 0 to 3, .* got 4"):
        attend(11)
    table[0, 1] = 1
    attend(11)
    smaller = pool[:2]
    with pytest.raises(InputError, match=r"0 to 1, .* got 2"):
        undivided.attention(q, smaller, smaller, layout="bshd", pages=table, mask=masks.lengths([9]))

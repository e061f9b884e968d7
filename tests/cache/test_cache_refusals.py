"""What a cache refuses; it is unchanged afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cache_steps import DIM, HEADS, KINDS, KV_HEADS, VALUE_DIM, Cache, Kind, new_cache, new_sequences, step
from torch import Tensor

from undivided import InputError, KVCache, PagedKVCache, masks


def state(cache: Cache) -> tuple[object, ...]:
    """The observable state of a cache."""
    pages: tuple[object, ...] = ()
    if isinstance(cache, PagedKVCache):
        ledger = cache._ledger
        pages = cache.block_table.tolist(), list(ledger.references), list(ledger.unused[0])
    k, v = (t.nan_to_num(1e9).tolist() for t in (cache._storage.k, cache._storage.v))
    return cache.lengths, cache._last, pages, k, v


def tokens_of(batch: int, length: int, heads: int = KV_HEADS, dim: int = DIM, **options: Any) -> Tensor:
    return torch.randn(batch, length, heads, dim, **options)


K, V = tokens_of(3, 2), tokens_of(3, 2, dim=VALUE_DIM)


Q = torch.randn(3, 2, HEADS, DIM)


REFUSED: dict[str, tuple[Callable[[Cache], object], str]] = {
    "no-room": (lambda c: c.append(tokens_of(3, 40), tokens_of(3, 40, dim=VALUE_DIM)), "k must (leave|fit)"),
    "no-room-for-the-last": (
        lambda c: c.append(tokens_of(3, 40), tokens_of(3, 40, dim=VALUE_DIM), lengths=[1, 2, 40]),
        "k must (leave|fit)",
    ),
    "k-not-a-tensor": (lambda c: c.append([1], V), "k must be a torch.Tensor"),
    "k-of-other-heads": (
        lambda c: c.append(tokens_of(3, 2, heads=4), V),
        r"k must have shape \[3, new, 2, 8\] in 'bshd'",
    ),
    "k-heads-first": (
        lambda c: c.append(tokens_of(3, 5).transpose(1, 2), V),
        "k must have shape(.|\n)*this shape would fit layout='bhsd'",
    ),
    "k-of-more-heads": (
        lambda c: c.append(tokens_of(3, 3, heads=5), V),
        r"k must have shape(.|\n)*HINT: kv_heads=5 at the construction of the cache$",
    ),
    "k-of-another-batch": (lambda c: c.append(tokens_of(2, 2), V), "k must have shape"),
    "k-flat": (lambda c: c.append(K.flatten(2), V), "k must have shape"),
    "v-of-k's-size": (lambda c: c.append(K, K), r"v must have shape \[3, new, 2, 5\]"),
    "v-longer": (lambda c: c.append(K, tokens_of(3, 3, dim=VALUE_DIM)), r"v must have the length of k \(2\), got 3"),
    "another-dtype": (lambda c: c.append(K.double(), V.double()), r"k must have the dtype of the cache"),
    "another-device": (
        lambda c: c.append(K.to("meta"), V),
        r"k must be on the device of the cache(.|\n)*k.to\('cpu'\)",
    ),
    "a-batch-of-vmap": (
        lambda c: torch.vmap(lambda k: (c.append(k, V), k)[1])(torch.stack([K, K])),
        r"k must be one tensor, not a batch of torch\.vmap(.|\n)*outside of vmap; attend\(\) may be called in it",
    ),
    "gradients": (lambda c: c.append(K.clone().requires_grad_(), V), "k must not require a gradient"),
    "lengths-too-few": (lambda c: c.append(K, V, lengths=[1, 2]), "lengths must have an entry for each of the 3"),
    "lengths-cumulative": (
        lambda c: c.append(K, V, lengths=[0, 1, 3, 5]),
        r"each of the 3 sequences, got 4 entries\n  HINT: lengths\.diff\(\), if these are cumulative",
    ),
    "lengths-too-long": (
        lambda c: c.append(K, V, lengths=[1, 3, 2]),
        r"lengths must be at most the new tokens in k \(2\)",
    ),
    "lengths-negative": (lambda c: c.append(K, V, lengths=[1, -1, 2]), r"lengths\[1\] must be at least 0"),
    "lengths-floats": (lambda c: c.append(K, V, lengths=torch.rand(3)), "lengths must be a list of 3 ints"),
    "lengths-a-number": (lambda c: c.append(K, V, lengths=2), "lengths must be a list of 3 ints"),
    "q-of-another-batch": (lambda c: c.attend(Q[:2]), "q must have the batch size of the cache"),
    "q-of-another-size": (lambda c: c.attend(Q[..., :4]), "q must have the head size of the cache"),
    "q-flat": (lambda c: c.attend(Q.flatten(2)), "q must have 4 axes"),
    "q-unlike-the-last-tokens": (lambda c: c.attend(torch.randn(3, 1, HEADS, DIM)), "q_lengths must be given"),
    "q-of-another-dtype": (
        lambda c: c.attend(Q.double(), q_lengths=[1, 0, 2]),
        r"q must have the dtype of the cache \(torch.float32\), got torch.float64\n  HINT: q.to\(torch.float32\)",
    ),
    "q-of-another-dtype-and-device": (
        lambda c: c.attend(Q.double().to("meta"), q_lengths=[1, 0, 2]),
        "q must have the dtype of the cache",
    ),
    "q_lengths-too-long": (lambda c: c.attend(Q, q_lengths=[1, 2, 3]), "q_lengths must be at most the queries in q"),
    "bias-of-other-keys": (
        lambda c: c.attend(Q, q_lengths=[2] * 3, bias=torch.zeros(1, 1, 2, 8)),
        r"bias must (end with the 7 keys|be broadcastable to .* 7\])",
    ),
    "dense-of-other-keys": (
        lambda c: c.attend(Q, masks.dense(torch.ones(2, 8) > 0), [2] * 3),
        r"mask must (end with the 7 keys|have dense)",
    ),
    "bias-a-number": (lambda c: c.attend(Q, q_lengths=[2] * 3, bias=1.0), "bias must be a torch.Tensor"),
    "mask-a-tensor": (lambda c: c.attend(Q, torch.ones(2, 2) > 0, [2] * 3), "mask must be an undivided.masks.Mask"),
    "mask-with-lengths": (lambda c: c.attend(Q, masks.lengths([1, 2, 3]), [2] * 3), "leave the lengths to the cache"),
    "truncate-up": (lambda c: c.truncate([3, 5, 2]), r"lengths\[1\] must be at most the 4 cached tokens of sequence 1"),
    "truncate-some": (lambda c: c.truncate([3]), "lengths must have an entry"),
    "free-beyond": (lambda c: c.free(3), "i must be a sequence of the cache, 0 to 2, got 3"),
    "fork-beyond": (lambda c: c.fork(0, 3), "dst must be a sequence of the cache"),
    "fork-from-beyond": (lambda c: c.fork(-1, 0), "src must be at least 0"),
    "fork-unequal": (lambda c: c.fork([0, 1], [2]), r"dst must be as many sequences as src \(2\)"),
    "fork-onto-one": (lambda c: c.fork([0, 1], [2, 2]), "dst must name every sequence once"),
    "fork-onto-one-of-a-tensor": (
        lambda c: c.fork(torch.tensor([0, 1]), torch.tensor([2, 2])),
        r"dst must name every sequence once, got \[2, 2\]",
    ),
    "fork-of-floats": (lambda c: c.fork(torch.zeros(2), [0, 1]), "src must be an int, a list of ints, or"),
    "fork-of-a-matrix": (lambda c: c.fork(torch.zeros(1, 2).int(), [0, 1]), "src must be an int, a list of ints"),
    "fork-onto-a-tensor-of-no-axis": (lambda c: c.fork(0, torch.tensor(1)), "dst must be an int(.|\n)*x.item"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("kind", KINDS)
def test_refused_and_nothing_changed(kind: str, case: str) -> None:
    cache = new_cache(kind)
    step(cache, new_sequences((5, 4, 3)), Kind(None))
    cache.fork(0, 2)
    cache.append(
        tokens_of(3, 2), tokens_of(3, 2, dim=VALUE_DIM), lengths=[1, 0, 2]
    )  # one page is shared, one was copied
    before = state(cache)
    call, message = REFUSED[case]
    with pytest.raises(InputError, match=message):
        call(cache)
    assert state(cache) == before
    step(cache, new_sequences((1, 2, 3)), Kind(None))  # the cache still works


PACKED_MASKS = "consist of causal, window, sinks, chunks, prefix, tree, blocks and pages in layout 'thd'"

REFUSED_PACKED: dict[str, tuple[Callable[[Cache], object], str]] = {
    "lengths-missing": (lambda c: c.append(K[0], V[0]), "lengths must be given in layout 'thd'"),
    "lengths-of-fewer-tokens": (
        lambda c: c.append(K[0], V[0], lengths=[1, 0, 0]),
        "lengths must sum to the 2 packed tokens",
    ),
    "a-row-too-many": (lambda c: c.append(K, V, lengths=[1, 1, 0]), r"k must have shape \[tokens, 2, 8\] in 'thd'"),
    "queries-of-no-sequence": (lambda c: c.attend(Q[0, :1]), "q_lengths must sum to the 1 packed tokens"),
    "bias": (lambda c: c.attend(Q[0], bias=torch.zeros(HEADS, 2, 16)), "bias must be None in layout 'thd'"),
    "pairs": (lambda c: c.attend(Q[0], masks.dense(torch.ones(2, 16) > 0)), f"mask must {PACKED_MASKS}"),
    "predicate": (lambda c: c.attend(Q[0], masks.predicate(lambda b, h, q, k: q > k)), f"mask must {PACKED_MASKS}"),
}


@pytest.mark.parametrize("case", REFUSED_PACKED)
@pytest.mark.parametrize("kind", KINDS)
def test_refused_where_packed(kind: str, case: str) -> None:
    cache = new_cache(kind, layout="thd")
    cache.append(K[0], V[0], lengths=[0, 2, 0])
    before = state(cache)
    call, message = REFUSED_PACKED[case]
    with pytest.raises(InputError, match=message):
        call(cache)
    assert state(cache) == before


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("batch", 0),
        ("max_len", 0),
        ("max_len", 2.5),
        ("kv_heads", -1),
        ("head_dim", "8"),
        ("value_dim", 0),
        ("dtype", torch.int8),
        ("dtype", "float32"),
        ("layout", "shbd"),
        ("num_pages", 0),
        ("page_size", True),
    ],
)
def test_invalid_caches_are_refused(argument: str, value: object) -> None:
    sizes: dict[str, Any] = {"kv_heads": 2, "head_dim": 8, "batch": 3, "dtype": torch.float32}
    for kind, own in ((KVCache, {"max_len": 16}), (PagedKVCache, {"num_pages": 4, "page_size": 4})):
        if argument in sizes | own or argument in ("value_dim", "layout"):
            with pytest.raises(InputError, match=f"^{argument} must"):
                kind(**sizes | own | {argument: value})


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_tokens_of_8_bits_are_refused_under_autocast_too(dtype: torch.dtype) -> None:
    cache = PagedKVCache(8, 4, 1, DIM, batch=1, dtype=torch.bfloat16)
    new = torch.ones(1, 2, 1, DIM).to(dtype)
    with (
        torch.autocast("cpu"),
        pytest.raises(InputError, match=r"k must have the dtype of the cache \(torch.bfloat16\)"),
    ):
        cache.append(new, new)
    assert cache.lengths == (0,)


CHANGES: dict[str, Callable[[Cache], object]] = {
    "fork": lambda c: c.fork(0, 1),
    "free": lambda c: c.free(1),
    "truncate": lambda c: c.truncate([4, 4, 3]),
    "keep": lambda c: c.keep([[0], [], [0, 1]]),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_queries_of_padded_tokens_need_their_lengths_after_a_change(
    kind: str, change: Callable[[Cache], object]
) -> None:
    """All rows would count as real, so that the real ones would be too early in their sequence."""
    cache, everything = new_cache(kind), masks.window(None, None)
    cache.append(tokens_of(3, 5), tokens_of(3, 5, dim=VALUE_DIM), lengths=[4, 5, 2])
    cache.append(K, V, lengths=[1, 0, 2])
    change(cache)
    with pytest.raises(InputError, match="q_lengths must be given if the last append had lengths and sequences have"):
        cache.attend(Q, everything)
    cache.attend(Q, everything, q_lengths=[1, 0, 2])
    cache.attend(Q[:, :1], everything)  # queries of other tokens
    cache.append(K, V)
    cache.attend(Q, everything)


def test_positions_of_packed_sequences_have_32_bits() -> None:
    cache = PagedKVCache(2, 2**21, 1, 1, batch=1100, dtype=torch.float16, layout="thd")
    new, counts = torch.ones(3, 1, 1, dtype=torch.float16), [1, 2, *[0] * 1098]
    cache.append(new, new, lengths=counts)
    with pytest.raises(InputError, match="cache must have at most 2147483647 places for tokens in layout 'thd'"):
        cache.attend(new)


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_to_fork_may_be_a_tensor_or_a_range(kind: str) -> None:
    caches = [new_cache(kind) for _ in range(3)]
    for cache, (src, dst) in zip(
        caches, [([1, 0], [0, 1]), (torch.tensor([1, 0]), range(2)), (range(1, -1, -1), (0, 1))], strict=True
    ):
        cache.append(K, V, lengths=[1, 2, 0])
        cache.fork(src, dst)
        assert cache.lengths == (2, 1, 0)

"""Calls of `attend` that run what an earlier call prepared: the layers of a model, each with its own cache.

The memory, the queries and the number of threads may differ; all else that matters makes a new call.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from native_oracle import needs_library
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import undivided
from undivided import masks
from undivided.arguments.layout import Layout
from undivided.backends import reference
from undivided.errors import InputError
from undivided.run import replay

Cache = undivided.KVCache | undivided.PagedKVCache

BATCH, HEADS, KV_HEADS, DIM = 3, 4, 2, 32
KINDS = ("contiguous", "paged", "paged int8", "contiguous int4")
MASKS = {
    "causal": None,
    "window": masks.window(6, 0),
    "sinks": masks.window(6, 0) | masks.sinks(2),
    "chunks": masks.chunks(8) & masks.causal(),
    "every": masks.window(None, None),
}


def cache_of(kind: str, layout: Layout = "bshd", lengths: tuple[int, ...] = (9, 17, 12), seed: int = 0) -> Cache:
    """A cache of random tokens; each sequence has got one at last."""
    words = kind.split()
    shape = {"kv_heads": KV_HEADS, "head_dim": DIM, "batch": BATCH, "dtype": torch.float32, "layout": layout}
    quantize = words[1] if len(words) > 1 else None
    if words[0] == "paged":
        cache: Cache = undivided.PagedKVCache(32, page_size=4, quantize=quantize, **shape)
    else:
        cache = undivided.KVCache(max_len=32, quantize=quantize, **shape)
    torch.manual_seed(seed)
    rows = (sum(lengths),) if layout == "thd" else (BATCH, max(lengths))
    cache.append(torch.randn(*rows, KV_HEADS, DIM), torch.randn(*rows, KV_HEADS, DIM), lengths=lengths)
    append(cache, 1)
    return cache


def append(cache: Cache, count: int) -> None:
    """Append tokens to each sequence."""
    k, v = (queries(count, cache.layout)[..., :KV_HEADS, :] for _ in range(2))
    cache.append(k, v, lengths=[count] * BATCH if cache.layout == "thd" else None)


def queries(count: int, layout: str = "bshd") -> Tensor:
    return torch.randn(BATCH * count, HEADS, DIM) if layout == "thd" else torch.randn(BATCH, count, HEADS, DIM)


def anew(cache: Cache, *arguments: object, **options: object) -> Tensor:
    """The same call by the way that prepares everything: a mode looks on."""
    with Looking():
        return cache.attend(*arguments, **options)


class Looking(TorchDispatchMode):
    """A dispatch mode that changes nothing."""

    def __torch_dispatch__(
        self, function: Callable[..., object], kinds: object, arguments: tuple[object, ...] = (), options: object = None
    ) -> object:
        return function(*arguments, **(options or {}))


@pytest.fixture
def repeats(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The query of each call that ran what another had prepared, or what it had prepared itself."""
    seen: list[Tensor] = []
    run = replay.PreparedCall.run

    def counted(self: replay.PreparedCall, q: Tensor, *others: Tensor | None) -> Tensor | None:
        out = run(self, q, *others)
        if out is not None:
            seen.append(q)
        return out

    monkeypatch.setattr(replay.PreparedCall, "run", counted)
    return seen


@needs_library
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("layout", ["bshd", "thd"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_layer_reads_its_own_cache(kind: str, layout: str, name: str, count: int, repeats: list[Tensor]) -> None:
    layers = [cache_of(kind, layout, seed=seed) for seed in range(3)]
    for _ in range(2):
        for cache in layers:
            append(cache, count)
            q, seen = queries(count, layout), len(repeats)
            out = cache.attend(q, MASKS[name])
            assert len(repeats) == seen + 1
            torch.testing.assert_close(out, anew(cache, q, MASKS[name]), rtol=1e-5, atol=1e-5)
            assert len(repeats) == seen + 1


@needs_library
@pytest.mark.parametrize("kind_of_sinks", [torch.float32, torch.bfloat16, "strided", "parameter"], ids=str)
@pytest.mark.parametrize("name", ["causal", "sinks"])
@pytest.mark.parametrize("layout", ["bshd", "thd"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_layer_reads_its_own_sinks(
    kind: str, layout: str, name: str, kind_of_sinks: object, repeats: list[Tensor]
) -> None:
    layers = [cache_of(kind, layout, seed=seed) for seed in range(3)]
    sinks = [torch.randn(HEADS) * 3 for _ in layers]
    if isinstance(kind_of_sinks, torch.dtype):
        sinks = [one.to(kind_of_sinks) for one in sinks]
    else:
        wrap = torch.nn.Parameter if kind_of_sinks == "parameter" else lambda one: one.repeat_interleave(2)[::2]
        sinks = [wrap(one) for one in sinks]
    with torch.no_grad():
        for _ in range(2):
            for cache, own in zip(layers, sinks, strict=True):
                append(cache, 1)
                q, seen = queries(1, layout), len(repeats)
                out = cache.attend(q, MASKS[name], sinks=own)
                assert len(repeats) == seen + 1
                torch.testing.assert_close(out, anew(cache, q, MASKS[name], sinks=own), rtol=1e-5, atol=1e-5)
                assert (out - anew(cache, q, MASKS[name])).abs().max() > 1e-3


@needs_library
def test_sinks_that_do_not_fit_are_refused_after_others_that_did(repeats: list[Tensor]) -> None:
    cache, q, sinks = cache_of("paged"), queries(1), torch.randn(HEADS)
    cache.attend(q, sinks=sinks)
    for wrong in (torch.randn(HEADS + 1), sinks.tolist(), torch.zeros(HEADS, dtype=torch.int32), sinks.to("meta")):
        with pytest.raises(InputError, match="sinks"):
            cache.attend(q, sinks=wrong)
    sinks.untyped_storage().resize_(0)
    with pytest.raises(InputError, match="memory"):
        cache.attend(q, sinks=sinks)
    assert len(repeats) == 1


@needs_library
def test_sinks_with_gradients_are_prepared_by_themselves(repeats: list[Tensor]) -> None:
    cache, q, sinks = cache_of("contiguous"), queries(1), torch.randn(HEADS, requires_grad=True)
    cache.attend(q, sinks=sinks.detach())
    cache.attend(q, sinks=sinks).sum().backward()
    assert len(repeats) == 1
    assert sinks.grad is not None


@needs_library
@pytest.mark.parametrize("options", [{"scale": 0.3}, {"scale": -0.3}, {"softcap": 2.0}, {"batch_invariant": True}])
@pytest.mark.parametrize("kind", KINDS)
def test_options_make_another_call(kind: str, options: dict[str, object], repeats: list[Tensor]) -> None:
    cache, q = cache_of(kind), queries(1)
    plain = cache.attend(q)
    out = cache.attend(q, **options)
    assert len(repeats) == 2
    torch.testing.assert_close(out, anew(cache, q, **options), rtol=1e-5, atol=1e-5)
    assert torch.equal(cache.attend(q), plain)
    if "batch_invariant" not in options:
        assert (out - plain).abs().max() > 1e-2


@needs_library
@pytest.mark.parametrize(
    "options", [{"return_lse": True}, {"alibi_slopes": torch.ones(HEADS)}, {"backend": "reference"}]
)
def test_other_results_and_backends_are_not_repeated(options: dict[str, object], repeats: list[Tensor]) -> None:
    cache, q = cache_of("paged"), queries(1)
    cache.attend(q, **options)
    assert repeats == []


@needs_library
def test_the_last_decision_is_that_of_the_repeated_call() -> None:
    first, second, q = cache_of("paged"), cache_of("paged", seed=1), queries(1)
    first.attend(q)
    undivided.attention(q, q, q, layout="bshd", backend="reference")
    second.attend(q)
    decision = undivided.last_decision()
    assert decision is not None
    assert decision.backend.name == "native"
    assert decision.problem.page_size == 4


@needs_library
def test_the_setting_of_backends_is_read_at_every_call(monkeypatch: pytest.MonkeyPatch, repeats: list[Tensor]) -> None:
    cache, q = cache_of("contiguous"), queries(1)
    cache.attend(q)
    with undivided.use_backends("reference"):
        cache.attend(q)
        decision = undivided.last_decision()
    assert decision is not None
    assert decision.backend is reference.BACKEND
    monkeypatch.setenv("UNDIVIDED_BACKENDS", "reference")
    cache.attend(q)
    assert len(repeats) == 1


@needs_library
def test_a_gradient_or_autocast_makes_a_call_of_its_own(repeats: list[Tensor]) -> None:
    cache = cache_of("contiguous")
    q = queries(1)
    cache.attend(q)
    q.requires_grad_()
    cache.attend(q).sum().backward()
    assert q.grad is not None
    assert q.grad.abs().max() > 0
    with torch.no_grad():
        cache.attend(q)
    with torch.autocast("cpu", torch.bfloat16):
        assert cache.attend(queries(1)).dtype == torch.bfloat16
    assert len(repeats) == 2


@needs_library
@pytest.mark.parametrize("step", [(1, 2), (2, 1)])
def test_strides_of_the_queries_are_their_own(step: tuple[int, int]) -> None:
    cache, wide = cache_of("paged"), torch.randn(BATCH, 2, 2 * HEADS, DIM)
    cache.attend(wide[:, :1, :HEADS].contiguous())
    q = wide[:, ::2, :: step[1]][:, :, :HEADS] if step[1] == 2 else wide[:, :1, :HEADS]
    torch.testing.assert_close(cache.attend(q), cache.attend(q.contiguous()))


@needs_library
def test_other_threads_are_used_when_their_number_changes() -> None:
    cache, q, before = cache_of("paged"), queries(1), torch.get_num_threads()
    out = cache.attend(q)
    try:
        torch.set_num_threads(before + 1)
        assert torch.equal(cache.attend(q), out)
    finally:
        torch.set_num_threads(before)


@needs_library
def test_memory_that_was_taken_away_is_refused() -> None:
    cache, q = cache_of("paged"), queries(1)
    cache.attend(q)
    q.untyped_storage().resize_(0)
    with pytest.raises(InputError, match=r"q must have its .* in memory"):
        cache.attend(q)
    cache.k.untyped_storage().resize_(16)
    with pytest.raises(InputError, match=r"k must have its .* in memory"):
        cache.attend(queries(1))


@needs_library
def test_scales_that_were_taken_away_are_refused() -> None:
    cache, q = cache_of("paged int8"), queries(1)
    cache.attend(q)
    assert cache.v_scale is not None
    cache.v_scale.untyped_storage().resize_(0)
    with pytest.raises(InputError, match=r"v_scale must have its .* in memory"):
        cache.attend(q)


@needs_library
@pytest.mark.parametrize("elsewhere", ["queries", "cache"])
def test_queries_on_another_device_are_refused(elsewhere: str) -> None:
    """A cache of the same sizes elsewhere, or queries: the prepared call of the CPU would pass their address on."""
    cache, q = undivided.KVCache(BATCH, 32, KV_HEADS, DIM, dtype=torch.float32), queries(1)
    other = undivided.KVCache(BATCH, 32, KV_HEADS, DIM, dtype=torch.float32, device="meta")
    for one in (cache, other):
        new = torch.randn(BATCH, 5, KV_HEADS, DIM, device=one.k.device)
        one.append(new, new)
    cache.attend(q)
    cache, q = (other, q) if elsewhere == "cache" else (cache, q.to("meta"))
    with pytest.raises(InputError, match="device"):
        cache.attend(q)


def escaped(q: Tensor) -> Tensor:
    """A tensor that has outlived the transform it belongs to."""
    kept: list[Tensor] = []

    def keep(row: Tensor) -> Tensor:
        kept.append(row)
        return row

    torch.vmap(keep)(q[None])
    return kept[0]


@needs_library
@pytest.mark.parametrize("kind", ["sparse", "escaped", "nested"])
def test_queries_that_no_kernel_can_read_are_refused(kind: str) -> None:
    cache, q = cache_of("paged"), queries(1)
    cache.attend(q)
    with pytest.raises(InputError, match="q must"):
        cache.attend({"sparse": Tensor.to_sparse, "escaped": escaped, "nested": torch.nested.as_nested_tensor}[kind](q))


@needs_library
def test_a_query_without_memory_is_zero() -> None:
    cache = cache_of("paged")
    zero = torch._efficientzerotensor((BATCH, 1, HEADS, DIM))
    expected = cache.attend(torch.zeros(BATCH, 1, HEADS, DIM))
    torch.testing.assert_close(cache.attend(zero), expected)


@needs_library
def test_a_block_table_that_was_written_to_is_checked(repeats: list[Tensor]) -> None:
    cache, q = cache_of("paged"), queries(1)
    assert isinstance(cache, undivided.PagedKVCache)
    out = cache.attend(q)
    cache.block_table[0, 0] = 999
    with pytest.raises(InputError, match="999"):
        cache.attend(q)
    for _ in range(4):
        append(cache, 1)  # a page is added: the table is made anew
    assert cache.attend(q).isfinite().all()
    assert out.isfinite().all()
    assert len(repeats) == 2


@needs_library
def test_a_mask_of_pairs_is_read_at_every_call(repeats: list[Tensor]) -> None:
    cache = cache_of("contiguous")
    allowed = torch.ones(BATCH, 1, 1, 18, dtype=torch.bool)
    mask, q = masks.dense(allowed), queries(1)
    out = cache.attend(q, mask)
    allowed[..., :5] = False
    assert (cache.attend(q, mask) - out).abs().max() > 1e-3
    assert repeats == []


@needs_library
def test_a_mask_that_was_used_can_be_copied() -> None:
    mask, cache, q = masks.window(4, 0), cache_of("paged"), queries(1)
    out = cache.attend(q, mask)
    for other in (copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):
        assert torch.equal(cache.attend(q, other), out)


@needs_library
def test_the_layers_of_inference_params_share_what_the_first_prepares(repeats: list[Tensor]) -> None:
    params = undivided.InferenceParams(4, 64, KV_HEADS, DIM, torch.float32, is_paged=True, page_size=8)
    plain = undivided.InferenceParams(4, 64, KV_HEADS, DIM, torch.float32)
    for counts in ({"a": 5, "b": 3}, {"a": 1, "b": 1}, {"b": 1, "c": 1}):
        params.pre_step(counts)
        plain.pre_step(counts)
        for layer in (1, 2, 3):
            q, k, v = (torch.randn(2, max(counts.values()), heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
            out = params.attend(layer, q, k, v)
            torch.testing.assert_close(out, plain.attend(layer, q, k, v), rtol=1e-5, atol=1e-5)
    assert len(repeats) == 18


def test_without_the_kernel_every_call_is_prepared(monkeypatch: pytest.MonkeyPatch, repeats: list[Tensor]) -> None:
    monkeypatch.setenv("UNDIVIDED_BACKENDS", "reference")
    cache, q = cache_of("paged"), queries(1)
    assert torch.equal(cache.attend(q), cache.attend(q))
    assert repeats == []

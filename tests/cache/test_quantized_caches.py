"""Quantised caches: what they return is attention over the dequantised tokens, however those were appended."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor

import undivided
from undivided import InputError, masks
from undivided.quantization import FORMATS, dequantize, quantize

BATCH, KV_HEADS, HEADS, DIM = 3, 2, 4, 64
Cache = undivided.KVCache | undivided.PagedKVCache


def build(kind: str, **options: Any) -> Cache:
    options = {"kv_heads": KV_HEADS, "head_dim": DIM, "batch": BATCH, "dtype": torch.bfloat16, **options}
    if kind == "dense":
        return undivided.KVCache(max_len=64, **options)
    return undivided.PagedKVCache(num_pages=30, page_size=8, **options)


def rounded(x: Tensor, format: str) -> Tensor:
    return dequantize(*quantize(x, format), x.dtype)  # type: ignore[arg-type]


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape).bfloat16()


def poison(cache: Cache) -> None:
    """NaN in all memory that holds no token yet."""
    for pool in (cache.k, cache.v):
        (pool.view(torch.uint8) if pool.dtype.itemsize == 1 else pool).fill_(127)
    for scale in (cache.k_scale, cache.v_scale):
        if scale is not None:
            scale.fill_(torch.nan)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind", ["dense", "paged"])
@pytest.mark.parametrize("window", [False, True])
def test_the_result_is_attention_over_the_dequantised_tokens(kind: str, format: str, window: bool) -> None:
    torch.manual_seed(0)
    cache = build(kind, quantize=format)
    poison(cache)
    mask = masks.window(9, 0, "bottom_right") if window else None
    lists: list[list[Tensor]] = [[] for _ in range(BATCH)]
    for counts in ([20, 3, 11], [1, 1, 1], [5, 0, 2], [1, 1, 1]):
        k, v = (tokens(BATCH, max(counts), KV_HEADS, DIM) for _ in range(2))
        q = tokens(BATCH, max(counts), HEADS, DIM)
        cache.append(k, v, counts)
        out = cache.attend(q, mask)
        for b, count in enumerate(counts):
            lists[b].append(torch.stack([rounded(t[b, :count], format) for t in (k, v)]))
            keys, values = torch.cat(lists[b], 1).float()
            if count:
                causal = masks.causal("bottom_right") if mask is None else mask
                alone = undivided.attention(
                    q[b : b + 1, :count].float(), keys[None], values[None], layout="bshd", mask=causal
                )
                assert (out[b, :count].float() - alone[0]).norm() <= 0.02 * alone.norm()


@pytest.mark.parametrize("format", FORMATS)
def test_forks_keep_and_eviction_move_scales_with_values(format: str) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"quantize": format}
    cache, plain = build("paged", **options), build("paged")
    for step in range(6):
        k, v, q = tokens(BATCH, 7, KV_HEADS, DIM), tokens(BATCH, 7, KV_HEADS, DIM), tokens(BATCH, 1, HEADS, DIM)
        cache.append(k, v)
        plain.append(rounded(k, format), rounded(v, format))
        for one in (cache, plain):
            assert isinstance(one, undivided.PagedKVCache)
            if step % 2:
                one.keep([[0, 2, 6], [1, 5], []])
            else:
                one.fork([0, 1], [1, 2])
        found, expected = (one.attend(q, masks.window(12, 0), [1] * BATCH).float() for one in (cache, plain))
        assert (found - expected).norm() <= 0.02 * expected.norm()
        for one in (cache, plain):
            assert isinstance(one, undivided.PagedKVCache)
            one.evict(masks.window(12, 0))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("is_paged", [False, True])
def test_inference_params(format: str, is_paged: bool) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"max_batch_size": 2, "max_sequence_length": 64, "num_heads_kv": KV_HEADS}
    options |= {"head_dim_k": DIM, "dtype": torch.bfloat16, "is_paged": is_paged, "page_size": 16 if is_paged else None}
    params = undivided.InferenceParams(**options, quantize=format)
    plain = undivided.InferenceParams(**options)
    for counts in (OrderedDict(a=9, b=4), OrderedDict(a=1, b=1), OrderedDict(b=1)):
        count = max(counts.values())
        q, k, v = (tokens(len(counts), count, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
        params.pre_step(counts)
        plain.pre_step(counts)
        found = params.attend(1, q, k, v)
        expected = plain.attend(1, q, rounded(k, format), rounded(v, format))
        assert isinstance(found, Tensor)
        assert isinstance(expected, Tensor)
        assert (found.float() - expected.float()).norm() <= 0.02 * expected.float().norm()
    assert params.quantize == format
    assert params.memory.values < plain.memory.values


def test_the_memory_is_printed_beside_that_of_bfloat16() -> None:
    sizes = {format: build("dense", quantize=format).memory for format in FORMATS}
    ratio = {format: (m.values + m.scales) / m.bfloat16 for format, m in sizes.items()}
    assert ratio["int8"] == ratio["fp8_e4m3"] == ratio["fp8_e5m2"] == (DIM + 4) / (2 * DIM)
    assert ratio["int4"] == (DIM / 2 + 4 * DIM / 32) / (2 * DIM)
    assert "0.31 x its size in bfloat16" in repr(build("paged", quantize="int4"))
    assert build("dense").memory.scales == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantize": "fp8"}, "got 'fp8'\\n  HINT: 'fp8_e4m3' or 'fp8_e5m2'"),
        ({"quantize": "int3"}, "quantize must be one of 'int8', 'fp8_e4m3', 'fp8_e5m2', 'int4', got 'int3'"),
        ({"quantize": 8}, "quantize must be one of"),
        ({"quantize": "int4", "head_dim": 40}, "head_dim must be a multiple of 32 for int4"),
        ({"quantize": "int8", "dtype": torch.float64}, "dtype must not be float64 in a quantised cache"),
    ],
    ids=str,
)
def test_what_cannot_be_quantised_is_refused(options: dict[str, Any], message: str) -> None:
    for kind in ("dense", "paged"):
        with pytest.raises(InputError, match=message):
            build(kind, **options)

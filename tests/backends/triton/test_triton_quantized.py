"""The `triton` backend over quantised keys and values, beyond the contract suite: every stored number, head sizes in
steps, the memory it takes, and caches. The compilation for GPUs is in `test_triton_compilation.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from live_bytes import LiveBytes
from torch import Tensor

import undivided
from undivided import masks
from undivided.backends.triton import forward
from undivided.kernels.triton import config
from undivided.quantization import DTYPES, FORMATS, GROUP, Format, dequantize, head_size, quantize


def _attention(backend: str, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    out = undivided.attention(q, k, v, layout="bshd", backend=backend, **options)
    assert isinstance(out, Tensor)
    return out


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy, of 0 * infinity in unused rows
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("format", FORMATS)
def test_every_stored_number_is_converted_exactly(format: Format, dtype: torch.dtype) -> None:
    """With one key, the output is its value: all 256 bytes, subnormal numbers, infinity and NaN included."""
    v = torch.arange(256, dtype=torch.uint8).view(DTYPES[format]).view(1, 1, 1, 256)
    size = head_size(v)
    scales = torch.full((1, 1, 1), 0.5)
    if format == "int4":  # products that bfloat16 holds, because Triton's interpreter truncates
        scales = (torch.arange(8, 8 + size // GROUP) / 16).view(1, 1, 1, -1)
    k, k_scale = quantize(torch.zeros(1, 1, 1, 32), format)
    out = _attention("triton", torch.ones(1, 1, 1, 32, dtype=dtype), k, v, k_scale=k_scale, v_scale=scales)
    assert torch.equal(out.nan_to_num(nan=1e4), dequantize(v, scales, dtype).nan_to_num(nan=1e4))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("format", FORMATS)
def test_scales_of_any_magnitude(format: Format, dtype: torch.dtype) -> None:
    """A weight times a scale may be far from 1: below 2^-24 in e5m2, whose values reach 57,344, and above 65,504."""
    torch.manual_seed(0)
    values = torch.randn(1, 70, 2, 32)
    tiny, huge = (1e-3, 3e4 / values.abs().max()) if dtype == torch.float16 else (1e-30, 1e30)
    q = torch.randn(1, 3, 4, 32).to(dtype)
    tolerance = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 2e-5}[dtype]
    for size in (tiny, huge):
        (k, k_scale), (v, v_scale) = (quantize(values * factor, format) for factor in (size, size))
        given: dict[str, Any] = {"k_scale": k_scale, "v_scale": v_scale, "scale": float(0.2 / size)}
        ours = _attention("triton", q, k, v, **given).float() / size
        right = _attention("reference", q.float(), k, v, **given) / size
        torch.testing.assert_close(ours, right, rtol=tolerance, atol=tolerance)


FLOATS = (torch.float16, torch.bfloat16, torch.float32)


# every format in every dtype; with a softcap, each format and each dtype once or twice: the interpreter is slow
@pytest.mark.parametrize(
    ("format", "dtype", "options"),
    [
        *((format, dtype, {}) for format in FORMATS for dtype in FLOATS),
        *((format, dtype, {"softcap": 5.0}) for format, dtype in zip(FORMATS, (*FLOATS, FLOATS[0]), strict=True)),
    ],
)
def test_scales_of_unseen_keys_may_be_nan(format: Format, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Unused memory holds anything: after the last key of a sequence, and between the keys of a mask with holes."""
    torch.manual_seed(0)
    q, (k, scale) = torch.randn(1, 70, 2, 32).to(dtype), quantize(torch.randn(1, 70, 2, 32), format)
    used = torch.arange(70)[None] % 7 < 5
    for mask, unseen in ((masks.lengths([50]), torch.arange(70) >= 50), (masks.dense(used.expand(70, 70)), ~used[0])):
        spoiled = scale.clone()
        spoiled[:, unseen] = float("nan")
        found = [_attention("triton", q, k, k, k_scale=s, v_scale=s, mask=mask, **options) for s in (scale, spoiled)]
        assert torch.equal(*found)


@pytest.mark.parametrize(("qk_dim", "v_dim"), [(288, 32), (32, 320), (96, 96)])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("pages", [False, True])
def test_head_sizes_in_steps(format: Format, qk_dim: int, v_dim: int, pages: bool) -> None:
    torch.manual_seed(0)
    q, (k, k_scale) = torch.randn(2, 3, 4, qk_dim), quantize(torch.randn(2, 64, 2, qk_dim), format)
    v, v_scale = quantize(torch.randn(2, 64, 2, v_dim), format)
    options: dict[str, Any] = {"k_scale": k_scale, "v_scale": v_scale}
    if pages:  # 2 sequences of 4 pages, in any order
        order = torch.tensor([[5, 2, 7, 0], [1, 6, 4, 3]], dtype=torch.int32)
        k, v = (_paged(x.view(torch.uint8), order).view(x.dtype) for x in (k, v))
        options = {name: _paged(x, order) for name, x in options.items()} | {"pages": order}
    options["mask"] = masks.lengths([64, 41]) & masks.causal("bottom_right")
    ours, theirs = (_attention(name, q, k, v, **options) for name in ("triton", "reference"))
    torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6)


def _paged(x: Tensor, order: Tensor) -> Tensor:
    """The rows [B, S, ...] in a pool of pages; sequence b has the pages order[b]."""
    pages = x.unflatten(1, (order.shape[1], -1)).flatten(0, 1)
    pool = torch.empty_like(pages)
    pool[order.flatten().long()] = pages
    return pool


def test_scales_of_int4_may_have_any_strides() -> None:
    torch.manual_seed(0)
    q, (k, scale) = torch.randn(1, 3, 2, 64), quantize(torch.randn(1, 70, 2, 64), "int4")
    strided = scale.transpose(-1, -2).contiguous().transpose(-1, -2)
    assert strided.stride(-1) != 1
    found = [_attention("triton", q, k, k, k_scale=one, v_scale=one) for one in (scale, strided)]
    assert torch.equal(*found)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("q_len", [1, 300])
def test_no_tensor_of_dequantised_keys_exists(format: Format, q_len: int) -> None:
    """The backend creates less memory than the keys and values would take in half precision."""
    q = torch.zeros(1, q_len, 1, 64)
    k, scale = quantize(torch.zeros(1, 4096, 1, 64), format)
    with torch.no_grad(), LiveBytes() as live:
        _attention("triton", q, k, k, k_scale=scale, v_scale=scale, mask=masks.window(20, 0, "bottom_right"))
    assert 0 < live.most < 2 * 4096 * 64 * 2


@pytest.mark.parametrize("format", FORMATS)
def test_tile_sizes_with_tensor_descriptors_load_by_address(format: Format) -> None:
    torch.manual_seed(0)
    q, (k, scale) = torch.randn(1, 70, 2, 64), quantize(torch.randn(1, 70, 2, 64), format)
    options: dict[str, Any] = {"k_scale": scale, "v_scale": scale, "mask": masks.causal()}
    with config.trial("forward", config.Config(32, 32, 1, 1, descriptors=True)):
        ours = _attention("triton", q, k, k, **options)
    torch.testing.assert_close(ours, _attention("reference", q, k, k, **options), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("is_paged", [False, True])
def test_caches(format: Format, is_paged: bool) -> None:
    torch.manual_seed(0)
    given: dict[str, Any] = {"kv_heads": 2, "head_dim": 32, "batch": 2, "dtype": torch.float32, "quantize": format}
    cache: undivided.PagedKVCache | undivided.KVCache = (
        undivided.PagedKVCache(num_pages=20, page_size=8, **given)
        if is_paged
        else undivided.KVCache(max_len=60, **given)
    )
    for counts in ([40, 7], [1, 1], [3, 0]):
        q, k, v = (torch.randn(2, max(counts), heads, 32) for heads in (4, 2, 2))
        cache.append(k, v, counts)
        ours, theirs = (cache.attend(q, backend=name) for name in ("triton", "reference"))
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6)


def test_explain_offers_it() -> None:
    q, (k, scale) = torch.zeros(1, 1, 2, 64), quantize(torch.zeros(1, 8, 2, 64), "int8")
    decision = undivided.explain(q, k, k, layout="bshd", k_scale=scale, v_scale=scale)
    assert "triton" not in decision.reasons or "quantised" not in str(decision.reasons["triton"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("start", "dim", "words"), [(0, 64, True), (2, 64, False), (1, 64, False), (0, 32, None), (0, 160, True)]
)
def test_decoding_reads_words_where_rows_consist_of_them(
    format: Format, dtype: torch.dtype, start: int, dim: int, words: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that begins between words, or heads of few of them, are read as bytes; the numbers are the same."""
    seen: list[int] = []
    own = forward._Forward._others

    def told(self: Any, *arguments: Any) -> dict[str, Any]:
        given = own(self, *arguments)
        seen.append(given["WORDS"])
        return given

    monkeypatch.setattr(forward._Forward, "_others", told)
    operands = []
    for x in (torch.randn(2, 40, 2, dim), torch.randn(2, 40, 2, dim)):
        values, scale = quantize(x, format)
        memory = torch.zeros(values.numel() + 16, dtype=torch.uint8)[start : start + values.numel()]
        operands += [memory.copy_(values.reshape(-1).view(torch.uint8)).view(values.dtype).view(values.shape), scale]
    k, k_scale, v, v_scale = operands
    q, mask = torch.randn(2, 1, 4, dim).to(dtype), masks.lengths([40, 9])
    given: dict[str, Any] = {"k_scale": k_scale, "v_scale": v_scale, "mask": mask}
    ours, right = (_attention(name, q, k, v, **given).float() for name in ("triton", "reference"))
    torch.testing.assert_close(ours, right, rtol=2e-2, atol=2e-2)
    count = 4 if format == "int4" else 2
    expected = dim // count >= 16 if words is None else words
    assert seen == [count if expected else 0]

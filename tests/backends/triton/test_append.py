"""New tokens of quantised caches, written by the Triton kernel: the bits of `undivided.quantization.quantize`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from difficult_rows import difficult_rows

import undivided
from undivided.backends.triton import append
from undivided.cache import _appended
from undivided.quantization import FORMATS, Format, empty, quantize

DIMS = [(128, 128), (96, 160), (64, 32), (5, 17), (1, 3)]
KINDS = [(format, dims) for format in FORMATS for dims in DIMS if format != "int4" or dims[0] % 32 == 0]


@pytest.mark.filterwarnings("ignore:(invalid value|divide by zero):RuntimeWarning")  # of NumPy, in the interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("format", "dims"), KINDS, ids=str)
def test_rows_have_the_bits_of_their_definition(format: Format, dtype: torch.dtype, dims: tuple[int, int]) -> None:
    k, v = (difficult_rows((2, 3, 2, dim), dtype, seed) for seed, dim in enumerate(dims))
    if dtype == torch.bfloat16:  # the interpreter converts subnormal bf16 to other numbers
        k, v = (torch.where(x.abs() < 1e-37, torch.zeros_like(x), x) for x in (k, v))
    pools = [empty(format, (5, 2, 2, dim)) for dim in dims]
    parts = [pools[0].values, pools[1].values, pools[0].scale, pools[1].scale]
    for part in parts:
        part.view(torch.uint8).zero_()
    rows = torch.randperm(10)[:6]
    append.append(parts, format, k, v, rows)
    for x, values, scale in ((k, parts[0], parts[2]), (v, parts[1], parts[3])):
        expected = quantize(x, format)
        found, others = (t.view(torch.uint8).flatten(0, 1) for t in (values, scale.nan_to_num(nan=1e38)))
        assert torch.equal(found[rows], expected.values.view(torch.uint8).flatten(0, 1))
        assert torch.equal(others[rows], expected.scale.nan_to_num(nan=1e38).view(torch.uint8).flatten(0, 1))
        untouched = [row for row in range(10) if row not in rows.tolist()]
        assert not found[untouched].any()
        assert not others[untouched].any()


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Caches append as if their pools were on a GPU; the list has the format of each launch."""
    launched: list[str] = []
    run = append.append

    def noted(parts: Any, format: Format, *tensors: torch.Tensor) -> None:
        launched.append(format)
        run(parts, format, *tensors)

    monkeypatch.setattr(append, "append", noted)
    monkeypatch.setattr(_appended, "_is_on_gpu", lambda tensor: True)
    return launched


@pytest.mark.parametrize("layout", ["bshd", "thd"])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("format", [None, "int8", "int4"])
def test_caches_on_a_gpu_append_by_one_launch(
    format: Format | None, paged: bool, layout: str, on_gpu: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"batch": 2, "head_dim": 32, "kv_heads": 2, "dtype": torch.float32, "layout": layout}
    options["quantize"] = format

    def made() -> undivided.KVCache | undivided.PagedKVCache:
        return undivided.PagedKVCache(16, 4, **options) if paged else undivided.KVCache(max_len=32, **options)

    mine, theirs = made(), made()
    steps = ((5, [5, 2]), (1, [1, 1]), (1, [1, 1]), (20, [20, 20]))
    for length, counts in steps:
        k, v = (torch.randn(*((sum(counts),) if layout == "thd" else (2, length)), 2, 32) for _ in range(2))
        mine.append(k, v, lengths=counts)
        with monkeypatch.context() as patched:
            patched.setattr(_appended, "append", lambda *_, **__: False)
            theirs.append(k, v, lengths=counts)
    assert on_gpu == ([] if format is None else [format] * len(steps))
    q, counts = torch.randn(*((2,) if layout == "thd" else (2, 1)), 4, 32), {"q_lengths": [1, 1]}
    options = counts if layout == "thd" else {}
    assert torch.equal(*(cache.attend(q, **options, backend="reference") for cache in (mine, theirs)))


def test_pools_that_were_taken_away_reach_no_launch(on_gpu: list[str]) -> None:
    cache, new = undivided.KVCache(1, 16, 2, 32, dtype=torch.float32, quantize="int8"), torch.randn(1, 2, 2, 32)
    cache.append(new, new)
    assert cache.v_scale is not None
    cache.v_scale.untyped_storage().resize_(0)
    with pytest.raises(undivided.InputError, match=r"cache\.v_scale"):
        cache.append(new, new)
    assert on_gpu == ["int8"]

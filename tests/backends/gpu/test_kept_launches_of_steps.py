"""Layers and steps of decoding with caches share the kept launches of the `triton` backend.

There is no GPU, so Triton's interpreter runs the kernels, in place of a compiler that returns kernels to launch again.
"""

from __future__ import annotations

import pytest
import torch

import undivided
from undivided import masks
from undivided.backends.triton import kept_launches

LAYOUTS, STORED = ("bshd", "sbhd", "thd"), (None, "int8", "int4")


# every pair of a layout, a format, and paged or not; the interpreter takes half a second for each
@pytest.mark.parametrize(
    ("layout", "is_paged", "quantize"),
    [(layout, (i + j) % 2 == 0, quantize) for i, layout in enumerate(LAYOUTS) for j, quantize in enumerate(STORED)],
)
def test_the_layers_of_a_step_share_their_launches(
    layout: str, is_paged: bool, quantize: str | None, runs: list[kept_launches.ForwardLaunches]
) -> None:
    """The first layer of a step makes it; the others have their own keys, values and queries, in any layout."""
    options = {"is_paged": is_paged, "page_size": 16 if is_paged else None, "qkv_format": layout, "quantize": quantize}
    params, plain = (undivided.InferenceParams(4, 64, 2, 32, torch.float32, **options) for _ in range(2))
    for step, counts in enumerate(({"a": 7, "b": 7}, {"a": 13, "b": 6}, {"a": 1, "b": 1}, {"b": 1, "c": 1})):
        params.pre_step(counts)
        plain.pre_step(counts)
        before = len(runs)
        for layer in (1, 2, 3):
            q, k, v = (new_tokens(layout, tuple(counts.values()), heads, 32) for heads in (4, 2, 2))
            out = params.attend(layer, q, k, v, backend="triton")
            expected = plain.attend(layer, q, k, v, backend="reference")
            torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
        assert len(runs) - before >= 2, step  # 3 if an equal mask has the launches of an earlier step


# every pair of a layout, a format and a mask; the interpreter takes a second for each
@pytest.mark.parametrize(
    ("layout", "quantize", "mask"),
    [
        pytest.param(layout, quantize, (None, masks.window(20, 0))[(i + j) % 2], id=f"{layout}-{quantize}")
        for i, layout in enumerate(("bshd", "thd"))
        for j, quantize in enumerate(STORED)
    ],
)
def test_the_steps_of_decoding_share_their_launches(
    layout: str, quantize: str | None, mask: masks.Mask | None, runs: list[kept_launches.ForwardLaunches]
) -> None:
    """The first step makes it; the ranges and the tables of tiles are those of each step, sinks those of each layer."""
    options = {"is_paged": True, "page_size": 64, "qkv_format": layout, "quantize": quantize}
    params, plain = (undivided.InferenceParams(4, 256, 2, 32, torch.float32, **options) for _ in range(2))
    steps = [{"a": 70, "b": 9}, *[{"a": 1, "b": 1}] * 3, {"b": 1, "a": 1}, {"a": 1, "b": 1}]
    for step, counts in enumerate(steps):
        params.pre_step(counts)
        plain.pre_step(counts)
        before = len(runs)
        for layer in (1, 2):
            q, k, v = (new_tokens(layout, tuple(counts.values()), heads, 32) for heads in (4, 2, 2))
            sinks = torch.randn(4) + layer if quantize != "int8" else None
            out = params.attend(layer, q, k, v, mask=mask, sinks=sinks, backend="triton")
            expected = plain.attend(layer, q, k, v, mask=mask, sinks=sinks, backend="reference")
            torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
        assert len(runs) - before == 2 or step < 2, step


def new_tokens(layout: str, counts: tuple[int, ...], heads: int, dim: int) -> torch.Tensor:
    """Random numbers of new tokens."""
    longest = max(counts)
    shapes = {"bshd": (len(counts), longest), "sbhd": (longest, len(counts)), "thd": (sum(counts),)}
    return torch.randn(*shapes[layout], heads, dim)


def test_the_layers_of_quantised_caches_read_their_own_scales(runs: list[kept_launches.ForwardLaunches]) -> None:
    new, q = torch.randn(3, 2, 20, 2, 32), torch.randn(3, 2, 1, 4, 32)
    for quantize in ("int8", "fp8_e4m3", "int4"):
        mask, before = masks.causal(), len(runs)
        for layer in range(3):
            cache = undivided.PagedKVCache(8, 16, 2, 32, batch=2, dtype=torch.float32, quantize=quantize)
            cache.append(new[layer] * (layer + 1), new[layer])
            out, expected = (cache.attend(q[layer], mask, backend=name) for name in ("triton", "reference"))
            torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
        assert len(runs) - before == 2


def test_a_replay_without_its_launches_keeps_them_again(runs: list[kept_launches.ForwardLaunches]) -> None:
    cache = undivided.PagedKVCache(8, 16, 2, 16, batch=2, dtype=torch.float32)
    new, q = torch.randn(2, 20, 2, 16), torch.randn(2, 1, 4, 16)
    cache.append(new, new)
    mask = masks.causal()
    first = cache.attend(q, mask, backend="triton")
    moved = torch.randn(q.numel() + 1)[1:].view(q.shape).copy_(q)  # other alignment: other launches
    for n, query in enumerate((moved, q, moved), 1):
        assert torch.equal(cache.attend(query, mask, backend="triton"), first)
        assert len(runs) == n - 1

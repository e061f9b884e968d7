"""Decoding of wide heads, of latents, and of many heads over one by the `triton` backend, under Triton's
interpreter."""

from __future__ import annotations

import os

import pytest
import torch
from calls import call_of

import undivided
from undivided import masks
from undivided.backends.triton import inputs as triton_inputs
from undivided.backends.triton.blocks import all_blocks
from undivided.kernels.triton import config
from undivided.quantization import Format, quantize

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the kernels need a GPU without Triton's interpreter", allow_module_level=True)


@pytest.mark.parametrize(("qk_dim", "v_dim"), [(576, 512), (512, 512), (320, 256), (700, 300), (272, 520)])
@pytest.mark.parametrize("shared", [True, False], ids=["v is a part of k", "v is another tensor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_decoding_of_wide_heads(qk_dim: int, v_dim: int, shared: bool, dtype: torch.dtype) -> None:
    if shared and v_dim > qk_dim:
        return
    lengths = masks.lengths([70, 3])
    q, k = torch.randn(2, 1, 4, qk_dim).to(dtype), torch.randn(2, 80, 1, qk_dim).to(dtype)
    v = k[..., :v_dim] if shared else torch.randn(2, 80, 1, v_dim).to(dtype)
    for x in {k, v}:
        x[1, 3:] = torch.nan
    out, right = (
        undivided.attention(q, k, v, layout="bshd", mask=lengths, backend=name) for name in ("triton", "reference")
    )
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out, right, rtol=tolerance, atol=tolerance)


def test_latents_are_read_once_and_in_one_program() -> None:
    latents = torch.zeros(1, 64, 1, 576, dtype=torch.bfloat16)
    call, tensors = call_of(latents.new_zeros(1, 1, 4, 576), latents, latents[..., :512], layout="bshd")
    inputs = triton_inputs.KernelInputs(call, tensors)
    (blocks,) = all_blocks(inputs, next(inputs.rows()))
    assert blocks.steps == config.Steps(512, 64, 512)
    assert inputs.values_are_keys
    apart = triton_inputs.KernelInputs(call, tensors._replace(v=latents[..., :512].clone()))
    assert not apart.values_are_keys


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_the_same_quantised_memory_with_other_scales_for_v(format: Format) -> None:
    q, (k, k_scale) = torch.randn(1, 1, 4, 32), quantize(torch.randn(1, 50, 2, 32), format)
    options = {"layout": "bshd", "k_scale": k_scale, "v_scale": k_scale * 3}
    out, right = (undivided.attention(q, k, k, backend=name, **options) for name in ("triton", "reference"))
    torch.testing.assert_close(out, right, rtol=2e-5, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("q_len", [1, 3, 4, 5])
@pytest.mark.parametrize(("heads", "kv_heads"), [(128, 1), (71, 1), (160, 2)])
def test_few_queries_of_many_heads_over_one(q_len: int, heads: int, kv_heads: int) -> None:
    q, k = torch.randn(2, q_len, heads, 16), torch.randn(2, 70, kv_heads, 16)
    mask = masks.lengths([70, 9], [q_len, q_len]) & masks.causal("bottom_right")
    out, right = (
        undivided.attention(q, k, k, layout="bshd", mask=mask, backend=name) for name in ("triton", "reference")
    )
    torch.testing.assert_close(out, right, rtol=2e-5, atol=2e-6)


def test_as_many_heads_as_fit_share_a_tile_in_decoding() -> None:
    k = torch.zeros(1, 64, 1, 16)
    shared = {}
    for heads, q_len in ((64, 1), (128, 1), (128, 4), (128, 5), (71, 1)):
        call, tensors = call_of(torch.zeros(1, q_len, heads, 16), k, k, layout="bshd")
        inputs = triton_inputs.KernelInputs(call, tensors)
        (blocks,) = all_blocks(inputs, next(inputs.rows()))
        shared[heads, q_len] = blocks.group
    assert shared == {(64, 1): 64, (128, 1): 64, (128, 4): 16, (128, 5): 1, (71, 1): 1}

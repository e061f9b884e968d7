"""Selection on described GPUs, as in `test_gpu_selection.py`: bias, ALiBi slopes, softcap, sinks and dropout."""

from __future__ import annotations

import pytest
import torch
from described_gpus import (
    A100,
    A100_OLD,
    ALL,
    B200,
    DOCUMENTS,
    FULL,
    H100,
    HALF,
    SQUARE,
    Row,
    ask,
    check_row,
    described,
)

from undivided import masks
from undivided.request.slopes import usual_slopes

BIAS = torch.empty(16, 512, 512, dtype=HALF, device="meta", requires_grad=True)
LONG_BIAS = torch.empty(16, 512, 1024, dtype=HALF, device="meta")
BIAS_WORDS = ("an additive bias", "the gradient of the bias")
NO_BIAS_FORWARD = {"torch_flash": ["an additive bias"], "torch_cudnn": ["an additive bias"]}
NO_BIAS = {
    "torch_flash": [*BIAS_WORDS], "torch_cudnn": [*BIAS_WORDS],
    "flash_attn": [f"flash-attn 2: no support for {what}" for what in BIAS_WORDS],
}  # fmt: skip
TABLE = [
    Row(
        "thd-bias-and-many-documents-h100", H100,
        ask((1, 32768, 16, 128), layout="thd", mask=masks.documents(torch.arange(32769)),
            bias=torch.empty(16, 1, 1, dtype=HALF, device="meta")), "reference",
        NO_BIAS_FORWARD | {
            "flash_attn": ["flash-attn 3: no support for an additive", "flash-attn 2: no support for an additive"],
            "torch_efficient": ["a bias with packed documents", "documents=32768 (max 16384)"],
            "torch_cudnn": ["an additive bias"],
            "cudnn": ["a bias broadcast over queries", "a bias with per-sequence lengths or packed documents"],
        },
    ),
    Row(
        "dropout", H100, ask(SQUARE, dropout_p=0.1, grad=True), "reference",
        {
            "flash_attn": ["flash-attn 3: no support for dropout (it draws", "flash-attn 2: no support for dropout (it draws"],
            "torch_flash": ["dropout (it draws its own pattern)"], "torch_efficient": ["dropout (it draws its own pattern)"],
            "torch_cudnn": ["dropout (it draws its own pattern)"], "cudnn": ["dropout (it draws its own pattern)"],
            "flex": ["dropout (FlexAttention has none)"],
        },
    ),
    Row(
        "bias-with-gradient-fp32", A100,
        ask((2, 512, 16, 64), dtype=FULL, bias=torch.empty(16, 512, 512, device="meta", requires_grad=True)), "torch_efficient",
        {
            "flash_attn": ["dtype=float32", "an additive bias", "the gradient of the bias"],
            "torch_flash": ["dtype=float32", "an additive bias", "the gradient of the bias"],
            "torch_cudnn": ["dtype=float32", "an additive bias", "the gradient of the bias"],
            "cudnn": ["dtype=float32"],
        },
    ),
    Row(
        "bias-fp32-beside-bf16", H100, ask((2, 512, 16, 64), bias=torch.empty(16, 512, 512, device="meta")), "reference",
        {
            "flash_attn": ["flash-attn 3: no support for an additive bias", "flash-attn 2: no support for an additive bias"],
            "torch_flash": ["an additive bias"],
            "torch_efficient": ["a float32 bias with bfloat16 operands (the kernel rounds the bias"],
            "torch_cudnn": ["an additive bias"], "cudnn": ["a float32 bias with bfloat16 operands (cuDNN takes one dtype"],
        },
    ),
    Row(
        "bias-training-h100", H100, ask((2, 512, 16, 64), bias=BIAS, mask=masks.causal()), "cudnn",
        NO_BIAS | {"flash_attn": [f"flash-attn {n}: no support for {what}" for n in (3, 2) for what in BIAS_WORDS]},
    ),
    Row(
        "bias-training-cudnn-8.9.7", A100_OLD, ask((2, 512, 16, 64), bias=BIAS), "torch_efficient",
        NO_BIAS | {
            "torch_cudnn": [*BIAS_WORDS, "cuDNN 8.9.7 (min 9.0)"],
            "cudnn": [
                "a bias (cuDNN 8.9.7 on compute capability 8.0; from 9.0)",
                "the gradient of a bias (cuDNN 8.9.7; this library uses it from 9.5)",
            ],
        },
    ),
    Row(
        "bias-that-cudnn-does-not-take", H100,
        ask((2, 512, 16, 64), bias=torch.empty(16, 1, 512, dtype=HALF, device="meta"), mask=masks.window(8, 0)), "reference",
        NO_BIAS_FORWARD | {
            "flash_attn": ["flash-attn 3: no support for an additive", "flash-attn 2: no support for an additive"],
            "torch_efficient": ["a sliding window"], "torch_cudnn": ["an additive bias", "a sliding window"],
            "cudnn": ["a bias broadcast over queries or keys", "a bias with a sliding window"],
        },
    ),
    Row(
        "bias-bottom-right", H100,
        ask((2, 512, 16, 64), kv_len=1024, mask=masks.causal("bottom_right"), bias=LONG_BIAS), "torch_efficient",
        NO_BIAS_FORWARD | {
            "flash_attn": ["flash-attn 3: no support for an additive", "flash-attn 2: no support for an additive"],
            "torch_cudnn": ["an additive bias", "bottom-right alignment"], "cudnn": ["a bias with bottom-right alignment"],
        },
    ),
    Row(
        "bias-deterministic-b200", B200, ask((2, 512, 16, 64), bias=BIAS, deterministic=True), "torch_efficient",
        NO_BIAS | {
            "flash_attn": [f"flash-attn {n}: no support for {what}" for n in (4, 2) for what in BIAS_WORDS],
            "torch_cudnn": [*BIAS_WORDS, "deterministic gradients (PyTorch's operator"],
            "cudnn": ["deterministic gradients with a bias on compute capability 10.0"],
            "flex": ["deterministic gradients of a bias"],
        },
    ),
    Row(
        "alibi-training", A100, ask(SQUARE, alibi_slopes=torch.empty(16, device="meta"), grad=True), "flash_attn",
        {
            "torch_flash": ["ALiBi slopes (PyTorch builds"], "torch_efficient": ["ALiBi slopes"],
            "torch_cudnn": ["ALiBi slopes"],
            "cudnn": [
                "ALiBi slopes that are not known to be the usual ones", "ALiBi slopes without a causal mask",
                "ALiBi slopes (cuDNN 9.8.0 on compute capability 8.0",
            ],
        },
    ),
    Row(
        "usual-alibi-training-h100", H100, ask(SQUARE, alibi_slopes=usual_slopes(16, "meta"), mask=masks.causal(), grad=True),
        "cudnn",
        {
            "torch_flash": ["ALiBi slopes (PyTorch builds"],
            "torch_efficient": ["ALiBi slopes"], "torch_cudnn": ["ALiBi slopes"],
        },
    ),
    Row(
        "usual-alibi-that-cudnn-does-not-compute", H100,
        ask(SQUARE, kv_len=8192, alibi_slopes=usual_slopes(16, "meta"), mask=masks.window(512, 512, "bottom_right")),
        "flash_attn",
        {
            "torch_flash": ["ALiBi slopes"], "torch_efficient": ["ALiBi slopes", "a sliding window"],
            "torch_cudnn": ["ALiBi slopes", "sliding window", "bottom-right"],
            "cudnn": ["without a causal mask", "with a sliding window", "with bottom-right alignment"],
        },
    ),
    Row(
        "softcap", A100, ask(SQUARE, softcap=30.0, grad=True), "flash_attn",
        {
            "torch_flash": ["softcap (PyTorch's operator"], "torch_efficient": ["softcap"], "torch_cudnn": ["softcap"],
            "cudnn": ["softcap (cuDNN has it only in hand-built graphs"],
        },
    ),
    Row(
        "sinks-b200-training", B200, ask(SQUARE, sinks=torch.empty(16, device="meta"), grad=True), "cudnn",
        {name: ["sinks"] for name in ("torch_flash", "torch_efficient", "torch_cudnn", "flex")},
    ),
    Row(
        "sinks-packed-h100-training", H100,
        ask((1, 4096, 16, 128), layout="thd", mask=DOCUMENTS & masks.causal(), sinks=torch.empty(16, device="meta"), grad=True),
        "cudnn",
        {
            "flash_attn": ["flash-attn 3: no support for sinks", "flash-attn 2: no support for sinks"],
            "torch_flash": ["sinks"], "flex": ["sinks"],
            "torch_efficient": ["sinks"], "torch_cudnn": ["sinks", "gradients of packed documents"],
        },
    ),
    Row(
        "sinks-that-cudnn-does-not-take",
        described("h100", "9.13.0", {"cudnn_frontend": "1.18", "triton": "3.4.0"}),
        ask((2, 1, 16, 128), kv_len=99, sinks=torch.empty(16, device="meta"), return_lse=True), "reference",
        {
            "flash_attn": ["flash_attn_3 3 or later is not installed", "flash-attn 3: no support for sinks"],
            **{name: ["sinks"] for name in ("torch_flash", "torch_efficient", "torch_cudnn", "flex")},
            "cudnn": [
                "sinks (cuDNN 9.13.0; from 9.13.1)", "sinks (nvidia-cudnn-frontend from 1.19)", "sinks for one query (min 2)",
                "the log-sum-exp returned with sinks",
            ],
        },
    ),
    Row(
        "sinks-a100", A100, ask(SQUARE, sinks=torch.empty(16, device="meta")), "reference",
        {name: ["sinks"] for name in ALL},
    ),
]  # fmt: skip


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.id)
def test_selection_on_a_described_machine(row: Row) -> None:
    check_row(row)

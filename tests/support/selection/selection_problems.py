"""Problems for the tests of selection."""

from __future__ import annotations

from typing import Any, Literal

import torch

from undivided import Machine, masks

EVERYTHING = {"triton": "3.5.0", "flash_attn": "2.8.3", "cudnn_frontend": "1.15.0"}


TORCH = "2.13.0"


def gpu(name: str, capability: tuple[int, int], cudnn: str | None, **packages: str) -> Machine:
    return Machine("cuda", name, capability, cudnn, packages, TORCH)


MACHINES = {
    "cpu": Machine("cpu", torch=TORCH, isa="AVX512"),
    "amx": Machine("cpu", torch=TORCH, isa="amx"),
    "t4": gpu("T4", (7, 5), "9.13.0", **EVERYTHING),
    "a100-bare": gpu("A100", (8, 0), "8.9.7", triton="3.5.0"),
    "a100": gpu("A100", (8, 0), "9.13.0", **EVERYTHING),
    "h100": gpu("H100", (9, 0), "9.16.0", flash_attn_3="3.0.0", **EVERYTHING),
    "b200": gpu("B200", (10, 0), "9.16.0", flash_attn_4="4.0.0", triton="3.5.0", cudnn_frontend="1.15.0"),
    "amd": Machine("cuda", "MI300X", None, None, {"triton": "3.5.0"}, TORCH, hip=True),
}


BF16, FP32 = torch.bfloat16, torch.float32


def meta(*shape: int, dtype: torch.dtype = BF16, grad: bool = False) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)


def case(
    mask: masks.Mask | None = None,
    *,
    q_len: int = 1024,
    kv_len: int = 1024,
    heads: int = 16,
    kv_heads: int = 16,
    dim: int = 128,
    v_dim: int | None = None,
    dtype: torch.dtype = BF16,
    grad: bool = False,
    layout: str = "bshd",
    page_size: int | None = None,
    quantized: torch.dtype | None = None,
    **features: Any,
) -> dict[str, Any]:
    """Arguments of `explain`."""
    lead = () if layout == "thd" else (2,)
    kv = (64, page_size, kv_heads) if page_size else (*lead, kv_len, kv_heads)
    arguments = {
        "q": meta(*lead, q_len, heads, dim, dtype=dtype, grad=grad),
        "k": meta(*kv, dim, dtype=quantized or dtype, grad=grad),
        "v": meta(*kv, v_dim or dim, dtype=quantized or dtype, grad=grad),
        "layout": layout,
        "mask": mask,
        **features,
    }
    if quantized is not None:
        arguments |= {name: meta(*kv, dtype=FP32) for name in ("k_scale", "v_scale")}
    return arguments | ({"pages": torch.empty(2, 8, dtype=torch.int32, device="meta")} if page_size else {})


BR: Literal["bottom_right"] = "bottom_right"


PACKED = masks.documents([0, 300, 1024])


PROBLEMS: dict[str, dict[str, Any]] = {
    "plain": case(),
    "plain-fp16": case(dtype=torch.float16),
    "plain-fp32": case(dtype=FP32),
    "plain-fp64": case(dtype=torch.float64),
    "train-causal": case(masks.causal(), grad=True),
    "train-causal-fp32": case(masks.causal(), grad=True, dtype=FP32),
    "short-fp32": case(q_len=16, kv_len=16, heads=4, kv_heads=4, dim=64, dtype=FP32),
    "train-short-fp32": case(q_len=16, kv_len=16, heads=4, kv_heads=4, dim=64, dtype=FP32, grad=True),
    "train-4-tokens": case(q_len=4, kv_len=4, grad=True),
    "train-1-token": case(q_len=1, kv_len=1, heads=4, kv_heads=4, grad=True),
    "train-gqa": case(masks.causal(), grad=True, kv_heads=4),
    "decode": case(masks.causal(BR), q_len=1, kv_len=4096, kv_heads=4),
    "decode-lengths": case(masks.causal(BR) & masks.lengths([9, 99]), q_len=1, kv_len=4096, kv_heads=4),
    "decode-pages-16": case(masks.causal(BR) & masks.lengths([9, 99]), q_len=1, kv_heads=4, page_size=16),
    "decode-pages-256": case(masks.causal(BR) & masks.lengths([9, 99]), q_len=1, kv_heads=4, page_size=256),
    "decode-int8": case(masks.causal(BR), q_len=1, kv_len=4096, kv_heads=4, quantized=torch.int8),
    "decode-pages-fp8": case(masks.lengths([9, 99]), q_len=1, kv_heads=4, page_size=16, quantized=torch.float8_e4m3fn),
    "prefill-top-left": case(masks.causal("top_left"), q_len=512),
    "prefill-bottom-right": case(masks.causal(BR), q_len=512),
    "train-window": case(masks.window(128, 0), grad=True),
    "two-sided-window": case(masks.window(128, 64)),
    "window-with-globals": case(masks.window(128, 0) | masks.prefix(4)),
    "prefix-lm": case(masks.causal() | masks.prefix(4)),
    "train-packed": case(PACKED & masks.causal(), grad=True, layout="thd"),
    "train-packed-slots": case(
        masks.documents([0, 300, 1000], padded_q=[0, 320, 1024]) & masks.causal(), grad=True, layout="thd"
    ),
    "train-padded": case(masks.causal() & masks.lengths([9, 99], [9, 99]), grad=True),
    "left-padded": case(masks.causal() & masks.lengths([9, 99], [9, 99], [3, 4], [3, 4])),
    "dense-mask": case(masks.dense(torch.ones(1024, 1024, dtype=torch.bool))),
    "predicate": case(masks.predicate(lambda b, h, i, j: i >= j)),
    "chunks": case(masks.chunks(128)),
    "bias": case(bias=meta(1, 16, 1024, 1024)),
    "train-bias-fp32": case(bias=meta(1, 16, 1024, 1024, dtype=FP32, grad=True), grad=True, dtype=FP32),
    "alibi": case(masks.causal(), alibi_slopes=meta(16, dtype=FP32)),
    "train-softcap": case(masks.causal(), grad=True, softcap=50.0),
    "train-sinks": case(masks.causal(), grad=True, sinks=meta(16, grad=True)),
    "train-dropout": case(masks.causal(), grad=True, dropout_p=0.1),
    "train-lse": case(masks.causal(), grad=True, return_lse=True),
    "train-mla": case(masks.causal(), grad=True, dim=192, v_dim=128),
    "train-head-320": case(masks.causal(), grad=True, dim=320),
    "head-100": case(dim=100),
    "no-keys": case(kv_len=0),
}

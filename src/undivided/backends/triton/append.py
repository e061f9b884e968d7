"""New tokens of a quantised cache on a GPU, by one launch in place of twenty tensor operations or more."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from undivided.backends.triton.launches import launch
from undivided.machine import Machine
from undivided.quantization import FORMAT_CODES, Format

MAX_REMEMBERED = 16
"""Tokens per sequence: launches for more, those of prefills of any length, are not remembered."""


@functools.cache
def runs_on(device: torch.device) -> bool:
    """Whether Triton is installed and compiles for this GPU."""
    from undivided.backends import get

    machine, backend = Machine.this(device), get("triton")
    if backend.unavailable(machine) is not None:
        return False
    (least, _), have = backend.limits.compute_capability, machine.compute_capability
    return have is None or least is None or have >= least


def append(pools: Sequence[Tensor], format: Format, k: Tensor, v: Tensor, rows: Tensor) -> None:
    """Quantise tokens and write them to pools.

    Args:
        pools: [P, R, N, D], and their scales, contiguous.
        format: of the pools.
        k, v: tokens [B, S, N, D], fp16, bf16 or fp32; the last axis has stride 1.
        rows: the row of the flattened pools of each token, int64 [B * S].
    """
    from undivided.kernels.triton.append import append_kernel

    k_pool, v_pool, k_scale, v_scale = pools
    if k_pool.dtype.is_floating_point:
        k_pool, v_pool = k_pool.view(torch.uint8), v_pool.view(torch.uint8)
    tensors = {"k": k, "v": v, "rows": rows, "k_pool": k_pool, "v_pool": v_pool, "k_scale": k_scale, "v_scale": v_scale}
    (batch, length, heads, k_dim), v_dim = k.shape, v.shape[3]
    steps = dict(zip(("k_b", "k_s", "k_h", "v_b", "v_s", "v_h"), (*k.stride()[:3], *v.stride()[:3]), strict=True))
    others = {
        **steps,
        "length": length,
        "HEADS": heads,
        "K_DIM": k_dim,
        "V_DIM": v_dim,
        "K_WIDTH": _width(k_dim),
        "V_WIDTH": _width(v_dim),
        "FORMAT": FORMAT_CODES[format],
        "num_warps": 1,
    }
    grid = (batch * length, heads, 1)
    if length <= MAX_REMEMBERED:
        launch(append_kernel, grid, (format,), tensors, lambda: others)
    else:
        append_kernel[grid](**tensors, **others)


def _width(dim: int) -> int:
    """Lanes of a row: a power of two, and whole groups of int4."""
    return max(32, 1 << (dim - 1).bit_length())

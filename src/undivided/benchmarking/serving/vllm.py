"""vLLM's attention operator for CPUs as a competitor, from a library built locally from vLLM's source distribution.

Source: github.com/vllm-project/vllm, csrc/cpu/cpu_attn.cpp and vllm/v1/attention/backends/cpu_attn.py, version 0.33.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from undivided.benchmarking.catalogue.benchmark import Absent

__all__ = ["LIBRARY", "attention"]

LIBRARY = "UNDIVIDED_VLLM_LIBRARY"
"""The environment variable with the path of a library that registers csrc/cpu/cpu_attn.cpp's three operators in the
namespace `vllm_cpu_attention`."""
PAGE = 128
"""Tokens per page, vLLM's default on a CPU."""
HEAD_DIM = 128
"""The only head size that the library has to be compiled for."""


@functools.cache
def _operators() -> Any:
    path = os.environ.get(LIBRARY, "")
    if not path:
        raise Absent(f"{LIBRARY} is not set (the path of a library with vLLM's CPU attention operators)")
    if not Path(path).is_file():
        raise Absent(f"{LIBRARY}={path} is not a file")
    torch.ops.load_library(path)
    return torch.ops.vllm_cpu_attention


def attention(
    q: Tensor, k: Sequence[Tensor], v: Sequence[Tensor], new: Sequence[int], scale: float
) -> Callable[[], Tensor]:
    """A call of the operator on a packed batch, causal within each sequence; it returns [T, H, D].

    Keys and values are in pages of the operator's own format. Its schedule is computed in advance, as vLLM does once
    per step for all layers.

    Args:
        q: [T, H, D], the new tokens of all sequences.
        k, v: one [L, N, D] per sequence.
        new: the new tokens of each sequence.
        scale: factor of the scores.

    Raises:
        Absent: the library is not available, or lacks this head size.
    """
    operators = _operators()
    if q.shape[2] != HEAD_DIM:
        raise Absent(f"head size {q.shape[2]} (it is timed only with {HEAD_DIM})")
    lengths = [len(x) for x in k]
    counts = [-(-length // PAGE) for length in lengths]
    heads, kv_heads, dim = q.shape[1], k[0].shape[1], q.shape[2]
    # vLLM stores keys, then values of a page and head
    pool = torch.zeros(sum(counts), kv_heads, 2 * PAGE, dim, dtype=q.dtype)
    k_cache, v_cache = pool.chunk(2, dim=2)
    table = torch.zeros(len(k), max(counts), dtype=torch.int32)
    slots, start = [], 0
    for row, count, length in zip(table, counts, lengths, strict=True):
        row[:count] = torch.arange(start, start + count, dtype=torch.int32)
        slots.append(torch.arange(length) + start * PAGE)
        start += count
    # the choice of vllm/v1/attention/backends/cpu_attn.py
    isa = "amx" if torch.cpu._is_amx_tile_supported() and q.dtype == torch.bfloat16 else "vec"
    operators.cpu_attn_reshape_and_cache(
        torch.cat(list(k)), torch.cat(list(v)), k_cache, v_cache, torch.cat(slots), isa, 1.0, 1.0, "auto"
    )
    offsets = torch.tensor([0, *accumulate(new)], dtype=torch.int32)
    kv_lengths = torch.tensor(lengths, dtype=torch.int32)
    schedule = operators.get_scheduler_metadata(
        len(k), heads, kv_heads, dim, kv_lengths, q.dtype, offsets, True, -1, isa, True, None, "auto"
    )
    q, out = q.contiguous(), torch.empty(q.shape, dtype=q.dtype)
    pages_and_rows = (q, k_cache, v_cache, out, offsets, kv_lengths, scale, True, None, -1, table, 0.0, schedule)

    def call() -> Tensor:
        operators.cpu_attention_with_kv_cache(*pages_and_rows, None, None, 1.0, 1.0, "auto")
        return out

    return call

"""New tokens that a kernel writes to the pools of a cache, quantised on the way.

One call does what four to forty tensor operations of `Storage` do: the native kernel on the CPU, with the same bits,
and a Triton kernel for quantised caches on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from undivided.arguments.tensors import is_traced
from undivided.backends import get, has_name
from undivided.backends._base import Backend
from undivided.backends.triton import append as triton
from undivided.kernels import cpu
from undivided.quantization import FORMAT_CODES, Format
from undivided.run.autograd import is_on_other_gpu
from undivided.selection.policy import current_policy

_SIZE, _PACK = cpu.APPEND_RECORD.size, cpu.APPEND_RECORD.pack


def append(
    pools: Sequence[Tensor], format: Format | None, k: Tensor, v: Tensor, rows: Tensor | None = None, first_row: int = 0
) -> bool:
    """Whether the tokens were written to the pools; False, and nothing is written, if only tensor operations can.

    Args:
        pools: the pools [P, R, N, D] and, if they are quantised, their scales; all contiguous.
        format: of the pools; None if they are not quantised.
        k, v: checked tokens [B, S, N, D].
        rows: the row of the flattened pools of each token, int64 [B * S], contiguous. None: sequence b is in page b.
        first_row: without `rows`, the row of a page that has its first token.
    """
    dtype = k.dtype
    if dtype not in cpu.DTYPES or v.dtype != dtype or is_traced() or forward_ad._current_level >= 0:
        return False
    if not (_has_rows(k) and _has_rows(v) and all(map(_is_whole, pools))):
        return False
    if _is_on_gpu(pools[0]):
        return format is not None and _append_on_gpu(pools, format, k, v, rows, first_row)
    return _append_on_cpu(pools, format, k, v, rows, first_row)


def _append_on_cpu(
    pools: Sequence[Tensor], format: Format | None, k: Tensor, v: Tensor, rows: Tensor | None, first_row: int
) -> bool:
    """`append` by the native kernel."""
    library, first_pool = cpu.load(), pools[0]
    if isinstance(library, str) or not (first_pool.is_cpu and k.is_cpu and v.is_cpu):
        return False
    if format is None and k.dtype != first_pool.dtype:
        return False
    k_address, v_address, *pool_addresses = addresses = [tensor.data_ptr() for tensor in (k, v, *pools)]
    if 0 in addresses:
        return False
    for pool, begin in zip(pools, pool_addresses, strict=True):
        if begin <= k_address < begin + pool.nbytes or begin <= v_address < begin + pool.nbytes:
            return False  # tokens of the cache itself
    library.append(_record(pools, format, k, v, rows, first_row, addresses))
    torch.autograd.graph.increment_version(pools)
    return True


def _record(
    pools: Sequence[Tensor],
    format: Format | None,
    k: Tensor,
    v: Tensor,
    rows: Tensor | None,
    first_row: int,
    addresses: Sequence[int],
) -> bytes:
    """The record of the native kernel, in the order of `cpu.APPEND_FIELDS`. addresses: of k, v and the pools."""
    (batch, length, heads, k_dim), (k_b, k_s, k_h, _) = k.shape, k.stride()
    v_b, v_s, v_h, _ = v.stride()
    pages, page_rows = pools[0].shape[:2]
    no_scales = () if len(pools) == 4 else (0, 0)
    return _PACK(
        _SIZE,
        cpu.DTYPES[k.dtype],
        FORMAT_CODES[format],
        torch.get_num_threads(),
        batch,
        length,
        heads,
        k_dim,
        v.shape[3],
        0 if rows is None else rows.data_ptr(),
        first_row,
        page_rows,
        pages * page_rows,
        addresses[0],
        k_b,
        k_h,
        k_s,
        addresses[1],
        v_b,
        v_h,
        v_s,
        *addresses[2:],
        *no_scales,
    )


def _is_on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _append_on_gpu(
    pools: Sequence[Tensor], format: Format, k: Tensor, v: Tensor, rows: Tensor | None, first_row: int
) -> bool:
    """`append` for quantised pools on the current GPU."""
    device = pools[0].device
    if is_on_other_gpu(k) or not (triton.runs_on(device) and _is_allowed(get("triton"))):
        return False
    if rows is None:
        pages, page_rows = pools[0].shape[:2]
        tokens = torch.arange(first_row, first_row + k.shape[1], device=device)
        rows = (torch.arange(0, pages * page_rows, page_rows, device=device)[:, None] + tokens).flatten()
    triton.append(pools, format, k, v, rows)
    torch.autograd.graph.increment_version(pools)
    return True


def _is_allowed(backend: Backend) -> bool:
    """Whether the settings allow the backend for calls that request none."""
    policy = current_policy()
    listed = policy.allowed is None or any(has_name(backend, word) for word in policy.allowed)
    return listed and not any(has_name(backend, word) for word, _ in policy.disabled)


def _is_whole(pool: Tensor) -> bool:
    """Whether the storage of a pool, which can be resized at any time, has all of its elements."""
    return type(pool) is Tensor and pool.untyped_storage().nbytes() >= pool.nbytes


def _has_rows(tensor: Tensor) -> bool:
    """Whether the values are in memory, those of a token and head side by side."""
    if type(tensor) is not Tensor or tensor.is_neg():
        return False
    return tensor.stride(3) == 1 or tensor.shape[3] == 1

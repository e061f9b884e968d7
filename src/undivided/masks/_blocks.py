"""``blocks`` and ``pages``: the masks of chosen key blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from undivided.arguments.checks import as_integer, check_int_dtype, check_tensor
from undivided.arguments.signature import checked_call
from undivided.errors import InputError
from undivided.masks._constructors import from_part
from undivided.masks._mask import Mask
from undivided.masks._parts import Blocks


@checked_call
def blocks(q_block: int, kv_block: int, table: Tensor | Sequence[Any]) -> Mask:
    """The pairs of a query block and the key blocks chosen for it: block-sparse attention, one choice per head.

    Query block a holds the queries ``a * q_block <= i' < (a + 1) * q_block`` of a sequence, key block c the keys
    ``c * kv_block <= j' < (c + 1) * kv_block``. The table is combined with other masks by ``&``, for example
    ``causal()``. On the CPU, time and memory of forward and gradients are proportional to the chosen blocks; on a GPU,
    those of the forward of ``triton``.

    Args:
        q_block, kv_block: queries and keys of a block, int, at least 1.
        table: the chosen key blocks in any order, any integer dtype, ``[A, n]``, ``[T, A, n]`` or ``[B, T, A, n]``: A
            query blocks of a sequence, n entries. -1 is an entry without a block; a repeated block counts once. T
            divides the heads: row t serves query heads ``[t * H / T, (t + 1) * H / T)``, so that T is usually 1, the
            key heads or the heads. B is the batch; in a pack, the documents.

    Returns:
        The pairs of the chosen blocks.

    Raises:
        InputError: a size is below 1; the table is not of integers, has another number of dimensions, or an entry
            below -1. A call raises it if the sizes do not fit, or an entry is not a block of its keys.

    Source: Lu et al. 2025, MoBA (arXiv:2502.13189); Yuan et al. 2025, Native Sparse Attention (arXiv:2502.11089).

    >>> from undivided.masks import *
    >>> print((blocks(2, 2, [[0, -1], [1, -1], [0, 2]]) & causal()).draw(6, 6))
      0 1 2 3 4 5
    0 ■ · · · · ·
    1 ■ ■ · · · ·
    2 · · ■ · · ·
    3 · · ■ ■ · ·
    4 ■ ■ · · ■ ·
    5 ■ ■ · · ■ ■
    """
    sizes = as_integer("q_block", q_block, 1), as_integer("kv_block", kv_block, 1)
    chosen = _table(table, (2, 3, 4))
    return from_part(Blocks(*sizes, chosen.reshape((1,) * (4 - chosen.dim()) + chosen.shape)))


@checked_call
def pages(table: Tensor | Sequence[Any], page_size: int) -> Mask:
    """The pairs of every query with the keys of chosen pages: decoding that reads a part of a cache.

    Page c holds the keys ``c * page_size <= j' < (c + 1) * page_size`` of a sequence. These are its pages in order, not
    indices of a pool: the block table of the call gives their places.

    Args:
        table: the chosen pages in any order, any integer dtype, ``[n]``, ``[B, n]`` or ``[B, T, n]``; -1 is an entry
            without a page. B and T as in ``blocks``.
        page_size: keys of a page, int, at least 1. It need not be the page size of the cache.

    Returns:
        The pairs of the chosen pages.

    Raises:
        InputError: as ``blocks``.

    Source: Tang et al. 2024, Quest (arXiv:2406.10774).

    >>> pages([[0, 2]], 2).to_dense(batch=1, heads=1, q_len=1, kv_len=6).int().tolist()
    [[[[1, 1, 0, 0, 1, 1]]]]
    """
    size = as_integer("page_size", page_size, 1)
    chosen = _table(table, (1, 2, 3))
    batch, entries = chosen.shape[:1] if chosen.dim() > 1 else (1,), chosen.shape[-1]
    heads = chosen.shape[1] if chosen.dim() == 3 else 1
    return from_part(Blocks(None, size, chosen.reshape(*batch, heads, 1, entries)))


def _table(table: Tensor | Sequence[Any], dimensions: tuple[int, ...]) -> Tensor:
    """The table as an integer tensor with one of these numbers of dimensions."""
    if isinstance(table, Tensor):
        chosen = table
    elif isinstance(table, list | tuple):
        try:
            chosen = torch.tensor(table, device="cpu")
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputError("table", "be nested lists of ints, of equal lengths", f"a list ({error})") from None
        chosen = chosen if chosen.numel() else chosen.to(torch.int32)
    else:
        raise InputError("table", "be an int tensor or nested lists of ints", type(table).__name__)
    check_tensor("table", chosen)
    if chosen.dtype == torch.bool:
        hint = "torch.where(table, torch.arange(table.shape[-1]), -1), if it is True for each chosen block"
        raise InputError("table", "hold the numbers of the chosen blocks", chosen.dtype, hint)
    check_int_dtype("table", chosen)
    if chosen.dim() not in dimensions:
        raise InputError("table", f"have {dimensions[0]} to {dimensions[-1]} dimensions", list(chosen.shape))
    return chosen

"""Tensors for wrong calls, and shorthands of calls: 5 queries of 4 heads, 7 keys of 2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import undivided
from undivided import masks
from undivided.backends import names_and_families

BACKENDS = ", ".join(sorted(names_and_families()))


def t(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


# 5 queries of 4 heads, 7 keys of 2; packed tokens; an output and its log-sum-exp; a pool of 6 pages of 4 keys and its
# table
Q, K, V, P = t(2, 5, 4, 8), t(2, 7, 2, 8), t(2, 7, 2, 6), t(9, 4, 8)
OUT, LSE = t(2, 5, 4, 8), t(2, 4, 5)
POOL, TABLE = t(6, 4, 2, 8), t(2, 3, dtype=torch.int32)
NESTED = torch.nested.nested_tensor([torch.zeros(3, 4, 8), torch.zeros(2, 4, 8)], layout=torch.jagged)


def att(q: Any = Q, k: Any = K, v: Any = V, layout: Any = "bshd", **arguments: Any) -> Any:
    return undivided.attention(q, k, v, layout=layout, **arguments)


def square(**arguments: Any) -> Any:
    return att(Q, Q, Q, **arguments)


def thd(q: Any = P, k: Any = P, v: Any = P, **arguments: Any) -> Any:
    return att(q, k, v, "thd", **arguments)


def paged(pages: Any = TABLE, mask: Any = masks.lengths([3, 9]), k: Any = POOL, v: Any = POOL) -> Any:  # noqa: B008
    return att(Q, k, v, pages=pages, mask=mask)


def autocast(call: Callable[[], Any]) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return call()


WrongCalls = dict[str, tuple[Callable[[], Any], str, str | None]]
"""call, message, hint"""

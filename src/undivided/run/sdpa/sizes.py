"""The sizes of query, key and value of `scaled_dot_product_attention`: whether they fit, and the layout of the result.

Legend: leading axes [...], B batch elements, H heads, L queries, S keys, D head size, E that of query, Ev of value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from undivided.arguments.checks import check_device, check_tensor
from undivided.arguments.layout import Layout
from undivided.arguments.tensors import is_dtensor
from undivided.errors import InputError
from undivided.request.checks import DTYPES


def is_plain(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> bool:
    """Whether the tensors are [B, H, S, D] as `attention` takes them: nothing to broadcast, nothing wrong."""
    try:
        q, k, v = query.shape, key.shape, value.shape
        return (
            len(q) == len(k) == len(v) == 4
            and (_fit_in_graph(q, k, v, enable_gqa) if torch.compiler.is_compiling() else _fit(q, k, v, enable_gqa))
            and query.dtype == key.dtype == value.dtype
            and query.dtype in DTYPES
            and query.device == key.device == value.device
            and query.layout == key.layout == value.layout == torch.strided
        )
    except (AttributeError, TypeError, RuntimeError):
        return False


def _fit(q: Sequence[int], k: Sequence[int], v: Sequence[int], enable_gqa: bool) -> bool:
    """Whether the sizes [B, H, S, D] of the three tensors fit and are not 0; those of L and S may be."""
    return (
        q[0] == k[0] == v[0]
        and k[1] == v[1]
        and (q[1] == k[1] or (enable_gqa and k[1] > 0 and q[1] % k[1] == 0))
        and k[2] == v[2]
        and q[3] == k[3]
        and q[1] > 0 < q[3]
        and v[3] > 0
    )


def _fit_in_graph(q: Sequence[int], k: Sequence[int], v: Sequence[int], enable_gqa: bool) -> bool:
    """As `_fit`. Sizes that a graph does not know (``mark_unbacked``, sizes read from values) are taken to fit: the
    operator checks them when it runs, except that it accepts fewer key heads without enable_gqa."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false, guard_or_true

    holds: Callable[[Any], bool] = guard_or_true
    if not (holds(q[1] > 0) and holds(k[1] > 0) and holds(q[3] > 0) and holds(v[3] > 0)):
        return False
    grouped = enable_gqa and not guard_or_false(q[1] == k[1])
    heads = q[1] % k[1] == 0 if grouped else q[1] == k[1]
    for condition in (heads, q[0] == k[0], k[0] == v[0], k[1] == v[1], k[2] == v[2], q[3] == k[3]):
        if not holds(condition):
            return False
    if not grouped:
        torch._check(heads)
    return True


def layout_in_memory(query: Tensor) -> Layout:
    """The layout in which query [B, H, L, E] lies in memory. The result lies in the same one, as PyTorch's does:
    callers rely on it with ``out.transpose(1, 2).view(B, L, H * E)``."""
    batch, heads, length, size = query.stride()
    holds: Callable[[Any], bool] = bool
    if torch.compiler.is_compiling():  # a size that depends on values has no order
        from torch.fx.experimental.symbolic_shapes import guard_or_false as holds
    if not holds(length > heads) or not holds(heads > 0) or holds(query.shape[2] == 1) or not holds(size == 1):
        return "bhsd"
    # a single head may have the stride of a batch element
    return "sbhd" if holds(length > batch) and holds(batch >= heads) else "bshd"


def output_shape(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[int, ...]:
    """The shape of the result; InputError if one of the three tensors is wrong."""
    named = {"query": query, "key": key, "value": value}
    kept = 3 if enable_gqa else 2  # axes that do not broadcast
    for name, tensor in named.items():
        if not is_dtensor(tensor):
            check_tensor(name, tensor)
        if tensor.dim() < kept:
            axes = "heads, length, head size" if enable_gqa else "length, head size"
            hint = f"{name}.unsqueeze(0), if it is one row" if tensor.dim() == 1 and kept == 2 else None
            raise InputError(name, f"have at least {kept} axes [..., {axes}]", list(tensor.shape), hint=hint)
    _check_dtypes_and_devices(named)
    if not _is_equal(key.shape[-1], query.shape[-1]):
        must = f"have the head size of query ({query.shape[-1]})"
        raise InputError("key", must, f"{key.shape[-1]} in {list(key.shape)}")
    if not _is_equal(value.shape[-2], key.shape[-2]):
        must = f"have the length of key ({key.shape[-2]})"
        raise InputError("value", must, f"{value.shape[-2]} in {list(value.shape)}")
    leading = _broadcast(named, kept)
    heads = _grouped_heads(query, key, value) if enable_gqa else ()
    return (*leading, *heads, query.shape[-2], value.shape[-1])


def _check_dtypes_and_devices(named: dict[str, Tensor]) -> None:
    query = named["query"]
    if query.dtype not in DTYPES:
        raise InputError("query", "be float16, bfloat16, float32 or float64", str(query.dtype))
    for name, tensor in named.items():
        if tensor.dtype != query.dtype:
            hint = f"{name}.to(query.dtype), or run under torch.autocast"
            raise InputError(name, f"have the dtype of query ({query.dtype})", str(tensor.dtype), hint=hint)
        check_device(name, tensor, query.device, "query")


def _broadcast(named: dict[str, Tensor], kept: int) -> tuple[int, ...]:
    """The common shape of all but the last `kept` axes."""
    rank = max(tensor.dim() for tensor in named.values()) - kept
    common = [1] * rank
    for name, tensor in named.items():
        for axis, size in enumerate(tensor.shape[:-kept], rank + kept - tensor.dim()):
            if is_size(size, 1):
                continue
            if not is_size(common[axis], 1) and not _is_equal(size, common[axis]):
                hint = None
                if axis == rank - 1 and kept == 2 and size and common[axis] % size == 0:
                    hint = "enable_gqa=True, if these are fewer key and value heads"
                must = f"broadcast to [{', '.join(map(str, common))}, ...] before its last {kept} axes"
                raise InputError(name, must, list(tensor.shape), hint=hint)
            common[axis] = size if is_size(common[axis], 1) else common[axis]
    return tuple(common)


def _grouped_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[int]:
    heads = query.shape[-3]
    for name, tensor in (("key", key), ("value", value)):
        if heads % tensor.shape[-3] if tensor.shape[-3] else heads:
            must = f"have a number of heads that divides query's ({heads})"
            raise InputError(name, must, f"{tensor.shape[-3]} in {list(tensor.shape)}")
    return (heads,)


def is_size(size: int, number: int) -> bool:
    """Whether a size is this number; False if a graph does not know it."""
    if torch.compiler.is_compiling():
        from torch.fx.experimental.symbolic_shapes import guard_or_false

        return guard_or_false(size == number)
    return size == number


def _is_equal(size: int, other: int) -> bool:
    """Whether two sizes are equal; if a graph does not know them, it checks that they are when it runs."""
    if torch.compiler.is_compiling():
        from torch.fx.experimental.symbolic_shapes import guard_or_true

        if not guard_or_true(size == other):
            return False
        torch._check(size == other)
        return True
    return size == other

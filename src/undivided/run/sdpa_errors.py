"""What PyTorch's scaled_dot_product_attention raises for a call that ours refuses: found by asking it, without data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from undivided.arguments.tensors import is_traced
from undivided.errors import InputError

_KINDS = (TypeError, NotImplementedError, IndexError, RuntimeError)
NO_KERNEL = "No viable backend for scaled_dot_product_attention was found. No available kernel. Aborting execution."
"""What PyTorch says where its switches leave no kernel: the first sentence where all are off, the others where one is
left."""


def as_pytorchs(error: InputError, *arguments: Any) -> InputError:
    """`error` as an exception that is of PyTorch's type as well and carries its message.

    Args:
        error: what our own checks raised.
        arguments: those of the call, in PyTorch's order: three tensors, attn_mask, dropout_p, is_causal, scale,
            enable_gqa.

    Returns:
        An `InputError` that is a RuntimeError, or whatever else PyTorch raises for the same arguments.
    """
    found = None if is_traced() else _asked(*arguments)
    kind = next((kind for kind in _KINDS if isinstance(found, kind)), RuntimeError)
    return error.as_also(kind, None if found is None else str(found).partition("\n")[0])


def _asked(query: Any, key: Any, value: Any, *others: Any) -> Exception | None:
    """What PyTorch raises: for the shapes, on meta tensors; then for dtypes and devices, on tensors of one element."""
    tensors = (query, key, value)
    given = [t for t in tensors if isinstance(t, Tensor)]
    if not all(map(_is_plain, (*given, *(o for o in others if isinstance(o, Tensor))))):
        return None
    if others[-1] is not False and any(t.dim() < 3 or t.shape[-3] == 0 for t in given):
        return None  # with enable_gqa it divides by the number of heads, which ends the process
    found = _raised(*map(_without_data, tensors), *map(_without_data, others))
    if found is None and len(given) == 3:
        found = _raised(*(t.new_empty((1,) * t.dim()) for t in tensors))
    return found


def _raised(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: Any = 0.0,
    is_causal: Any = False,
    scale: Any = None,
    enable_gqa: Any = False,
) -> Exception | None:
    if attn_mask is not None and is_causal is True and torch.backends.cuda.flash_sdp_enabled():
        is_causal = False  # PyTorch's flash kernel takes both; on meta tensors the math kernel answers, which does not
    try:
        torch._C._nn.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=attn_mask,
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
    except Exception as error:
        return error
    return None


def _is_plain(tensor: Tensor) -> bool:
    """Whether its sizes can be asked for: not of a nested tensor, a lazy parameter, or one that outlived its
    transform."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and not tensor.is_nested
        and (tensor.layout != torch.strided or torch._C._has_storage(tensor))
    )


def _without_data(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty(value.shape, dtype=value.dtype, device="meta")

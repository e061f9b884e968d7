"""The error of PyTorch's scaled_dot_product_attention for a call that ours refuses, found by a call on meta tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from undivided.arguments.tensors import is_traced
from undivided.errors import InputError

_KINDS = (TypeError, NotImplementedError, IndexError, RuntimeError)
NO_KERNEL = "No viable backend for scaled_dot_product_attention was found. No available kernel. Aborting execution."
"""PyTorch's messages if its switches leave no kernel: the first sentence if all are off, the others if one is on."""


def as_pytorch_error(error: InputError, *arguments: Any) -> InputError:
    """`error` as an exception that is also of PyTorch's type and contains PyTorch's message.

    Args:
        error: the error of our own checks.
        arguments: the arguments of the call, in PyTorch's order: three tensors, attn_mask, dropout_p, is_causal, scale,
            enable_gqa.

    Returns:
        An `InputError` that is also a RuntimeError, or of the type that PyTorch raises for the same arguments.
    """
    if isinstance(error, TypeError):  # an argument is missing: PyTorch raises the same
        return error
    theirs = None if is_traced() else _pytorchs_error(*arguments)
    kind = next((kind for kind in _KINDS if isinstance(theirs, kind)), RuntimeError)
    return error.as_also(kind, None if theirs is None else str(theirs).partition("\n")[0])


def _pytorchs_error(query: Any, key: Any, value: Any, *others: Any) -> Exception | None:
    """PyTorch's error for the shapes (with meta tensors), or else for dtypes and devices (tensors of one element)."""
    tensors = (query, key, value)
    present = [t for t in tensors if isinstance(t, Tensor)]
    if not all(map(_is_plain, (*present, *(o for o in others if isinstance(o, Tensor))))):
        return None
    if others[-1] is not False and any(t.dim() >= 3 and t.shape[-3] == 0 for t in present):
        return None  # with enable_gqa PyTorch divides by the number of heads, which ends the process
    options = dict(zip(("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"), others, strict=True))
    if others[0] is not None and options["is_causal"] is True and torch.backends.cuda.flash_sdp_enabled():
        # PyTorch's flash kernel takes both; meta tensors get the math kernel, which does not
        options["is_causal"] = False
    error = _error_of_call(map(_without_data, tensors), {name: _without_data(o) for name, o in options.items()})
    if error is None and len(present) == 3:
        error = _error_of_call((t.new_empty((1,) * t.dim()) for t in tensors), {})
    return error


def _error_of_call(tensors: Iterable[Any], options: Mapping[str, Any]) -> Exception | None:
    try:
        torch._C._nn.scaled_dot_product_attention(*tensors, **options)
    except Exception as error:
        return error
    return None


def _is_plain(tensor: Tensor) -> bool:
    """Whether its sizes can be read: not for a nested tensor, a lazy parameter, or one that outlived its transform."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and not tensor.is_nested
        and (tensor.layout != torch.strided or torch._C._has_storage(tensor))
    )


def _without_data(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty(value.shape, dtype=value.dtype, device="meta")

"""Tensors and options of valid small calls, and a function with its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

FP32: dict[str, Any] = {"dtype": torch.float32}


class PublicCall(NamedTuple):
    """A function, valid arguments by name, the object whose state an error must not change, arguments that stay as they
    are, because another call has them and each valid value takes long, and whether the call as it is has a result."""

    function: Callable[..., Any]
    arguments: dict[str, Any]
    owner: Any = None
    constant: tuple[str, ...] = ()
    is_valid: bool = True


def t(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


Q, K, V = t(2, 3, 2, 8), t(2, 3, 1, 8), t(2, 3, 1, 8)
OPTIONS: dict[str, Any] = {
    "layout": "bshd",
    "mask": None,
    "bias": None,
    "scale": None,
    "softcap": None,
    "alibi_slopes": None,
    "sinks": None,
    "dropout_p": 0.0,
    "dropout_seed": None,
    "backend": None,
    "deterministic": None,
    "batch_invariant": None,
    "return_lse": False,
    "pages": None,
    "k_scale": None,
    "v_scale": None,
}
QKV = {"q": Q, "k": K, "v": V}


def method_call(owner: Any, method: str, **arguments: Any) -> PublicCall:
    return PublicCall(getattr(owner, method), arguments, owner)


def all_options(owner: Callable[..., Any], **required: Any) -> dict[str, Any]:
    """Every parameter of a function with its default."""
    found = {
        name: p.default
        for name, p in inspect.signature(owner).parameters.items()
        if p.default is not p.empty and p.kind is not p.VAR_KEYWORD
    }
    return found | required

"""Formulas for PyTorch's FlopCounterMode: the products of all pairs, whatever the mask, as for PyTorch's attention."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from undivided.arguments import layout as _layout
from undivided.request.operations import backward_flops, forward_flops

Shape = Sequence[int]


def register_if_counting() -> None:
    """Register the formulas if the counter has been imported; importing it here would cost every program.

    A counter copies the formulas when it is created; one that was created before the registration gets them here.
    """
    if "torch.utils.flop_counter" not in sys.modules:
        return
    formulas = _register()
    for mode in _get_current_dispatch_mode_stack():
        counter = getattr(mode, "counter", None)
        if counter is not None and hasattr(counter, "flop_registry"):
            counter.flop_registry.update(formulas)


@functools.cache
def _register() -> dict[Any, Any]:
    """The formulas of both operators, registered with PyTorch."""
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    operators = torch.ops.undivided
    register_flop_formula(operators.attention)(_forward)
    register_flop_formula(operators.attention_backward)(_backward)
    return {operator: flop_registry[operator] for operator in (operators.attention, operators.attention_backward)}


def _forward(q: Shape, k: Shape, v: Shape, *rest: Any, **_: Any) -> int:
    """FLOPs of a forward pass. rest: as for `_pairs`."""
    v_scale = rest[13]
    is_int4 = v_scale is not None and len(v_scale) == len(v)  # two numbers in each byte of v
    return int(forward_flops(_pairs(q, k, rest), q[-1], v[-1] * (2 if is_int4 else 1)))


def _backward(q: Shape, k: Shape, v: Shape, *rest: Any, **_: Any) -> int:
    """FLOPs of a backward pass."""
    return int(backward_flops(_pairs(q, k, rest), q[-1], v[-1]))


def _pairs(q: Shape, k: Shape, rest: Sequence[Any]) -> int:
    """Number of pairs of a query and a key, in all heads. rest: the operator's arguments from the bias on."""
    pages, spec = rest[5], rest[6]
    layout = spec.partition("|")[0]
    batch, q_len, heads, _ = _layout.sizes(torch.Size(q), layout)
    kv_len = _layout.sizes(torch.Size(k), layout)[1] if pages is None else pages[1] * k[1]
    return batch * heads * q_len * kv_len

"""What PyTorch's FlopCounterMode counts for the operator: products of all pairs, whatever the mask, as for its own attention.

Source: the formulas of scaled_dot_product_attention in torch/utils/flop_counter.py (2.13): two products forward, five backward.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import torch

from undivided import _layout

Shape = Sequence[int]


def register_if_counting() -> None:
    """Register the formulas once somebody has imported the counter: importing it ourselves would cost every program."""
    if "torch.utils.flop_counter" in sys.modules:
        _register()


@functools.cache
def _register() -> None:
    from torch.utils.flop_counter import register_flop_formula

    operators = torch.ops.undivided
    register_flop_formula(operators.attention)(_forward)
    register_flop_formula(operators.attention_backward)(_backward)


def _forward(q: Shape, k: Shape, v: Shape, *rest: Any, **_: Any) -> int:
    return 2 * _pairs(q, k, rest) * (q[-1] + v[-1])


def _backward(q: Shape, k: Shape, v: Shape, *rest: Any, **_: Any) -> int:
    """The scores anew, and the gradients of weights, values, queries and keys."""
    return 2 * _pairs(q, k, rest) * (3 * q[-1] + 2 * v[-1])


def _pairs(q: Shape, k: Shape, rest: Sequence[Any]) -> int:
    """Of a query and a key, in all heads. rest: the operator's arguments from the bias on."""
    pages, spec = rest[5], rest[6]
    layout = spec.partition("|")[0]
    batch, q_len, heads, _ = _layout.sizes(torch.Size(q), layout)
    kv_len = _layout.sizes(torch.Size(k), layout)[1] if pages is None else pages[1] * k[1]
    return batch * heads * q_len * kv_len

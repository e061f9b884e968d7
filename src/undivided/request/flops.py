"""The floating-point operations of attention over some pairs of a query and a key; a multiply-add is two.

Source: torch/utils/flop_counter.py (2.13), which counts PyTorch's attention in the same way.
"""

from __future__ import annotations


def forward_flops(pairs: float, qk_dim: int, v_dim: int) -> float:
    """FLOP of a forward pass: two products, the scores and their product with the values.

    >>> forward_flops(10, 8, 4)
    240
    """
    return 2 * pairs * (qk_dim + v_dim)


def backward_flops(pairs: float, qk_dim: int, v_dim: int) -> float:
    """FLOP of a backward pass: five products, the scores again and the gradients of weights, values, queries and keys.

    >>> backward_flops(10, 8, 4)
    640
    """
    return 2 * pairs * (3 * qk_dim + 2 * v_dim)


def training_flops(pairs: float, qk_dim: int, v_dim: int) -> float:
    """FLOP of a forward and a backward pass: 3.5 times the forward pass if both head sizes are equal.

    >>> training_flops(10, 8, 8) / forward_flops(10, 8, 8)
    3.5
    """
    return forward_flops(pairs, qk_dim, v_dim) + backward_flops(pairs, qk_dim, v_dim)

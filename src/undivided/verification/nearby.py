"""Problems near a given one: almost the same numbers, with rounding errors of their own."""

from __future__ import annotations

import torch
from torch import Tensor

from undivided.request.request import Tensors
from undivided.verification.pieces import Upstream

__all__ = ["nearby"]

LARGEST_CHANGE = 1 / 32
"""The largest relative change of a number: eight roundings of bfloat16, so that few numbers stay as they are."""


def nearby(tensors: Tensors, upstream: Upstream, seed: int) -> tuple[Tensors, Upstream]:
    """The inputs of a problem with each number changed at random. Zeros, infinities and NaN stay, and so do integers.

    Args:
        tensors, upstream: of the problem.
        seed: for the changes.

    >>> tensors = Tensors(*(torch.full((1, 1, 1, 2), x) for x in (1.0, torch.inf, 0.0)))
    >>> near, _ = nearby(tensors, Upstream(torch.ones(1, 1, 1, 2)), seed=0)
    >>> bool(near.q.ne(1).all()), near.q.sub(1).abs().max().item() <= 1 / 32, near.k.tolist(), near.v.tolist()
    (True, True, [[[[inf, inf]]]], [[[[0.0, 0.0]]]])
    """
    generator = torch.Generator("cpu").manual_seed(seed)

    def changed(x: Tensor | None) -> Tensor | None:
        if x is None or not x.is_floating_point():
            return x
        random = torch.rand(x.shape, generator=generator, dtype=torch.float64, device="cpu")
        return (x.detach().double() * (1 + LARGEST_CHANGE * (2 * random - 1)).to(x.device)).to(x.dtype)

    return Tensors._make(map(changed, tensors)), Upstream._make(map(changed, upstream))

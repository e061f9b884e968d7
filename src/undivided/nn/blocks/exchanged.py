"""`exchanged`: a tensor after an exchange between tensor ranks, whose gradient is another exchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from undivided.nn.blocks.rank_calls import running_call
from undivided.run.batches import map_hidden_batch, vmap_rule

Exchange = Callable[[Tensor, str], Tensor]
"""A linear function of a tensor, which all ranks call together, and of the name of the step, for errors."""


def exchanged(x: Tensor, what: str, forward: Exchange, backward: Exchange) -> Tensor:
    """The tensor after `forward`; its gradient is `backward` of the gradient, and so on for every derivative.

    Failures of both name the step; those of a DTensor would name nothing.

    Args:
        x: this rank's tensor.
        what: what is exchanged, for errors.
        forward, backward: the exchanges, each the transpose of the other.
    """
    (result,) = _Exchanged.apply(x, forward, backward, f"{what} in {running_call()}")  # type: ignore[no-untyped-call]
    return result  # type: ignore[no-any-return]


class _Exchanged(torch.autograd.Function):
    """Each element of a batch is exchanged on its own, because a collective knows no batches of PyTorch."""

    @staticmethod
    def forward(x: Tensor, forward: Exchange, backward: Exchange, step: str) -> tuple[Tensor]:
        """The tensor after the exchange."""
        return (forward(x, step),)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
        _, ctx.forward_exchange, ctx.backward_exchange, ctx.step = inputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient after the other exchange."""
        step = f"the gradient of {ctx.step.removeprefix('the gradient of ')}"
        exchanges = ctx.backward_exchange, ctx.forward_exchange
        return *map_hidden_batch(_Exchanged.apply, gradient, *exchanges, step), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> tuple[Tensor]:
        """The tangent after the same exchange."""
        return _Exchanged.apply(tangent, ctx.forward_exchange, ctx.backward_exchange, ctx.step)  # type: ignore[no-untyped-call, no-any-return]

    @staticmethod
    def vmap(info: Any, axes: Sequence[Any], *arguments: Any) -> tuple[Any, Any]:
        """The exchange of each element."""
        return vmap_rule(_Exchanged, info, axes, arguments)

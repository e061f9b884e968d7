"""Batched gradients: a backward that is called for a batch of incoming gradients runs once per element.

PyTorch has two kinds of batch. `torch.vmap` and torch.func call the `vmap` method of an autograd.Function. The older
kind, of ``torch.autograd.grad(is_grads_batched=True)``, ``torch.autograd.functional.jacobian(vectorize=True)`` and
``gradcheck(check_batched_grad=True)``, calls no method: the backward gets tensors whose batch axis is hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Operation = Callable[..., Sequence[Tensor | None]]

_is_hidden = torch._C._functorch.is_legacy_batchedtensor
_LEVELS = 64
"""PyTorch's limit on the nesting of batches of the older kind."""


def map_hidden_batch(operation: Operation, *arguments: Any) -> tuple[Tensor | None, ...]:
    """The results of `operation`; it runs once per element if some of the arguments are batches of the older kind.

    Args:
        operation: takes the arguments, and returns tensors or None.
        arguments: tensors of any shape, and other values, which are passed on unchanged.

    Returns:
        The results of `operation`, with the batch axis hidden again.
    """
    batched = [isinstance(a, Tensor) and _is_hidden(a) for a in arguments]
    if not any(batched):
        return tuple(operation(*arguments))
    level = _level(arguments[batched.index(True)])
    arguments = tuple(
        torch._remove_batch_dim(a, level, 1, 0) if b else a for a, b in zip(arguments, batched, strict=True)
    )
    size = arguments[batched.index(True)].shape[0]
    results = map_elements(operation, size, [0 if b else None for b in batched], arguments)
    return tuple(None if t is None else torch._add_batch_dim(t, 0, level) for t in results)


def map_elements(
    operation: Operation, size: int, axes: Sequence[Any], arguments: Sequence[Any]
) -> tuple[Tensor | None, ...]:
    """The results of `operation` for each of `size` elements, stacked along a new first axis.

    Args:
        operation: takes the arguments, and returns tensors or None.
        size: number of elements, at least 1.
        axes: the batch axis of each argument; None, or a tuple of None for a named tuple, if it has none.
        arguments: tensors, and anything else.

    Returns:
        A tensor [size, ...] for each tensor that `operation` returns, and None for each None.
    """
    each = [
        operation(*(a.select(x, n) if isinstance(x, int) else a for a, x in zip(arguments, axes, strict=True)))
        for n in range(size)
    ]
    return tuple(None if results[0] is None else torch.stack(results) for results in zip(*each, strict=True))


def vmap_rule(
    function: type[torch.autograd.Function], info: Any, axes: Sequence[Any], arguments: Sequence[Any]
) -> tuple[tuple[Tensor | None, ...], tuple[int | None, ...]]:
    """The return value of a `vmap` method of `function`: its results for each element, and their batch axes."""
    results = map_elements(function.apply, info.batch_size, axes, arguments)
    return results, tuple(None if t is None else 0 for t in results)


def _level(tensor: Tensor) -> int:
    """The level of a batch of the older kind. Each is tried, because the thread of the backward may not know it."""
    for level in range(1, _LEVELS + 1):
        if not _is_hidden(torch._remove_batch_dim(tensor, level, 1, 0)):
            return level
    raise NotImplementedError("batched gradients inside of batched gradients; use torch.vmap")

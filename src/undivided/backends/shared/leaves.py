"""Gradients by PyTorch's autograd: leaves for a forward that it records, and their gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def recording() -> Iterator[None]:
    """Autograd records what follows, also below an operator of PyTorch's dispatcher: its kernels run with the dispatch
    key of autograd excluded, so that `torch.enable_grad` alone records nothing there, without an error."""
    key = torch._C.DispatchKey.AutogradFunctionality
    with torch.enable_grad(), torch._C._SetExcludeDispatchKeyGuard(key, False):
        yield


def make_leaves(tensors: Sequence[Tensor | None], needed: Sequence[bool]) -> list[Tensor | None]:
    """Detached tensors, None if there is none; those whose gradient is needed require it."""
    return [None if t is None else t.detach().requires_grad_(n) for t, n in zip(tensors, needed, strict=True)]


def leaf_gradients(
    outputs: Sequence[Tensor], grads: Sequence[Tensor], leaves: Sequence[Tensor | None], create_graph: bool = False
) -> list[Tensor | None]:
    """`torch.autograd.grad` with None for leaves that are None, need no gradient, or do not influence the outputs."""
    inputs = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    reached = [(o, g) for o, g in zip(outputs, grads, strict=True) if o.requires_grad]
    if not inputs or not reached:
        return [None] * len(leaves)
    gradients = iter(
        torch.autograd.grad(
            [o for o, _ in reached], inputs, [g for _, g in reached], allow_unused=True, create_graph=create_graph
        )
    )
    return [next(gradients) if leaf is not None and leaf.requires_grad else None for leaf in leaves]

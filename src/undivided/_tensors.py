"""What may be known of tensors without reading them: whether values are there, and whether they have changed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def readable(*tensors: Tensor | None) -> bool:
    """Whether the values may be looked at: plain CPU tensors, outside of torch.compile."""
    if torch.compiler.is_compiling():
        return False
    return all(
        t is None or (t.device.type == "cpu" and type(t) in (Tensor, torch.nn.Parameter)) for t in tensors
    )


def is_traced() -> bool:
    """Whether torch.compile, torch.func or a CUDA graph looks on: what is made now means nothing to the next call."""
    return (
        torch.compiler.is_compiling()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or is_captured()
    )


def is_captured() -> bool:
    """Whether a CUDA graph is being captured: nothing is computed until it is replayed, and then in memory of its own."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def versions(tensors: Sequence[Tensor]) -> tuple[int, ...] | None:
    """The tensors' in-place counters, or None where one has none (inference tensors, tracing)."""
    if torch.compiler.is_compiling():
        return None
    try:
        return tuple([t._version for t in tensors])
    except RuntimeError:  # raised by inference tensors; asking each first would cost every call
        return None

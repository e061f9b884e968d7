"""What `parallelize` tells the masks and the attention: the batch of the forward pass that runs now, and the attribute
of modules with their tensor parallel ranks."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Protocol

import torch

from undivided.integrations.transformers._model_mask import ModelMask
from undivided.integrations.transformers._patterns import Pattern

TENSOR_RANKS = "_undivided_tensor_ranks"
"""The attribute of a model's modules with the tensor parallel ranks that divide their heads."""


class ActiveBatch(Protocol):
    """A batch whose sequence is spread over ranks."""

    def model_mask(self, pattern: Pattern, batch: int, length: int) -> ModelMask:
        """The mask over the tokens of all ranks, for a model that sees [batch, length] tokens of this rank."""
        ...


_active: ContextVar[ActiveBatch | None] = ContextVar("undivided_active_batch", default=None)
"""None outside of the forward pass of a model that `parallelize` changed. Each thread has its own."""
_was_set = False


def set_active_batch(batch: ActiveBatch | None) -> None:
    """Set the batch of the forward pass that runs now in this thread; None after it."""
    global _was_set
    _was_set = True
    _active.set(batch)


def active_batch() -> ActiveBatch | None:
    """The batch of the forward pass that runs now. A read of the variable breaks a graph of torch.compile, so there is
    none before a first batch was set."""
    return None if torch.compiler.is_compiling() and not _was_set else _active.get()

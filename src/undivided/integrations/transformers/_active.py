"""The sharded batch of the forward pass that runs now; model masks and the attention read it."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Protocol

from undivided.integrations.transformers._model_mask import ModelMask
from undivided.integrations.transformers._patterns import Pattern


class ActiveBatch(Protocol):
    """A batch whose sequence is spread over ranks."""

    def model_mask(self, pattern: Pattern, batch: int, length: int) -> ModelMask:
        """The mask over the tokens of all ranks, for a model that sees [batch, length] tokens of this rank."""
        ...


ACTIVE: ContextVar[ActiveBatch | None] = ContextVar("undivided_active_batch", default=None)
"""None outside of the forward pass of a model that `parallelize` changed. Each thread has its own."""
TENSOR_RANKS = "_undivided_tensor_ranks"
"""The attribute of a model's modules with the tensor parallel ranks that divide their heads."""

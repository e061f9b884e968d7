"""Tensor parallelism of the layers on PyTorch's `DeviceMesh` and `DTensor`, and checkpoints of training."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from undivided.context_parallel.exchange.failures import rank_errors
    from undivided.parallel.checkpoint import Checkpoint, checkpoint_steps, load_checkpoint, save_checkpoint
    from undivided.parallel.clipping import clip_grad_norm_
    from undivided.parallel.state import own_state_dict, whole_state_dict
    from undivided.parallel.tensor import parallelize

__all__ = [
    "Checkpoint",
    "checkpoint_steps",
    "clip_grad_norm_",
    "load_checkpoint",
    "own_state_dict",
    "parallelize",
    "rank_errors",
    "save_checkpoint",
    "whole_state_dict",
]

# Imported at first use: DTensor and distributed checkpoints take a second to import, and `plan` needs neither.
_LAZY = {
    "Checkpoint": "parallel.checkpoint",
    "checkpoint_steps": "parallel.checkpoint",
    "clip_grad_norm_": "parallel.clipping",
    "load_checkpoint": "parallel.checkpoint",
    "own_state_dict": "parallel.state",
    "parallelize": "parallel.tensor",
    "rank_errors": "context_parallel.exchange.failures",
    "save_checkpoint": "parallel.checkpoint",
    "whole_state_dict": "parallel.state",
}


if not TYPE_CHECKING:  # or type checkers would accept every name

    def __getattr__(name: str) -> object:
        """A public name, which is imported at first use."""
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"undivided.{_LAZY[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    """The names of this package, including those that are imported at first use."""
    return sorted({*globals(), *__all__} - {"TYPE_CHECKING", "importlib"})

"""Tensor parallelism of the layers on PyTorch's `DeviceMesh` and `DTensor`, and checkpoints of training."""

from typing import TYPE_CHECKING

from undivided import _lazy

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
        return _lazy.first_use(__name__, _LAZY, name)


def __dir__() -> list[str]:
    """The names of this package, including those that are imported at first use."""
    return sorted({*globals(), *__all__} - {"TYPE_CHECKING"})

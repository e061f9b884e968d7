"""Tensor parallelism of the layers on PyTorch's `DeviceMesh` and `DTensor`, and checkpoints of training."""

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

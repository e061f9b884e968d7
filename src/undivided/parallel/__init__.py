"""Tensor and sequence parallelism of the layers, on PyTorch's `DeviceMesh` and `DTensor`."""

from undivided.parallel.state import own_state_dict, whole_state_dict
from undivided.parallel.tensor import parallelize

__all__ = ["own_state_dict", "parallelize", "whole_state_dict"]

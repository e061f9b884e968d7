"""Tensor and sequence parallelism of the layers, on PyTorch's `DeviceMesh` and `DTensor`."""

from undivided.parallel.tensor import parallelize

__all__ = ["parallelize"]

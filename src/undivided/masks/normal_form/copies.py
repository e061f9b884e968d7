"""Copies of a mask's numbers on the device of a call.

A CUDA graph cannot record a copy from ordinary memory of the CPU. A mask that has tensors on the GPU too is evaluated
anew in the graph, so its numbers on the CPU are copied once, before the capture, and kept until they change.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from undivided.arguments.tensors import is_captured, is_traced, versions

_kept: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""(device, dtype and versions of the tensor, its copy) by the tensor: the last copy of each."""


def int64_copy(tensor: Tensor, device: torch.device) -> Tensor:
    """An int64 copy on the device, which nothing may write to; later changes of the tensor do not affect it.

    >>> numbers = torch.tensor([3, 5])
    >>> copy = int64_copy(numbers, torch.device("cpu"))
    >>> numbers[0] = 4
    >>> copy
    tensor([3, 5])
    """
    return _copy(tensor, device, torch.int64)


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor itself if it is on the device, otherwise a copy there."""
    return tensor if tensor.device == device else _copy(tensor, device, tensor.dtype)


def _copy(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    if tensor.device.type != "cpu" or device.type == "cpu":
        return tensor.to(device, dtype, copy=True)
    captured = is_captured()
    if is_traced() and not captured:
        return tensor.to(device, dtype, copy=True)
    kind = device, dtype, versions((tensor,))
    kept = _kept.get(tensor)
    if kept is not None and kept[0] == kind and kind[2] is not None:
        copy: Tensor = kept[1]
        return copy
    copy = tensor.to(device, dtype, copy=True)
    if not captured:
        _kept[tensor] = kind, copy
    return copy

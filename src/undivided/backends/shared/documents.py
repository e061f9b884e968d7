"""Packed documents and lengths of sequences as kernels take them."""

from __future__ import annotations

import torch
from torch import Tensor

from undivided.masks._parts import Documents, Lengths, find_part
from undivided.request.call import Call


def packed_documents(call: Call) -> Documents | None:
    """The packed documents of the mask; None if there are none."""
    return find_part(call.mask.parts, Documents)


def sequence_lengths(call: Call) -> Lengths | None:
    """The lengths of the sequences of a batch; None if the mask has none."""
    return find_part(call.mask.parts, Lengths)


def as_offsets(tensor: Tensor, like: Tensor) -> Tensor:
    """Lengths or cumulative lengths as kernels read them: int32, contiguous, on the device of `like`."""
    return tensor.to(device=like.device, dtype=torch.int32).contiguous()

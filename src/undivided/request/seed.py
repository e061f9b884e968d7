"""Seeds: the one place that draws them, and the checks of a dropout's seed."""

from __future__ import annotations

import numbers

import torch
from torch import Tensor

from undivided.arguments.checks import check_tensor
from undivided.errors import InputError


def draw_seed(device: torch.device) -> Tensor:
    """A 0-d int64 seed from the generator of the device; recomputation in activation checkpointing draws it again.

    The operation writes to no memory, so that compiled calls and vmap draw the same seeds."""
    return torch.randint(2**62, (), device=device)


def draw_number() -> int:
    """A seed as an int, from the generator of the CPU, whatever the default device."""
    return int(draw_seed(torch.device("cpu")))


def checked_seed(seed: int | Tensor, device: torch.device) -> int | Tensor:
    """The dropout seed that the caller gave."""
    check_seed(seed, device)
    if isinstance(seed, Tensor):
        return seed.clone()  # the caller may increment it in place before the backward
    return int(seed)


def check_seed(seed: object, device: torch.device) -> None:
    """InputError unless it is a valid seed or None."""
    if seed is None:
        return
    if isinstance(seed, Tensor):
        check_tensor("dropout_seed", seed)
        if seed.dim() != 0 or seed.dtype != torch.int64:
            got = f"{seed.dtype} {list(seed.shape)}"
            hint = "dropout_seed.long().squeeze()" if seed.numel() == 1 else None
            raise InputError("dropout_seed", "be an int or a 0-d int64 tensor", got, hint)
        if seed.device.type not in (device.type, "cpu"):
            hint = "dropout_seed.to(q.device)"
            raise InputError("dropout_seed", f"be on the device of q ({device}) or the CPU", str(seed.device), hint)
    elif not isinstance(seed, numbers.Integral) or isinstance(seed, bool) or not 0 <= int(seed) < 2**63:
        raise InputError("dropout_seed", "be an int from 0 to 2**63 - 1 or a 0-d int64 tensor", repr(seed))

"""Calls over ranks under dispatch modes and recorders of graphs, and with results of functional collectives."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import undivided
from undivided import ContextParallel, masks
from undivided.context_parallel import simulate

LENGTH, WORLD = 8, 2
STRATEGIES = pytest.mark.parametrize("strategy", ["ring", "all_gather", "all_to_all"])


def whole(count: int = 3) -> list[Tensor]:
    """q, k and v of the whole sequence, the same on all ranks."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, LENGTH, 4, 8, generator=generator) for _ in range(count)]


def attend(tensors: Any, context: ContextParallel | None) -> Tensor:
    out = undivided.attention(*tensors, layout="bshd", mask=masks.causal(), context_parallel=context)
    assert isinstance(out, Tensor)
    return out


def save_everything(*_: object, **__: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


def of_rank(strategy: Any, check: bool, group: Any) -> list[float]:
    """The differences of gradients with a selective checkpoint from those of one process."""
    cp = ContextParallel(group, strategy, check=check)
    own = [cp.shard(tensor, "bshd").requires_grad_() for tensor in whole()]

    def step(*tensors: Tensor) -> Tensor:
        (x, *_) = (2 * tensor for tensor in tensors)
        out = attend((x, *tensors[1:]), cp).sin()
        factor = cp.max_logit(x, tensors[1], layout="bshd").sum() + 0 * cp.seed()
        return cp.unshard(out, "bshd").square() * factor

    policy = functools.partial(create_selective_checkpoint_contexts, save_everything)
    checkpoint(step, *own, use_reentrant=False, context_fn=policy).sum().backward()
    found = [tensor.grad for tensor in own]
    expected = torch.autograd.grad(step(*own).sum(), own)
    return [float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)]


@pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])
@STRATEGIES
def test_a_selective_checkpoint_may_save_every_operator(strategy: str, check: bool) -> None:
    """It refused buffers that were received into: a tensor cached during selective checkpointing has been mutated."""
    for differences in simulate(WORLD, functools.partial(of_rank, strategy, check)):
        assert max(differences) < 1e-6

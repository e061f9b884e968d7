"""Calls over ranks under dispatch modes and recorders of graphs, and with results of functional collectives."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import undivided
from undivided import ContextParallel, InputError, masks
from undivided.context_parallel import ContextPagedKVCache, simulate

LENGTH, WORLD = 8, 2
STRATEGIES = pytest.mark.parametrize("strategy", ["ring", "all_gather", "all_to_all"])


def whole(count: int = 3) -> list[Tensor]:
    """q, k and v of the whole sequence, the same on all ranks."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, LENGTH, 4, 8, generator=generator) for _ in range(count)]


def attend(tensors: Any, context: ContextParallel | None, **options: Any) -> Tensor:
    options = {"mask": masks.causal(), **options}
    out = undivided.attention(*tensors, layout="bshd", context_parallel=context, **options)
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


def attention_of(context: ContextParallel) -> Callable[[Tensor], Tensor]:
    return lambda x: attend((x, x, x), context)


def fake_inputs(context: ContextParallel) -> object:
    with FakeTensorMode():
        x = torch.empty(1, 4, 4, 8)
    return attention_of(context)(x)


class Layer(torch.nn.Module):
    def __init__(self, context: ContextParallel) -> None:
        super().__init__()
        self.context = context

    def forward(self, x: Tensor) -> Tensor:
        return attention_of(self.context)(x)


def fake(call: Callable[[Tensor, Any], object]) -> Callable[[ContextParallel | None], object]:
    def faked(context: ContextParallel | None) -> object:
        with FakeTensorMode():
            return call(torch.empty(1, 4, 4, 8), context)

    return faked


def paged(cp: ContextParallel) -> ContextPagedKVCache:
    """A cache of the tokens of `whole`."""
    cache = ContextPagedKVCache(cp, 4, page_size=4, kv_heads=4, head_dim=8, batch=1, dtype=torch.float32)
    cache.append(*whole()[1:])
    return cache


def fake_over_pages(cp: ContextParallel, name: str) -> object:
    """Attention over a cache with one tensor that holds no values, outside of the mode that made it."""
    with FakeTensorMode():
        given = {"q": torch.empty(1, 1, 4, 8), "bias": torch.empty(1, 4, 1, LENGTH)}
    real = {"q": torch.randn(1, 1, 4, 8), "bias": torch.zeros(1, 4, 1, LENGTH)} | {name: given[name]}
    return paged(cp).attend(real["q"], bias=real["bias"])


def over_pages(record: Callable[[Callable[[Tensor], Tensor]], object]) -> Callable[[ContextParallel], object]:
    """The attention over a cache, made outside of what records it, as a function of the queries."""

    def recorded(context: ContextParallel) -> object:
        cache = paged(context)
        return record(lambda x: cache.attend(x))

    return recorded


RECORDED: dict[str, tuple[Callable[[ContextParallel], object], str]] = {
    "fake tensors": (fake_inputs, "fake tensors"),
    "make_fx": (lambda cp: make_fx(attention_of(cp))(torch.randn(1, 4, 4, 8)), "make_fx or torch.export"),
    "export": (
        lambda cp: torch.export.export(Layer(cp), (torch.randn(1, 4, 4, 8),), strict=False),
        "(make_fx or torch.export|a FakeTensorMode)",
    ),
    "jit.trace": (lambda cp: torch.jit.trace(attention_of(cp), (torch.randn(1, 4, 4, 8),)), "torch.jit.trace"),
    "fake mode": (fake(lambda x, cp: attend((x, x, x), cp)), "a FakeTensorMode"),
    "max_logit": (fake(lambda x, cp: cp.max_logit(x, x, layout="bshd")), "a FakeTensorMode"),
    "unshard": (fake(lambda x, cp: cp.unshard(x, "bshd")), "a FakeTensorMode"),
    "seed": (fake(lambda x, cp: cp.seed()), "a FakeTensorMode"),
    "decode": (
        fake(lambda x, cp: cp.decode(x[:, :1], x, x, torch.arange(cp.rank, LENGTH, WORLD), LENGTH, layout="bshd")),
        "a FakeTensorMode",
    ),
    "attention over pages": (over_pages(lambda call: fake(lambda x, _: call(x))(None)), "a FakeTensorMode"),
    "fake queries over pages": (lambda cp: fake_over_pages(cp, "q"), "fake tensors"),
    "a fake bias over pages": (lambda cp: fake_over_pages(cp, "bias"), "fake tensors"),
    "make_fx over pages": (over_pages(lambda call: make_fx(call)(torch.randn(1, 1, 4, 8))), "make_fx or torch.export"),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
@pytest.mark.parametrize("name", RECORDED)
def test_a_call_over_ranks_cannot_be_recorded(name: str) -> None:
    """PyTorch's internal errors about values that depend on data ended these calls."""
    call, recorder = RECORDED[name]
    with pytest.raises(
        InputError, match=f"context_parallel must be None while a graph is .*, got {recorder}\n  HINT: "
    ):
        simulate(1, lambda group: call(ContextParallel(group)))


class Collected(torch.autograd.Function):
    """The tensor as a functional collective returns it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return AsyncCollectiveTensor(tensor.clone())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def results(cp: ContextParallel, own: Sequence[Tensor], change: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """The results of the calls over ranks, whose inputs are changed."""
    q, k, v = map(change, own)
    positions = torch.arange(cp.rank * k.shape[1], (cp.rank + 1) * k.shape[1])
    return [
        attend((q, k, v), cp),
        cp.max_logit(q, k, layout="bshd"),
        cp.unshard(q, "bshd"),
        *cp.decode(change(own[0][:, :1]), k, v, positions, LENGTH, layout="bshd"),
    ]


@STRATEGIES
def test_results_of_functional_collectives_are_waited_for(strategy: Any) -> None:
    """The native kernel refused them as tensors without memory."""

    def step(group: Any) -> list[bool]:
        cp = ContextParallel(group, strategy)
        own = [cp.shard(tensor, "bshd") for tensor in whole()]
        same = list(map(torch.equal, results(cp, own, Collected.apply), results(cp, own, torch.clone)))
        gradients = []
        for change in (Collected.apply, torch.clone):
            leaves = [tensor.clone().requires_grad_() for tensor in own]
            gradients.append(torch.autograd.grad(attend(map(change, leaves), cp).sum(), leaves))
        return [*same, *map(torch.equal, *gradients)]

    assert simulate(WORLD, step) == [[True] * 8] * WORLD


def flops(function: Callable[[], object]) -> dict[str, int]:
    """What PyTorch counts of a function, by operator."""
    with FlopCounterMode(display=False) as counter:
        function()
    return {str(operator): count for operator, count in counter.get_flop_counts()["Global"].items()}


@pytest.mark.parametrize("backend", ["native", "reference"])
@STRATEGIES
def test_flop_counters_count_the_rows_of_a_rank_with_all_keys(strategy: Any, backend: str) -> None:
    """They counted nothing, or the products that the reference happens to compute. All ranks add up to one process."""

    def train(tensors: Sequence[Tensor], context: ContextParallel | None) -> None:
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        attend(leaves, context, backend=backend).sum().backward()

    def step(group: Any) -> dict[str, int]:
        cp = ContextParallel(group, strategy)
        return flops(lambda: train([cp.shard(tensor, "bshd") for tensor in whole()], cp))

    alone = flops(lambda: train(whole(), None))
    assert simulate(WORLD, step) == [{name: count // WORLD for name, count in alone.items()}] * WORLD


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_flop_counters_count_decoding_with_the_keys_of_a_rank(backend: str) -> None:
    """They counted nothing, or the products of the reference. All ranks add up to one process."""
    q, k, v = whole()
    q = q[:, :2]

    def decoded(cp: ContextParallel) -> None:
        own = torch.arange(cp.rank, LENGTH, cp.world)
        cp.decode(q, k[:, own], v[:, own], own, LENGTH, layout="bshd", backend=backend)

    def attended(cp: ContextParallel) -> None:
        with undivided.use_backends(backend):
            paged(cp).attend(q)

    def step(group: Any) -> list[dict[str, int]]:
        return [flops(functools.partial(call, ContextParallel(group))) for call in (decoded, attended)]

    alone = flops(lambda: attend([q, k, v], None, backend=backend, mask=masks.causal("bottom_right")))
    each = {name: count // WORLD for name, count in alone.items()}
    assert simulate(WORLD, step) == [[each, each]] * WORLD

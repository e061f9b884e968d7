"""Calls that context parallelism refuses, on every rank: wrong arguments, ranks that differ, and ranks that end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import undivided
from undivided import masks
from undivided.context_parallel import RankError, simulate
from undivided.context_parallel.exchange.simulate import SimulatedGroup


def shards(cp: undivided.ContextParallel, length: int, **changes: Any) -> dict[str, Any]:
    """Arguments of a call of one rank."""
    q = cp.bind(length).shard(torch.randn(1, length, 2, 4), "bshd")
    return {"q": q, "k": q, "v": q, "layout": "bshd", "context_parallel": cp.bind(length), **changes}


DIFFERENT: dict[str, Callable[[undivided.ContextParallel], dict[str, Any]]] = {
    "mask": lambda cp: shards(cp, 12, mask=masks.causal() if cp.rank else masks.window(3, 0)),
    "mask-values": lambda cp: shards(cp, 12, mask=masks.lengths([12 - cp.rank])),
    "q": lambda cp: shards(cp, 12 if cp.rank else 15),
    "q-heads": lambda cp: shards(cp, 12, q=torch.randn(1, 4, 2 + 2 * (cp.rank == 2), 4)),
    "scale": lambda cp: shards(cp, 12, scale=0.3 if cp.rank else None),
    "dropout_p": lambda cp: shards(cp, 12, dropout_p=0.5, dropout_seed=cp.rank),
    "requires_grad": lambda cp: shards(cp, 12, v=torch.randn(1, 4, 2, 4, requires_grad=cp.rank == 1)),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_different_arguments_are_an_error_on_each_rank(what: str) -> None:
    def rank(group: SimulatedGroup) -> str:
        with pytest.raises(undivided.InputError, match=f"{what.split('-')[0]} must be the same on every rank"):
            undivided.attention(**DIFFERENT[what](undivided.ContextParallel(group)))
        return "raised"

    assert simulate(3, rank, timeout=20) == ["raised"] * 3


def _layer(cp: undivided.ContextParallel, **options: Any) -> undivided.DotProductAttention:
    layer = undivided.DotProductAttention(2, 4, qkv_format="bshd", **options)
    layer.set_context_parallel_group(cp)
    return layer


OTHER_CALLS: dict[str, tuple[Callable[[undivided.ContextParallel], undivided.DotProductAttention], str]] = {
    "train-and-eval": (
        lambda cp: _layer(cp, attention_dropout=0.1).train(cp.rank == 1),
        r"attention on ranks 0, 2; ContextParallel.seed\(\), for dropout in training mode on rank 1",
    ),
    "largest-scores": (
        lambda cp: _layer(cp, return_max_logit=cp.rank == 1),
        r"attention on ranks 0, 2; ContextParallel.max_logit\(\) on rank 1",
    ),
}


@pytest.mark.parametrize("name", OTHER_CALLS)
def test_a_rank_with_another_mode_of_a_layer_is_an_error_on_each_rank(name: str) -> None:
    """gloo ended the process: a seed is a message of another size than the comparison of arguments."""
    build, message = OTHER_CALLS[name]

    def rank(group: SimulatedGroup) -> None:
        cp = undivided.ContextParallel(group).bind(12)
        q = cp.shard(torch.randn(1, 12, 2, 4), "bshd")
        with pytest.raises(undivided.InputError, match=f"the call must be the same on every rank, got {message}"):
            build(cp)(q, q, q)

    simulate(3, rank, timeout=20)


OTHER_PARTS: dict[str, tuple[Callable[[int], Tensor], str]] = {
    "dtype": (
        lambda rank: torch.ones(2, 4, dtype=torch.float16 if rank == 1 else torch.bfloat16),
        "bfloat16 on ranks 0",
    ),
    "shape": (lambda rank: torch.ones(2 + rank, 4), r"\[2, 12\] in all, .* on rank 0; \[3, 12\] in all"),
}


@pytest.mark.parametrize("what", OTHER_PARTS)
def test_different_parts_of_a_whole_are_an_error_on_each_rank(what: str) -> None:
    """The numbers of another dtype were read as those of the rank's own; gloo ended ranks that sent more bytes."""
    build, message = OTHER_PARTS[what]

    def rank(group: SimulatedGroup) -> None:
        cp = undivided.ContextParallel(group).bind(12)
        with pytest.raises(undivided.InputError, match=f"shards must be the same on every rank, got .*{message}"):
            cp.unshard(build(cp.rank), dim=1)

    simulate(3, rank, timeout=20)


def test_a_rank_whose_part_has_another_length_is_an_error_on_each_rank() -> None:
    def rank(group: SimulatedGroup) -> None:
        cp = undivided.ContextParallel(group).bind(12)
        with pytest.raises(
            undivided.InputError if cp.rank == 1 else RankError, match="shards must have rank 1's 4 tokens"
        ):
            cp.unshard(torch.ones(3 if cp.rank == 1 else 4), dim=0)

    simulate(3, rank, timeout=20)


def test_different_strategies_are_an_error_on_each_rank() -> None:
    def rank(group: SimulatedGroup) -> None:
        cp = undivided.ContextParallel(group, "ring" if group.rank else "all_gather")
        with pytest.raises(undivided.InputError, match=r"all_gather on rank 0; ring on ranks 1, 2"):
            undivided.attention(**shards(cp, 12))

    simulate(3, rank, timeout=20)


def test_a_rank_that_refuses_its_arguments_is_an_error_on_the_others() -> None:
    def rank(group: SimulatedGroup) -> str:
        cp = undivided.ContextParallel(group)
        with pytest.raises(undivided.InputError if cp.rank == 1 else RankError) as raised:
            undivided.attention(**shards(cp, 12, scale=float("nan") if cp.rank == 1 else None))
        return str(raised.value)

    texts = simulate(3, rank, timeout=20)
    assert texts[0] == texts[2]
    assert "rank 1: scale must be a number from" in texts[0]


def test_a_rank_that_dies_is_an_error_on_the_others() -> None:
    told: dict[int, str] = {}

    def rank(group: SimulatedGroup) -> None:
        if group.rank == 2:
            raise ZeroDivisionError
        try:
            undivided.attention(**shards(undivided.ContextParallel(group), 12))
        except RankError as error:
            told[group.rank] = str(error)

    with pytest.raises(ZeroDivisionError):
        simulate(3, rank, timeout=20)
    assert all("rank 2 failed" in told[r] or f"rank {1 - r}" in told[r] for r in (0, 1)), told


def test_a_mask_changed_between_forward_and_backward_is_an_error() -> None:
    def rank(group: SimulatedGroup) -> None:
        cp = undivided.ContextParallel(group).bind(12)
        n = torch.tensor([9])
        q = torch.randn(1, 6, 2, 4, requires_grad=True)
        out = undivided.attention(q, q, q, layout="bshd", mask=masks.lengths(n), context_parallel=cp)
        n.fill_(5)
        with pytest.raises(RuntimeError, match="changed in place"):
            out.sum().backward()

    simulate(2, rank)


@pytest.mark.parametrize("loss", [torch.sum, lambda out: out.square().sum()], ids=["linear", "quadratic"])
def test_create_graph_is_refused_and_not_silently_wrong(loss: Callable[[Tensor], Tensor]) -> None:
    """A penalty on the gradients of a linear loss had no gradient of its own."""

    def rank(group: SimulatedGroup) -> None:
        q = torch.randn(1, 6, 2, 4, requires_grad=True)
        cp = undivided.ContextParallel(group).bind(12)
        out = undivided.attention(q, q, q, layout="bshd", context_parallel=cp)
        with pytest.raises(undivided.InputError, match="create_graph must be False under context parallelism"):
            torch.autograd.grad(loss(out), q, create_graph=True)

    simulate(2, rank)


def _forward_mode(function: Callable[[Tensor], Tensor], x: Tensor) -> None:
    with forward_ad.dual_level():
        function(forward_ad.make_dual(x, x))


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], object]] = {
    "grad": lambda function, x: torch.func.grad(lambda x: function(x).sum())(x),
    "vmap": lambda function, x: torch.func.vmap(function)(x[None]),
    "jvp": lambda function, x: torch.func.jvp(function, (x,), (x,)),
    "forward-mode": _forward_mode,
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_are_refused(name: str) -> None:
    """On one rank, because forward mode is a state of the whole process."""

    def rank(group: SimulatedGroup) -> None:
        arguments = shards(undivided.ContextParallel(group), 12)
        with pytest.raises(undivided.InputError, match=r"context_parallel must be None under torch\.func, vmap and"):
            TRANSFORMS[name](lambda q: undivided.attention(**arguments | {"q": q}), arguments["q"])  # type: ignore[arg-type, return-value]

    simulate(1, rank)


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "strategy": (lambda: undivided.ContextParallel(rank=0, world=2, strategy="rings"), "strategy must be one of"),  # type: ignore[arg-type]
    "placement": (lambda: undivided.ContextParallel(rank=0, world=2, placement="even"), "placement must be one of"),  # type: ignore[arg-type]
    "rank": (lambda: undivided.ContextParallel(rank=2, world=2), "rank must be given with world"),
    "no-group": (lambda: undivided.ContextParallel(), "group must be a process group"),
    "length": (lambda: undivided.ContextParallel(rank=0, world=2).bind(-1), "q_len must be a number of tokens"),
    "mask": (
        lambda: undivided.ContextParallel(rank=0, world=2).bind(8, mask=masks.lengths([9])),
        "mask must have lengths",
    ),
    "shard-length": (
        lambda: undivided.ContextParallel(rank=0, world=2).bind(8).shard(torch.ones(9), dim=0),
        "tensor must have the 8 tokens that were bound",
    ),
    "not-divisible": (
        lambda: undivided.ContextParallel(rank=0, world=2).shard(torch.ones(9), dim=0),
        "be bound: 9 tokens are not a multiple of 2 ranks",
    ),
    "axis": (lambda: undivided.ContextParallel(rank=0, world=2).shard(torch.ones(8)), "layout must be given"),
    "axis-beyond-the-last": (
        lambda: undivided.ContextParallel(rank=0, world=2).shard(torch.ones(8, 4), dim=2),
        "dim must be an axis of the tensor, -2 to 1, got 2",
    ),
    "axis-before-the-first": (
        lambda: undivided.ContextParallel(rank=0, world=2).shard(torch.ones(8, 4), dim=-3),
        "dim must be an axis of the tensor, -2 to 1, got -3",
    ),
    "axis-of-the-layout": (
        lambda: undivided.ContextParallel(rank=0, world=2).shard(torch.ones(8), "bshd"),
        r"tensor must have an axis 1, that of the tokens in layout 'bshd', got \[8\]",
    ),
    "tensor": (
        lambda: undivided.ContextParallel(rank=0, world=2).shard(8, dim=0),  # type: ignore[arg-type]
        "tensor must be a torch.Tensor, got int",
    ),
    "no-parts": (
        lambda: undivided.ContextParallel(rank=0, world=2).unshard([], dim=0),
        "shards must be a tensor, or the parts of all 2 ranks, got 0 parts",
    ),
    "parts": (
        lambda: undivided.ContextParallel(rank=0, world=2).unshard(8, dim=0),  # type: ignore[arg-type]
        "shards must be a tensor, or the parts of all 2 ranks, got int",
    ),
    "part": (
        lambda: undivided.ContextParallel(rank=0, world=2).unshard([torch.ones(4), 8], dim=0),  # type: ignore[list-item]
        r"shards\[1\] must be a torch.Tensor, got int",
    ),
    "of": (
        lambda: undivided.ContextParallel(rank=0, world=2).bind(8).shard(torch.ones(8), dim=0, of="k"),  # type: ignore[arg-type]
        "of must be one of 'q', 'kv'",
    ),
    "balanced-unbound": (
        lambda: undivided.ContextParallel(rank=0, world=2, placement="balanced").shard(torch.ones(8), dim=0),
        "be bound for placement='balanced'",
    ),
    "attend-without-a-group": (
        lambda: undivided.attention(**shards(undivided.ContextParallel(rank=0, world=2), 8)),
        "context_parallel must have a group to attend with",
    ),
    "function": (lambda: simulate(2, 3), "function must be a function of a group, got 3"),  # type: ignore[arg-type]
    "timeout": (
        lambda: simulate(2, lambda group: None, timeout="1"),  # type: ignore[arg-type]
        "timeout must be a positive number of seconds, got '1'",
    ),
    "not-one": (
        lambda: undivided.attention(*torch.ones(3, 1, 4, 2, 8), layout="bshd", context_parallel=4),  # type: ignore[call-overload]
        "context_parallel must be an undivided.ContextParallel or None",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused_before_anything_is_sent(name: str) -> None:
    call, text = WRONG[name]
    with pytest.raises(undivided.InputError, match=text):
        call()


WRONG_CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "rows": ({"q": torch.randn(1, 5, 2, 4)}, "q must have rank . of 12 tokens|q must have rank .'s 6 of 12 tokens"),
    "keys": ({"k": torch.randn(1, 7, 2, 4)}, "k must have rank .'s 6 of 12 tokens"),
    "layout": ({"layout": "bsd"}, "layout must be one of"),
    "seed": ({"dropout_p": 0.1}, "dropout_seed must be given under context parallelism"),
    "bias": ({"bias": torch.zeros(2, 12, 12)}, "bias must have 1 or this rank's 6 query rows"),
    "bias-keys": ({"bias": torch.zeros(2, 6, 6)}, "bias must be broadcastable to"),
    "mask": ({"mask": masks.lengths([13])}, "mask must have lengths"),
    "sinks": ({"sinks": torch.zeros(3)}, "sinks must have shape"),
    "pages": ({"pages": torch.zeros(1, 3, dtype=torch.int32)}, "pages must be None under context parallelism"),
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_wrong_arguments_of_a_call_are_the_callers_errors(name: str) -> None:
    changes, text = WRONG_CALLS[name]

    def rank(group: SimulatedGroup) -> None:
        with pytest.raises(undivided.InputError, match=text):
            undivided.attention(**{**shards(undivided.ContextParallel(group), 12), **changes})

    simulate(2, rank, timeout=20)


def test_a_rank_raises_its_own_error_if_another_has_left() -> None:
    def rank(group: SimulatedGroup) -> None:
        cp = undivided.ContextParallel(group)
        if cp.rank == 1:
            return
        with pytest.raises(undivided.InputError, match="scale must be"):
            undivided.attention(**shards(cp, 12, scale="bad"))

    simulate(2, rank, timeout=2)


def test_axes_of_the_group_must_be_those_of_the_strategy() -> None:
    with pytest.raises(undivided.InputError, match=r"group must have 2 axes \[ring, heads\]"):
        simulate(4, lambda group: undivided.ContextParallel(group, "ring+all_to_all"))
    with pytest.raises(undivided.InputError, match="group must have 1 axis"):
        simulate((2, 2), lambda group: undivided.ContextParallel(group, "ring"))
    with pytest.raises(undivided.InputError, match="world must be a positive number"):
        simulate(0, lambda group: None)

"""Placements: exact inverses, no lost tokens, balanced work."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import undivided
from undivided import masks
from undivided.context_parallel import Placement, simulate
from undivided.context_parallel.exchange.simulate import SimulatedGroup
from undivided.context_parallel.sharding import _owner, balanced, imbalance, row_pairs
from undivided.masks import Mask

NAMES = st.sampled_from(["zigzag", "contiguous", "balanced"])


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


@settings(max_examples=120, deadline=None)
@given(
    name=NAMES,
    world=st.integers(1, 9),
    lengths=st.lists(st.integers(0, 17), min_size=1, max_size=6),
    packed=st.booleans(),
)
def test_every_token_has_one_owner_and_is_gathered_again(
    name: str, world: int, lengths: list[int], packed: bool
) -> None:
    length = sum(lengths)
    mask = masks.documents(offsets(lengths)) & masks.causal() if packed else masks.causal()
    ranks = [
        undivided.ContextParallel(rank=r, world=world, placement=name).bind(length, mask=mask)  # type: ignore[arg-type]
        for r in range(world)
    ]
    held = [cp.positions(within_documents=False) for cp in ranks]
    assert torch.cat(held).sort().values.tolist() == list(range(length))
    assert all(bool((rows.diff() > 0).all()) for rows in held), "a rank's tokens are in ascending order"
    x = torch.randn(length, 3)
    shards = [cp.shard(x, dim=0) for cp in ranks]
    assert torch.equal(ranks[0].unshard(shards, dim=0), x)
    counts = [rows.numel() for rows in held]
    if not (packed and name == "zigzag"):
        # every chunk is within a token of its size
        assert max(counts) - min(counts) <= (64 if name == "balanced" else 2), counts


@settings(max_examples=60, deadline=None)
@given(world=st.integers(1, 6), chunks=st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_zigzag_of_divisible_documents_is_the_pair_of_chunks_of_each(world: int, chunks: list[int]) -> None:
    """As TransformerEngine, Megatron and Llama 3 cut them: rank r has chunks r and 2 * world - 1 - r."""
    edges = offsets([2 * world * size for size in chunks])
    length = int(edges[-1])
    placement = Placement.of("zigzag", world, length, None, masks.documents(edges))
    for rank in range(world):
        expected = [
            int(start) + chunk * size + n
            for start, size in zip(edges, chunks, strict=False)
            for chunk in (rank, 2 * world - 1 - rank)
            for n in range(size)
        ]
        assert placement.q[rank].tolist() == expected


@pytest.mark.parametrize("length", [8 * 1024, 10_007])
def test_zigzag_balances_a_causal_mask_to_two_percent(length: int) -> None:
    assert spread("zigzag", masks.causal(), length) <= 1.02
    assert spread("contiguous", masks.causal(), length) > 1.8


cu = offsets([3000, 200, 900, 17, 4000, 1, 1200, 650, 31, 2500])
MIXED: dict[str, tuple[Mask, int]] = {
    "documents": (masks.documents(cu) & masks.causal(), int(cu[-1])),
    "documents-every-pair": (masks.documents(cu), int(cu[-1])),
    "documents-one-long": (masks.documents(one := offsets([200] * 20 + [9000])) & masks.causal(), int(one[-1])),
    "window-with-prefix": (masks.window(500, 0) | masks.prefix(64), 9001),
    "prefix-lm": (masks.causal() | masks.prefix(3000), 9001),
    "chunks": (masks.chunks(700) & masks.causal(), 9001),
    "lengths": (masks.lengths(n := torch.tensor([9001, 400, 5000]), n) & masks.causal(), 9001),
    "dense-triangle": (masks.dense(torch.ones(901, 901, dtype=torch.bool).triu()), 901),
}


@pytest.mark.parametrize("name", MIXED)
def test_balanced_balances_any_mask_to_five_percent(name: str) -> None:
    mask, length = MIXED[name]
    assert spread("balanced", mask, length) <= 1.05
    assert spread("contiguous", mask, length) > 1.05 or name == "window-with-prefix"


def test_balanced_prefers_long_ranges() -> None:
    """The coarsest cut that is even enough: contiguous for a window, a pair of chunks for a causal mask."""
    window = Placement.of("balanced", 8, 4096, None, form=masks.window(8, 0).normal_form(1, 1, 4096, 4096, "cpu"))
    assert runs(window.q[3]) == 1
    causal = Placement.of("balanced", 8, 4096, None, form=masks.causal().normal_form(1, 1, 4096, 4096, "cpu"))
    assert torch.equal(causal.q_owner, Placement.of("zigzag", 8, 4096, None).q_owner)


def test_balanced_of_no_work_is_contiguous() -> None:
    assert balanced(torch.zeros(6), 3).tolist() == [0, 0, 1, 1, 2, 2]


def runs(rows: Tensor) -> int:
    return 1 + int((rows.diff() > 1).sum())


def spread(placement: str, mask: Mask, length: int, world: int = 8) -> float:
    """Largest over mean allowed pairs of 8 ranks, counted pair by pair where that is small enough to do."""
    batch = 3 if "lengths" in mask.kinds else 1
    form = mask.normal_form(batch, 1, length, length, "cpu")
    placed = Placement.of(placement, world, length, None, mask, form)  # type: ignore[arg-type]
    pairs = row_pairs(form)
    if length < 1000:
        assert torch.equal(pairs, mask.to_dense(batch, 1, length, length).sum((0, 1, 3)))
    return imbalance(torch.stack([pairs[rows].sum() for rows in placed.q]))


def test_positions_count_within_documents() -> None:
    mask = masks.documents(torch.tensor([0, 8, 16]))
    cp = undivided.ContextParallel(rank=1, world=2).bind(16, mask=mask)
    assert cp.positions().tolist() == [2, 3, 4, 5, 2, 3, 4, 5]
    assert cp.positions(within_documents=False).tolist() == [2, 3, 4, 5, 10, 11, 12, 13]


def test_keys_of_another_length_have_their_own_placement() -> None:
    ranks = [undivided.ContextParallel(rank=r, world=3).bind(5, 11) for r in range(3)]
    q, k = torch.arange(5), torch.arange(11)
    assert torch.equal(ranks[0].unshard([cp.shard(q, dim=0) for cp in ranks], dim=0), q)
    assert torch.equal(ranks[0].unshard([cp.shard(k, dim=0, of="kv") for cp in ranks], dim=0, of="kv"), k)


def test_sharding_and_gathering_are_differentiable() -> None:
    x = torch.randn(7, 2, requires_grad=True)
    ranks = [undivided.ContextParallel(rank=r, world=3).bind(7) for r in range(3)]
    weights = torch.randn(7, 2)
    (ranks[0].unshard([cp.shard(x, dim=0) for cp in ranks], dim=0) * weights).sum().backward()
    assert torch.equal(x.grad, weights)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["zigzag", "contiguous", "balanced"])
def test_ranks_that_were_used_in_inference_mode_serve_training(name: Any) -> None:
    """Autograd cannot save tensors of inference mode."""

    def rank(group: SimulatedGroup) -> None:
        cp, x = undivided.ContextParallel(group, placement=name), torch.randn(1, 38, 2, 4)
        bound = cp.bind(38, mask=masks.causal())
        ranks = [bound] if name == "balanced" else [cp, bound]
        for evaluates in (True, False):
            for cp in ranks:
                with torch.inference_mode(evaluates):
                    whole = x.clone().requires_grad_()
                    q = cp.shard(whole, "bshd")
                    out = undivided.attention(q, q, q, layout="bshd", mask=masks.causal(), context_parallel=cp)
                    loss = cp.unshard(out, "bshd").square().sum()
                if not evaluates:
                    assert torch.autograd.grad(loss, whole)[0].any()

    simulate(2, rank)


@pytest.mark.parametrize(
    "mask", [masks.causal(), masks.documents(torch.tensor([0, 7, 19])) & masks.causal()], ids=["causal", "packed"]
)
@pytest.mark.parametrize("name", ["zigzag", "contiguous", "balanced"])
def test_the_default_device_changes_no_placement(name: Any, mask: Mask) -> None:
    """As ``torch.set_default_device("cuda")``, or a model that is built on the meta device."""

    def rank(group: SimulatedGroup) -> list[int]:
        q = torch.randn(1, 19, 2, 4, device="cpu")
        with torch.device("meta"):
            cp = undivided.ContextParallel(group, placement=name).bind(19, mask=mask)
            own = cp.shard(q, "bshd")
            undivided.attention(own, own, own, layout="bshd", mask=mask, context_parallel=cp)
            return cp.positions().tolist()

    _owner.cache_clear()
    found = simulate(2, rank)
    ranks = [undivided.ContextParallel(rank=r, world=2, placement=name).bind(19, mask=mask) for r in range(2)]
    assert found == [cp.positions().tolist() for cp in ranks]


def test_a_placement_of_fake_tensors_serves_no_later_call() -> None:
    _owner.cache_clear()
    cp = undivided.ContextParallel(rank=0, world=2)
    with FakeTensorMode():
        cp.bind(18)
    assert type(cp.bind(18).positions()) is Tensor


def test_a_mask_of_no_batch_elements_is_bound() -> None:
    mask = masks.dense(torch.ones(0, 1, 6, 6, dtype=torch.bool))
    assert undivided.ContextParallel(rank=0, world=2, placement="balanced").bind(6, mask=mask).positions().numel() == 3

"""The bytes that each rank sends in one forward pass, by strategy, placement and mask."""

from __future__ import annotations

import pytest
import torch

import undivided
from undivided import masks
from undivided.context_parallel import simulate
from undivided.context_parallel.exchange.simulate import SimulatedGroup


def sent(
    strategy: str, placement: str, length: int, mask: masks.Mask, world: int, heads: int = 1
) -> list[undivided.context_parallel.Traffic]:
    """The traffic of every rank in one forward pass, head size 4, fp32."""
    q = torch.randn(1, length, heads, 4)

    def rank(group: SimulatedGroup) -> undivided.context_parallel.Traffic:
        cp = undivided.ContextParallel(group, strategy, placement).bind(length, mask=mask)  # type: ignore[arg-type]
        mine = cp.shard(q, "bshd")
        undivided.attention(mine, mine, mine, layout="bshd", mask=mask, context_parallel=cp)
        return cp.traffic

    return simulate(world, rank)


@pytest.mark.parametrize("length", [512, 4096])
def test_a_ring_under_a_window_sends_the_window_whatever_the_length(length: int) -> None:
    """Rank r needs only the 16 keys before its range; no rank needs those of the last one."""
    traffic = sent("ring", "contiguous", length, masks.window(16, 0), 8)
    bytes_of_a_key = 2 * 4 * 4
    assert [t.bytes_sent for t in traffic] == [16 * bytes_of_a_key] * 7 + [0]
    assert [t.messages for t in traffic] == [2] * 7 + [0]


def test_a_causal_zigzag_ring_sends_three_quarters() -> None:
    """The late chunk of a rank is requested only by ranks whose own late chunk is later."""
    traffic = sent("ring", "zigzag", 64, masks.causal(), 4)
    tokens = [t.bytes_sent // (2 * 4 * 4) for t in traffic]
    assert tokens == [8 * 3 + 8 * later for later in (0, 1, 2, 3)]


def test_documents_that_are_whole_on_a_rank_send_nothing() -> None:
    mask = masks.documents(torch.tensor([0, 16, 32, 48, 64])) & masks.causal()
    for strategy in ("ring", "all_gather"):
        traffic = sent(strategy, "contiguous", 64, mask, 4)
        assert [(t.bytes_sent, t.pairs) for t in traffic] == [(0, 136)] * 4

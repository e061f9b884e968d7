"""The memory of plans equals that of runs."""

from __future__ import annotations

import pytest
import torch
from live_bytes import LiveBytes, count_as_on_a_network

import undivided
from undivided import masks
from undivided.context_parallel import plan, simulate
from undivided.context_parallel.exchange.simulate import SimulatedGroup
from undivided.masks import Mask

pytestmark = pytest.mark.usefixtures("seen_inside")

MARGIN = 0.12
"""The largest relative difference between a plan and the peak of a run, in either direction."""

WORLDS: dict[str, int | tuple[int, int]] = {"ring": 4, "all_gather": 4, "all_to_all": 4, "ring+all_to_all": (2, 2)}
DOCUMENTS = torch.tensor([0, 100, 164, 700, 1000, 1024])
# placement, mask, heads, key heads, head sizes of q and v, batch
CASES: dict[str, tuple[str, Mask | None, int, int, tuple[int, int], int]] = {
    "causal-gqa": ("zigzag", masks.causal(), 8, 2, (32, 32), 1),
    "causal-contiguous": ("contiguous", masks.causal(), 4, 4, (32, 32), 1),
    "window": ("contiguous", masks.window(200, 0), 8, 4, (32, 32), 1),
    "documents": ("balanced", masks.documents(DOCUMENTS) & masks.causal(), 4, 4, (32, 32), 1),
    "every-pair-mla-two-rows": ("zigzag", None, 4, 4, (48, 32), 2),
    "heads-that-ranks-do-not-divide": ("zigzag", masks.causal(), 6, 2, (32, 32), 1),
}


def counted(name: str, strategy: str, dtype: torch.dtype) -> list[tuple[int, int]]:
    """(bytes of a forward pass without gradients, bytes of forward and backward) of every rank."""
    placement, mask, heads, kv_heads, (qk_dim, v_dim), batch = CASES[name]

    def rank(group: SimulatedGroup) -> tuple[int, int]:
        cp = undivided.ContextParallel(group, strategy, placement).bind(1024, mask=mask)  # type: ignore[arg-type]
        rows, most = cp.positions(within_documents=False).numel(), []
        for needed in (False, True):
            with LiveBytes() as live:
                q, k, v = (
                    torch.zeros(batch, rows, h, d, dtype=dtype, requires_grad=needed)
                    for h, d in ((heads, qk_dim), (kv_heads, qk_dim), (kv_heads, v_dim))
                )
                out = undivided.attention(q, k, v, layout="bshd", mask=mask, context_parallel=cp)
                if needed:
                    out.backward(torch.ones_like(out))
            most.append(live.most)
            del q, k, v, out
        return most[0], most[1]

    return simulate(WORLDS[strategy], rank)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("strategy", WORLDS)
@pytest.mark.parametrize("name", CASES)
def test_the_memory_of_a_run_equals_the_plan(
    name: str, strategy: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    count_as_on_a_network(monkeypatch)
    placement, mask, heads, kv_heads, (qk_dim, v_dim), batch = CASES[name]
    (option,) = plan(
        1024,
        heads,
        qk_dim,
        mask,
        4,
        strategy,
        placement,
        kv_heads=kv_heads,
        value_dim=v_dim,
        batch=batch,
        dtype=dtype,  # type: ignore[arg-type]
    ).options
    forward, both = (max(of) for of in zip(*counted(name, strategy, dtype), strict=True))
    assert int(option.inference.max()) == pytest.approx(forward, rel=MARGIN)
    assert int(option.memory.max()) == pytest.approx(both, rel=MARGIN)


def test_live_tensors_are_counted() -> None:
    """Views are not counted twice, released tensors are not counted, and temporaries of a kernel are."""
    with LiveBytes() as live:
        a = torch.zeros(10)
        b = a.view(2, 5)
        assert (live.now, live.most) == (40, 40)
        c = (a + 1).sum()
        assert (live.now, live.most) == (44, 84)
        del a
        assert live.now == 44, "the view holds it"
        del b, c
        assert live.now == 0

"""What plans count from ranges, against a count key by key and against four processes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import undivided
from gloo_ranks import run_ranks
from test_context_parallel_ranks import group_for
from undivided import masks
from undivided.context_parallel import Placement, plan
from undivided.context_parallel._arriving import _Runs, arriving, stretches
from undivided.context_parallel._schedule import Ranks
from undivided.masks import Mask

STRATEGIES = ("ring", "all_gather", "all_to_all", "ring+all_to_all")
OFFSETS = torch.tensor([0, 150, 157, 301, 302, 457])
CASES: dict[str, tuple[str, Mask]] = {
    "causal": ("zigzag", masks.causal()),
    "window": ("contiguous", masks.window(40, 0)),
    "documents": ("balanced", masks.documents(OFFSETS) & masks.causal()),
    "prefix": ("balanced", masks.causal() | masks.prefix(99)),
}


def counted() -> dict[tuple[str, str], tuple[int, ...]]:
    """In each rank: (pairs, bytes forward, bytes backward, exchanges forward) of 457 tokens, by mask and strategy."""
    groups = {strategy: group_for(strategy) for strategy in ("ring", "ring+all_to_all")}
    found = {}
    for name, (placement, mask) in CASES.items():
        for strategy in STRATEGIES:
            cp = undivided.ContextParallel(groups.get(strategy), strategy, placement).bind(457, mask=mask)  # type: ignore[arg-type]
            rows = cp.positions(within_documents=False).numel()
            q, k, v = (torch.randn(1, rows, h, d, requires_grad=True) for h, d in ((6, 8), (2, 8), (2, 4)))
            out = undivided.attention(q, k, v, layout="bshd", mask=mask, context_parallel=cp)
            pairs, sent, steps = cp.traffic.pairs, cp.traffic.bytes_sent, cp.traffic.steps
            out.sum().backward()
            found[name, strategy] = (pairs, sent, cp.traffic.bytes_sent - sent, steps)
    return found


@pytest.mark.slow
def test_four_processes_send_compute_and_exchange_what_the_plan_says() -> None:
    runs = run_ranks(4, counted)
    assert all(isinstance(run, dict) for run in runs), runs
    for name, (placement, mask) in CASES.items():
        for strategy in STRATEGIES:
            (option,) = plan(
                457, 6, 8, mask, 4, strategy, placement, kv_heads=2, value_dim=4, dtype=torch.float32  # type: ignore[arg-type]
            ).options  # fmt: skip
            said = (option.pairs, option.forward, option.backward, option.steps)
            planned = list(zip(*(counts.tolist() for counts in said), strict=True))
            assert planned == [run[name, strategy] for run in runs], (name, strategy)


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=9), ring=st.integers(1, 7), members=st.integers(1, 2),
    name=st.sampled_from(["zigzag", "contiguous", "balanced"]), kind=st.sampled_from(["causal", "all", "window"]),
)  # fmt: skip
def test_ranges_give_what_pairs_give(
    lengths: list[int], ring: int, members: int, name: str, kind: str
) -> None:
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    length = max(int(offsets[-1]), 1)
    offsets[-1] = length
    of = {"causal": masks.causal(), "all": masks.FULL, "window": masks.window(3, 2) | masks.prefix(1)}[kind]
    mask = of if kind == "window" else masks.documents(offsets) & of
    form = mask.normal_form(1, members, length, length, "cpu")
    placed = Placement.of(name, ring * members, length, None, mask, form)  # type: ignore[arg-type]
    ranks = Ranks(form, placed, (ring, members), members, members)
    pairs = mask.to_dense(1, members, length, length).any(0).any(0)
    slow = [[int(pairs[rows][:, keys].any(0).sum()) * (a != b) for b, keys in enumerate(ranks.key_lines)]
            for a, rows in enumerate(ranks.lines)]  # fmt: skip
    assert arriving(form, placed, ranks).tolist() == slow


@settings(max_examples=100, deadline=None)
@given(
    runs=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), min_size=1, max_size=30), data=st.data()
)
def test_stretches_over_runs_are_counted_key_by_key(runs: list[tuple[int, int]], data: st.DataObject) -> None:
    """Long and short runs, with stretches over more runs than a step of the table has."""
    owner = torch.tensor([rank for rank, size in runs for _ in range(size)])
    keys = st.integers(0, owner.numel())
    ranges = torch.tensor(data.draw(st.lists(st.tuples(keys, keys), max_size=6)), dtype=torch.int64).view(
        -1, 2
    )
    used = torch.zeros(owner.numel(), dtype=torch.bool)
    for start, stop in ranges.tolist():
        used[start:stop] = True
    assert (
        _Runs(owner, 3).counted(*stretches(ranges)).tolist()
        == torch.bincount(owner[used], minlength=3).tolist()
    )

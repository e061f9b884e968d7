"""Counts of plans, from ranges, compared with a count key by key."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from undivided import masks
from undivided.context_parallel import Placement
from undivided.context_parallel._schedule import MeshRanks
from undivided.context_parallel.plan.arrivals import OwnerRuns, count_arrivals, disjoint_ranges


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=9),
    ring=st.integers(1, 7),
    members=st.integers(1, 2),
    name=st.sampled_from(["zigzag", "contiguous", "balanced"]),
    kind=st.sampled_from(["causal", "all", "window"]),
)
def test_ranges_give_what_pairs_give(lengths: list[int], ring: int, members: int, name: str, kind: str) -> None:
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    length = max(int(offsets[-1]), 1)
    offsets[-1] = length
    of = {"causal": masks.causal(), "all": masks.FULL, "window": masks.window(3, 2) | masks.prefix(1)}[kind]
    mask = of if kind == "window" else masks.documents(offsets) & of
    form = mask.normal_form(1, members, length, length, "cpu")
    placed = Placement.of(name, ring * members, length, None, mask, form)  # type: ignore[arg-type]
    ranks = MeshRanks(form, placed, (ring, members), members, members)
    pairs = mask.to_dense(1, members, length, length).any(0).any(0)
    slow = [
        [int(pairs[rows][:, keys].any(0).sum()) * (a != b) for b, keys in enumerate(ranks.group_keys)]
        for a, rows in enumerate(ranks.group_rows)
    ]
    assert count_arrivals(form, placed, ranks).tolist() == slow


@settings(max_examples=100, deadline=None)
@given(runs=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), min_size=1, max_size=30), data=st.data())
def test_ranges_over_runs_equal_a_count_key_by_key(runs: list[tuple[int, int]], data: st.DataObject) -> None:
    """Long and short runs, with ranges over more runs than one row of the table covers."""
    owner = torch.tensor([rank for rank, size in runs for _ in range(size)])
    keys = st.integers(0, owner.numel())
    ranges = torch.tensor(data.draw(st.lists(st.tuples(keys, keys), max_size=6)), dtype=torch.int64).view(-1, 2)
    used = torch.zeros(owner.numel(), dtype=torch.bool)
    for start, stop in ranges.tolist():
        used[start:stop] = True
    assert (
        OwnerRuns(owner, 3).count(*disjoint_ranges(ranges)).tolist()
        == torch.bincount(owner[used], minlength=3).tolist()
    )

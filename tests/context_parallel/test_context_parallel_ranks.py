"""Context parallelism between processes: gloo, four and three of them, and what happens when one dies.

Starting processes costs more than what they compute, so one start does everything; each difference names its case.
"""

from __future__ import annotations

import datetime
import os
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from context_parallel_check import PLACEMENTS, alone, differences, grid, in_double, of_rank
from gloo_ranks import losses_of, run_ranks

import undivided
from undivided import masks
from undivided.context_parallel import RankError, plan
from undivided.context_parallel.exchange import reports
from undivided.context_parallel.exchange.collectives import CountingCommunicator
from undivided.masks import Mask
from undivided.verification.cases import CASES, Case

STRATEGIES = ("ring", "all_gather", "all_to_all")
FEATURES = (
    "bias-full-bhsd-causal",
    "bias-of-keys",
    "alibi-documents-thd",
    "sinks-causal-window-gqa",
    "softcap-1-saturated",
    "everything-together",
    "dropout-thd-padded-offsets",
    "mla-prefill-192-128",
    "lse-thd",
    "causal-bottom-right-decode",
    "no-keys",
    "many-queries-one-key",
    "gqa-of-a-prime-7-heads",
)


def cases(world: int) -> list[tuple[Case, str, str]]:
    """Every mask with every strategy, the placements in turn; with four ranks also every placement on the mesh."""
    found = [
        (case, placement, strategy)
        for n, (case, placement) in enumerate(grid())
        for strategy in STRATEGIES
        if (n + STRATEGIES.index(strategy) + world) % 3 == 0
    ]
    found += [(CASES[name], PLACEMENTS[n % 3], STRATEGIES[(n + world) % 3]) for n, name in enumerate(FEATURES)]
    if world == 4:
        found += [(case, placement, "ring+all_to_all") for n, (case, placement) in enumerate(grid()) if n % 2 == 0]
    return found


def group_for(strategy: str) -> Any:
    """The mesh of two axes, or all processes."""
    if strategy != "ring+all_to_all":
        return None
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "heads"))


def compare(world: int, group: Any) -> list[str]:
    """In each rank: every case, against one process, which the last rank computes."""
    groups = {"ring+all_to_all": group_for("ring+all_to_all")} if world == 4 else {}
    wrong = []
    for case, placement, strategy in cases(world):
        inputs = in_double(case)
        cp = undivided.ContextParallel(groups.get(strategy, group), strategy, placement)  # type: ignore[arg-type]
        found = of_rank(inputs, cp)
        if cp.rank == world - 1:
            wrong += [f"{case.name} {strategy}: {d}" for d in differences(found, alone(inputs, backend="reference"))]
    return wrong


def compare_four() -> list[str]:
    """All processes."""
    return compare(4, None)


def compare_three() -> list[str]:
    """Three of them."""
    group = torch.distributed.new_group([0, 1, 2])
    return compare(3, group) if torch.distributed.get_rank() < 3 else []


OFFSETS = torch.tensor([0, 150, 157, 301, 302, 457])
COUNTED: dict[str, tuple[str, Mask]] = {
    "causal": ("zigzag", masks.causal()),
    "window": ("contiguous", masks.window(40, 0)),
    "documents": ("balanced", masks.documents(OFFSETS) & masks.causal()),
    "prefix": ("balanced", masks.causal() | masks.prefix(99)),
}


def counted() -> dict[tuple[str, str], tuple[int, ...]]:
    """In each rank: (pairs, bytes forward, bytes backward, exchanges forward) of 457 tokens, by mask and strategy."""
    groups = {"ring+all_to_all": group_for("ring+all_to_all")}
    found = {}
    for name, (placement, mask) in COUNTED.items():
        for strategy in (*STRATEGIES, "ring+all_to_all"):
            cp = undivided.ContextParallel(groups.get(strategy), strategy, placement).bind(457, mask=mask)  # type: ignore[arg-type]
            rows = cp.positions(within_documents=False).numel()
            q, k, v = (torch.randn(1, rows, h, d, requires_grad=True) for h, d in ((6, 8), (2, 8), (2, 4)))
            out = undivided.attention(q, k, v, layout="bshd", mask=mask, context_parallel=cp)
            pairs, sent, steps = cp.traffic.pairs, cp.traffic.bytes_sent, cp.traffic.steps
            out.sum().backward()
            found[name, strategy] = (pairs, sent, cp.traffic.bytes_sent - sent, steps)
    return found


def planned() -> dict[tuple[str, str], list[tuple[int, ...]]]:
    """What plans say of `counted`, of every rank."""
    found = {}
    for name, (placement, mask) in COUNTED.items():
        for strategy in (*STRATEGIES, "ring+all_to_all"):
            (option,) = plan(
                457,
                6,
                8,
                mask,
                4,
                strategy,
                placement,
                kv_heads=2,
                value_dim=4,
                dtype=torch.float32,  # type: ignore[arg-type]
            ).options
            tensors = (option.pairs, option.forward, option.backward, option.steps)
            found[name, strategy] = list(zip(*(counts.tolist() for counts in tensors), strict=True))
    return found


PATIENCE, HANG = 20.0, 3.0
"""Timeouts of the groups in which a rank dies and in which a rank hangs, in seconds."""


def faults() -> dict[str, str]:
    """The errors that each rank gets; the last case ends rank 3."""
    rank = int(torch.distributed.get_rank())
    group = torch.distributed.new_group(timeout=datetime.timedelta(seconds=PATIENCE))
    told = {}
    q = torch.randn(1, 6, 2, 8)
    cp = undivided.ContextParallel(group).bind(24)
    wrong: dict[str, dict[str, Any]] = {
        "scale": {"scale": 0.5 + rank},
        "shape": {"q": torch.randn(1, 6 + (rank == 2), 2, 8)},
        "strategy": {"context_parallel": undivided.ContextParallel(group, "ring" if rank else "all_gather").bind(24)},
        "placement": {"context_parallel": undivided.ContextParallel(group, placement=PLACEMENTS[rank > 1]).bind(24)},
        "mask": {"mask": masks.window(3 + (rank == 2), 0)},
        "dtype": {name: q.to(torch.float64 if rank == 1 else torch.float32) for name in "qkv"},
    }
    right = {"q": q, "k": q, "v": q, "layout": "bshd", "mask": masks.causal(), "context_parallel": cp}
    for name, changes in wrong.items():
        try:
            undivided.attention(**{**right, **changes})
        except (undivided.InputError, RankError) as error:
            told[name] = f"{type(error).__name__}: {error}"
    undivided.attention(q, q, q, layout="bshd", context_parallel=cp)  # the group is as good as before
    slow = torch.distributed.new_group(timeout=datetime.timedelta(seconds=HANG))
    three = torch.distributed.new_group([0, 1, 2], timeout=datetime.timedelta(seconds=PATIENCE))
    if rank == 3:
        time.sleep(HANG + 4)  # the others wait for it until their timeout
    else:
        told |= fault("hang", undivided.ContextParallel(slow).bind(24), q)
    torch.distributed.barrier()
    late = torch.distributed.new_group(timeout=datetime.timedelta(seconds=HANG))
    if rank == 3:
        in_a_kernel(lambda: (time.sleep(HANG + reports.PATIENCE + 3), os._exit(1)))
    told |= fault("hang in a round", undivided.ContextParallel(late).bind(24), q)
    told |= fault("death", cp, q)
    if rank == 2:
        in_a_kernel(lambda: os._exit(1))
    return told | fault("death in a round", undivided.ContextParallel(three).bind(18), q)


def fault(name: str, context: undivided.ContextParallel, q: torch.Tensor) -> dict[str, str]:
    """The error of a call, and the seconds until it."""
    begun = time.monotonic()
    try:
        undivided.attention(q, q, q, layout="bshd", backend="reference", context_parallel=context)
    except RankError as error:
        return {name: f"{type(error).__name__}: {error}", f"seconds of {name}": f"{time.monotonic() - begun:.1f}"}
    return {}


def in_a_kernel(function: Callable[[], object]) -> None:
    """Call a function in the first round of the next call of this rank, before it has sent its keys to all others."""
    from undivided.backends import reference

    reference.Reference.forward = lambda *_: function()  # type: ignore[method-assign, assignment, return-value]


def check_faults(told_by_rank: list[Any]) -> None:
    """A fault on one rank is an error on every rank, within the timeout."""
    *alive, dying, dead = told_by_rank
    assert dying is None
    assert dead is None
    for rank, told in enumerate(alive):
        assert isinstance(told, dict), told
        assert "scale must be the same on every rank, got 0.5 on rank 0; 1.5 on rank 1;" in told["scale"]
        assert told["strategy"].startswith("InputError: strategy must be the same on every rank")
        assert told["placement"].startswith("InputError: placement must be the same on every rank")
        of_shape = "InputError: q must have rank 2's 6 of 24 tokens" if rank == 2 else "RankError: another rank refused"
        assert told["shape"].startswith(of_shape)
        assert told["mask"].startswith("InputError: mask must be the same on every rank, got window(3, 0")
        assert re.search(r"window\(4, 0.* on rank 2", told["mask"])
        assert re.search(r"q must be the same on every rank.*float64 on rank 1", told["dtype"])
        for name in ("hang", "death"):
            step = f"rank {rank} of 4: strategy 'ring': the comparison of arguments with rank 3 failed"
            assert told[name].startswith(f"RankError: {step}")
            assert "a rank ended, or did not make the same call within the group's timeout" in told[name]
            assert "the ranks of the group are the processes [0, 1, 2, 3]" in told[name]
        step = f"rank {rank} of 4: strategy 'ring': the exchange of keys and values for round "
        assert told["hang in a round"].startswith(f"RankError: {step}")
        # a rank that waits for one that waits follows its report
        assert re.search("with rank 3 failed|CAUSE: rank 3", told["hang in a round"]), told["hang in a round"]
        assert ("CAUSE: rank 3" in told["hang in a round"]) == (rank == 0)  # which waits for rank 1
        step = f"rank {rank} of 3: strategy 'ring': the exchange of keys and values for round "
        assert told["death in a round"].startswith(f"RankError: {step}")
        assert "of 3 with rank 2 failed" in told["death in a round"]
        assert HANG - 1 < float(told["seconds of hang"]) < HANG + 15
        assert float(told["seconds of death"]) < PATIENCE
        assert float(told["seconds of death in a round"]) < PATIENCE + 5


def order_of_events() -> list[str]:
    """What a rank does in a ring of two, in order."""
    from undivided.backends import reference

    events: list[str] = []
    group = torch.distributed.new_group([0, 1])
    if torch.distributed.get_rank() > 1:
        return events
    exchange, forward = CountingCommunicator.exchange, reference.Reference.forward

    def traced_exchange(self: CountingCommunicator, sends: Any, receives: Any, *step: str) -> Any:
        wait = exchange(self, sends, receives, *step)
        events.append("post")

        def traced_wait() -> None:
            events.append("wait")
            wait()

        return traced_wait

    def traced_forward(self: Any, *arguments: Any) -> Any:
        events.append("compute")
        return forward(self, *arguments)

    q = torch.randn(1, 8, 2, 4)
    cp = undivided.ContextParallel(group).bind(16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CountingCommunicator, "exchange", traced_exchange)
        patch.setattr(reference.Reference, "forward", traced_forward)
        undivided.attention(q, q, q, layout="bshd", backend="reference", context_parallel=cp)
    return events


@pytest.mark.slow
def test_processes_equal_one_process_send_what_the_plan_counts_and_report_errors() -> None:
    four, three, counts, events, told = run_ranks(4, compare_four, compare_three, counted, order_of_events, faults)
    assert four == [[]] * 4
    assert three == [[]] * 4
    assert all(isinstance(run, dict) for run in counts), counts
    assert {what: [run[what] for run in counts] for what in counts[0]} == planned()
    for of_rank_ in events[:2]:  # round t + 1 is posted before round t is computed, and waited for after it
        posts = [n for n, event in enumerate(of_rank_) if event == "post"]
        assert of_rank_[posts[-1] + 1 :][:2] == ["compute", "wait"], of_rank_
    check_faults(told)


@pytest.mark.slow
def test_losses_under_torchrun_are_those_of_one_process() -> None:
    """The training example, on 4 ranks and on one."""
    losses = [losses_of("14_train_context_parallel.py", ranks) for ranks in (1, 4)]
    assert len(losses[0]) == 8
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=0, atol=5e-5)

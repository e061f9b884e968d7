"""`explain` of a call of one rank: it communicates nothing, and takes meta tensors and described machines."""

from __future__ import annotations

import pytest
import torch

import undivided
from undivided import masks
from undivided.context_parallel import simulate
from undivided.context_parallel.exchange.simulate import SimulatedGroup


def test_explain_gives_the_decision_of_a_rank_without_communication() -> None:
    q = torch.empty(1, 16, 2, 8, dtype=torch.float32)
    cp = undivided.ContextParallel(rank=1, world=4).bind(64)
    decision = undivided.explain(q, q, q, layout="bshd", mask=masks.causal(), context_parallel=cp, backend="reference")
    assert decision.backend.name == "reference"
    assert (decision.problem.q_len, decision.problem.kv_len) == (16, 16)


H100 = undivided.Machine(device="cuda", compute_capability=(9, 0), packages={"flash_attn": "2.8.4"})


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "all_to_all"])
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_explain_decides_for_the_described_machine(device: str, strategy: str) -> None:
    """It once used the device of the tensors: for a described GPU it chose CPU kernels, and meta tensors raised
    NotImplementedError."""
    q = torch.empty(2, 256, 8, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
    cp = undivided.ContextParallel(rank=1, world=4, strategy=strategy).bind(1024, mask=masks.causal())
    n = torch.tensor([1000, 1024])
    mask = masks.causal() & masks.lengths(n, n)
    decision = undivided.explain(q, q, q, layout="bshd", mask=mask, context_parallel=cp, machine=H100)
    assert decision.problem.device == "cuda"
    assert decision.machine is H100
    assert decision.reasons["native"][0] == "device=cuda (runs on cpu)"
    assert decision.backend.limits.devices >= {"cuda"}


def test_explain_takes_meta_tensors_of_every_kind_for_this_machine() -> None:
    q, sinks = torch.empty(1, 4, 16, 8, device="meta"), torch.empty(4, device="meta")
    bias = torch.empty(4, 16, 64, device="meta")
    cp = undivided.ContextParallel(rank=1, world=4).bind(64)
    arguments = {
        "layout": "bhsd",
        "bias": bias,
        "sinks": sinks,
        "alibi_slopes": sinks,
        "dropout_p": 0.1,
        "dropout_seed": 3,
    }
    decision = undivided.explain(q, q, q, **arguments, context_parallel=cp)
    assert decision.chosen is not None
    assert decision.problem.device == ("cuda" if torch.cuda.is_available() else "cpu")


def test_values_are_required_if_the_plan_depends_on_them() -> None:
    q, n = torch.empty(1, 16, 2, 8, device="meta"), torch.tensor([60], device="meta")
    cp = undivided.ContextParallel(rank=1, world=4).bind(64)
    with pytest.raises(undivided.InputError, match="mask must hold values under context parallelism"):
        undivided.explain(q, q, q, layout="bshd", mask=masks.lengths(n), context_parallel=cp)

    def rank(group: SimulatedGroup) -> None:
        undivided.attention(q, q, q, layout="bshd", context_parallel=undivided.ContextParallel(group))

    with pytest.raises(undivided.InputError, match="q must hold values under context parallelism"):
        simulate(2, rank)

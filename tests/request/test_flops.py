"""The operations of a pass are counted in one way: by selection, benchmarks, plans and PyTorch's counter of FLOP."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import undivided
from undivided import masks
from undivided.benchmarking import runs
from undivided.benchmarking.catalogue import Benchmark
from undivided.benchmarking.competitors import prepare
from undivided.context_parallel import plan
from undivided.request.flops import backward_flops, forward_flops, training_flops
from undivided.selection.measured.cells import work
from undivided.verification.case import Case

SIZES = pytest.mark.parametrize(
    ("qk_dim", "v_dim"), [(8, 8), (16, 8), (8, 24)], ids=["equal", "long-keys", "long-values"]
)
LENGTH, HEADS = 4, 2
PAIRS = LENGTH * LENGTH * HEADS


@SIZES
def test_a_problem_of_training_counts_its_forward_and_its_backward(qk_dim: int, v_dim: int) -> None:
    q, k = (torch.randn(1, LENGTH, HEADS, qk_dim, requires_grad=True) for _ in range(2))
    problem = undivided.explain(q, k, torch.randn(1, LENGTH, HEADS, v_dim), layout="bshd").problem
    assert work(problem) == training_flops(PAIRS, qk_dim, v_dim)
    with torch.no_grad():
        problem = undivided.explain(q, k, torch.randn(1, LENGTH, HEADS, v_dim), layout="bshd").problem
    assert work(problem) == forward_flops(PAIRS, qk_dim, v_dim)


@SIZES
def test_benchmarks_count_the_pass_that_they_time(qk_dim: int, v_dim: int) -> None:
    case = Case("case", batch=1, q_len=LENGTH, heads=HEADS, qk_dim=qk_dim, v_dim=v_dim)
    for backward, flops in ((False, forward_flops), (True, backward_flops)):
        prepared = prepare(Benchmark("suite", case, torch.float32, backward=backward))
        assert runs.operations(prepared) == flops(PAIRS, qk_dim, v_dim)


@SIZES
def test_pytorchs_counter_counts_the_same(qk_dim: int, v_dim: int) -> None:
    q, k, v = (torch.randn(1, LENGTH, HEADS, dim, requires_grad=True) for dim in (qk_dim, qk_dim, v_dim))
    with FlopCounterMode(display=False) as counter:
        undivided.attention(q, k, v, layout="bshd").sum().backward()
    assert counter.get_total_flops() == training_flops(PAIRS, qk_dim, v_dim)


@SIZES
def test_plans_of_context_parallelism_count_the_same(qk_dim: int, v_dim: int) -> None:
    option = plan(LENGTH, HEADS, qk_dim, world=1, value_dim=v_dim, flops=1.0).best
    assert option.seconds == training_flops(PAIRS, qk_dim, v_dim)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_a_flop_counter_counts_the_products_of_all_pairs(layout: str) -> None:
    q = torch.randn(2, 8, 8, 16, requires_grad=True)
    k, v = (torch.randn(2, *((8, 2) if layout == "bshd" else (2, 8)), d, requires_grad=True) for d in (16, 24))
    with FlopCounterMode(display=False) as counter:
        out = undivided.attention(q, k, v, layout=layout, mask=masks.causal())
    pairs = 2 * 8 * 8 * 8
    assert counter.get_total_flops() == 2 * pairs * (16 + 24)
    with FlopCounterMode(display=False) as counter:
        undivided.attention(q, k, v, layout=layout).sum().backward()
    assert counter.get_total_flops() == 2 * pairs * (16 + 24) + 2 * pairs * (3 * 16 + 2 * 24)
    assert out.shape == (2, 8, 8, 24)

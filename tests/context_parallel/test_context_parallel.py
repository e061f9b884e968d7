"""All ranks in one process: every mask and feature with every strategy equals one process."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from calls import call_of
from context_parallel_check import PLACEMENTS, alone, differences, everyone, grid, in_double, of_rank
from torch import Tensor

import undivided
from undivided import masks
from undivided.context_parallel import simulate
from undivided.context_parallel.exchange.simulate import SimulatedGroup
from undivided.verification.budget import budget_for
from undivided.verification.cases import CASES, Case, get
from undivided.verification.inputs import Inputs, build
from undivided.verification.oracle import Upstream

WORLDS: dict[str, int | tuple[int, int]] = {"ring": 4, "all_gather": 3, "all_to_all": 4, "ring+all_to_all": (2, 2)}
UNPAGED = [case for case in CASES.values() if case.page_size is None and case.quantized is None]
TURNS = dict(zip([case.name for case in UNPAGED], itertools.cycle(itertools.product(WORLDS, PLACEMENTS)), strict=False))


def simulated(inputs: Inputs, strategy: str, placement: str) -> dict[str, Tensor]:
    """The result that the last rank gathers."""

    def rank(group: SimulatedGroup) -> dict[str, Tensor]:
        return of_rank(inputs, undivided.ContextParallel(group, strategy, placement))  # type: ignore[arg-type]

    return simulate(WORLDS[strategy], rank, timeout=30)[-1]


@pytest.mark.parametrize("strategy", WORLDS)
@pytest.mark.parametrize(("case", "placement"), [pytest.param(*both, id=both[0].name) for both in grid()])
def test_every_mask_with_every_strategy_and_placement(case: Case, placement: str, strategy: str) -> None:
    inputs = in_double(case)
    assert not differences(simulated(inputs, strategy, placement), alone(inputs, backend="reference"))


@pytest.mark.parametrize("case", UNPAGED, ids=lambda case: case.name)
def test_every_case_of_the_catalogue(case: Case) -> None:
    """Bias, sinks, slopes, softcap, dropout, scales, memory layouts, empty tensors, NaN in the padding."""
    inputs = in_double(case)
    assert not differences(simulated(inputs, *TURNS[case.name]), alone(inputs, backend="reference"))


def budgeted() -> Iterator[Any]:
    """Two dtypes of each case; the second takes as long as the first, and is merged in the same way."""
    for case in UNPAGED:
        for dtype in case.dtypes[:2]:
            slow = [pytest.mark.slow] * (dtype != case.dtypes[0])
            yield pytest.param(case, dtype, id=f"{case.name}-{str(dtype).removeprefix('torch.')}", marks=slow)


@pytest.mark.parametrize(("case", "dtype"), [*budgeted()])
def test_within_the_budget_of_a_single_kernel(case: Case, dtype: torch.dtype) -> None:
    """Partial results are merged in fp32, and gradients summed in it, so that many ranks are no less exact than one."""
    inputs = build(case, dtype)
    grad_lse = inputs.grad_lse
    if grad_lse is not None and case.layout == "thd":
        grad_lse = grad_lse.unsqueeze(0)
    budget = budget_for(*call_of(**inputs.arguments), Upstream(inputs.grad_out, grad_lse))
    found = simulated(inputs, *TURNS[case.name])
    wrong = {
        name: (budget.error(name, t), budget.max_errors[name]) for name, t in found.items() if not budget.met(name, t)
    }
    assert not wrong, (dtype, wrong)


@pytest.mark.parametrize("heads", [(18, 18), (18, 6), (2, 2), (3, 1), (10, 2)], ids=lambda h: f"{h[0]}-for-{h[1]}")
def test_all_to_all_with_heads_that_the_ranks_do_not_divide(heads: tuple[int, int]) -> None:
    """18 heads on 4 ranks are 4.5 per rank: a head that two ranks share is split by rows at half of its work."""
    inputs = in_double(Case("", q_len=61, heads=heads[0], kv_heads=heads[1], qk_dim=4, mask=masks.causal))
    assert not differences(simulated(inputs, "all_to_all", "zigzag"), alone(inputs, backend="reference"))
    q, k, v = (inputs.arguments[name].detach() for name in "qkv")

    def rank(group: SimulatedGroup) -> int:
        cp = undivided.ContextParallel(group, "all_to_all").bind(61)
        of = [cp.shard(t, "bshd") for t in (q, k, v)]
        undivided.attention(*of, layout="bshd", mask=masks.causal(), context_parallel=cp)
        return cp.traffic.pairs

    pairs = simulate(4, rank)
    assert sum(pairs) == 2 * heads[0] * 61 * 62 // 2
    assert max(pairs) <= 1.05 * sum(pairs) / 4


@pytest.mark.parametrize("strategy", WORLDS)
def test_another_mask_than_the_bound_one_is_correct_too(strategy: str) -> None:
    """Layers with different masks share one placement."""
    inputs = in_double(Case("", q_len=23, heads=4, mask=lambda: masks.window(2, 9)))

    def rank(group: SimulatedGroup) -> dict[str, Tensor]:
        cp = undivided.ContextParallel(group, strategy, "balanced")  # type: ignore[arg-type]
        return of_rank(inputs, cp.bind(23, mask=masks.causal() | masks.prefix(9)))

    for found in simulate(WORLDS[strategy], rank):
        assert not differences(found, alone(inputs, backend="reference"))


@pytest.mark.parametrize("placement", ["zigzag", "contiguous"])
def test_unbound_ranks_take_the_length_from_their_own_tokens(placement: str) -> None:
    inputs = in_double(Case("", q_len=24, heads=4, layout="sbhd", mask=masks.causal))

    def rank(group: SimulatedGroup) -> Tensor:
        cp = undivided.ContextParallel(group, "ring", placement)  # type: ignore[arg-type]
        q, k, v = (cp.shard(inputs.arguments[name].detach(), "sbhd") for name in "qkv")
        return cp.unshard(undivided.attention(q, k, v, layout="sbhd", mask=masks.causal(), context_parallel=cp), "sbhd")

    right = alone(inputs, backend="reference")["out"]
    assert not differences({"out": simulate(3, rank)[0]}, {"out": right})


def test_packed_documents_of_transformer_engine_need_no_binding() -> None:
    """Its partition: 2 * ranks chunks of every document, rank r holds r and 2 * ranks - 1 - r."""
    offsets = torch.tensor([0, 8, 24])
    inputs = in_double(
        Case("", layout="thd", batch=1, q_len=24, mask=lambda: masks.documents(offsets) & masks.causal())
    )
    held = [[0, 1, 6, 7, 8, 9, 10, 11, 20, 21, 22, 23], [2, 3, 4, 5, 12, 13, 14, 15, 16, 17, 18, 19]]

    def rank(group: SimulatedGroup) -> Tensor:
        cp = undivided.ContextParallel(group)
        q, k, v = (inputs.arguments[name].detach()[held[cp.rank]] for name in "qkv")
        return undivided.attention(q, k, v, layout="thd", mask=inputs.arguments["mask"], context_parallel=cp)

    right = alone(inputs, backend="reference")["out"]
    for rows, out in zip(held, simulate(2, rank), strict=True):
        assert not differences({"out": out}, {"out": right[rows]})


def test_a_bias_of_one_row_is_this_ranks_row_if_others_have_more() -> None:
    """7 rows on 4 ranks are 1 or 2 per rank: the bias of the last rank's single row could be taken for one of all
    rows."""
    inputs = in_double(Case("", q_len=7, heads=2, bias="1hqk"))
    for check in (True, False):

        def rank(group: SimulatedGroup, check: bool = check) -> dict[str, Tensor]:
            return of_rank(inputs, undivided.ContextParallel(group, "all_to_all", "contiguous", check=check))

        assert not differences(simulate(4, rank)[0], alone(inputs, backend="reference"))


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "all_to_all"])
def test_dropout_drops_what_one_process_drops(strategy: str) -> None:
    inputs = in_double(Case("", q_len=29, heads=5, dropout_p=0.4, mask=masks.causal))
    one = alone(inputs, backend="reference")
    assert not differences(simulated(inputs, strategy, "zigzag"), one)
    other = alone(inputs, backend="reference", dropout_seed=7)
    assert differences(one, other), "another seed drops others, so that the test can fail"


@pytest.mark.parametrize("strategy", WORLDS)
def test_a_batch_of_incoming_gradients_is_one_gradient_after_the_other(strategy: str) -> None:
    def rank(group: SimulatedGroup) -> None:
        cp = undivided.ContextParallel(group, strategy).bind(11)  # type: ignore[arg-type]
        q = cp.shard(torch.randn(1, 11, 4, 8), "bshd").requires_grad_()
        out = undivided.attention(q, q, q, layout="bshd", mask=masks.causal(), context_parallel=cp)
        incoming = torch.randn(3, *out.shape)
        (batched,) = torch.autograd.grad(out, q, incoming, is_grads_batched=True, retain_graph=True)
        each = [torch.autograd.grad(out, q, gradient, retain_graph=True)[0] for gradient in incoming]
        assert torch.equal(batched, torch.stack(each))

    simulate(WORLDS[strategy], rank)


@pytest.mark.parametrize("layout", ["bshd", "thd"])
@pytest.mark.parametrize("strategy", WORLDS)
def test_the_losses_of_some_ranks_only_may_use_the_log_sum_exp(strategy: str, layout: str) -> None:
    """With "all_to_all" the ranks then exchanged different numbers of tensors, which ended a process of gloo."""
    shapes = [(11, heads, 8) if layout == "thd" else (2, 11, heads, 8) for heads in (4, 2, 2)]
    q, k, v = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    mask = masks.causal() & masks.documents([0, 5, 11]) if layout == "thd" else masks.causal()

    def rank(group: SimulatedGroup) -> tuple[Tensor, list[Tensor]]:
        cp = undivided.ContextParallel(group, strategy, "contiguous").bind(11)  # type: ignore[arg-type]
        own = [cp.shard(t.detach(), layout).requires_grad_() for t in (q, k, v)]
        out, lse = undivided.attention(*own, layout=layout, mask=mask, context_parallel=cp, return_lse=True)  # type: ignore[call-overload]
        rows = torch.arange(11)[cp.positions()]
        loss = out.square().sum() + (lse.square().sum() if 0 in rows else 0)
        return (rows if 0 in rows else rows[:0]), [
            cp.unshard(gradient, layout) for gradient in torch.autograd.grad(loss, own)
        ]

    found = simulate(WORLDS[strategy], rank, timeout=30)
    rows = torch.cat([rows for rows, _ in found]).unique()
    out, lse = undivided.attention(q, k, v, layout=layout, mask=mask, return_lse=True, backend="reference")  # type: ignore[call-overload]
    right = torch.autograd.grad(out.square().sum() + lse[..., rows].square().sum(), (q, k, v))
    for ours, expected in zip(found[-1][1], right, strict=True):
        torch.testing.assert_close(ours, expected)


def test_the_same_backends_run_forward_and_backward() -> None:
    inputs = build(Case("", q_len=24, heads=4, mask=masks.causal), torch.float32)

    def rank(group: SimulatedGroup, backend: str) -> dict[str, Tensor]:
        return of_rank(inputs, undivided.ContextParallel(group), backend=backend)

    for name in ("torch_flash", "reference"):
        found = simulate(4, lambda group, name=name: rank(group, name))[0]  # type: ignore[misc]
        for quantity, right in alone(inputs, backend="reference").items():
            torch.testing.assert_close(found[quantity], right)
    with pytest.raises(undivided.NoBackendError, match="runs on cuda"):
        simulate(2, lambda group: rank(group, "torch_efficient"))


def test_a_compiled_model_runs_the_exchange_outside_its_graph() -> None:
    q = torch.randn(1, 12, 2, 8)

    def rank(group: SimulatedGroup) -> Tensor:
        cp = undivided.ContextParallel(group).bind(12)

        def model(x: Tensor) -> Tensor:
            return 2 * undivided.attention(x, x, x, layout="bshd", mask=masks.causal(), context_parallel=cp)

        found = torch.compile(model, backend="eager")(q)
        torch.testing.assert_close(found, model(q))
        return found

    assert simulate(1, rank)[0].shape == q.shape


def test_the_helper_everyone_gathers_the_tensors_of_all_ranks() -> None:
    """The helper of these tests returns the tensors in the order of the ranks."""

    def rank(group: SimulatedGroup) -> list[Tensor]:
        return everyone(undivided.ContextParallel(group, "ring+all_to_all"), torch.tensor([float(group.rank)]))

    for found in simulate((2, 3), rank):
        assert torch.cat(found).tolist() == [0, 1, 2, 3, 4, 5]


def test_a_window_of_the_catalogue_is_wrong_if_positions_are_mixed_up() -> None:
    """These tests can fail: with another placement for the result than for the inputs, the result differs."""
    inputs = in_double(get("window-left3"))
    right = alone(inputs, backend="reference")
    shuffled = {name: t.flip(1) if name == "out" else t for name, t in right.items()}
    assert differences(shuffled, right)

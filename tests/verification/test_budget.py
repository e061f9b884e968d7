"""The error budget: its formula, results that are infinitely wrong, and gradients of few numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from verification_problems import DTYPES, request_of

import undivided
from undivided import masks
from undivided.backends import reference
from undivided.request.normalise import normalise
from undivided.request.request import Request
from undivided.verification import oracle, verify
from undivided.verification.budget import FACTOR, Budget, budget_for, distance
from undivided.verification.cases import CASES, Case
from undivided.verification.pieces import Upstream
from undivided.verification.plain_attention import IN_SEQUENCE, REVERSED, orders
from undivided.verification.plain_attention import plain as plain_attention


def test_the_budget_is_twice_the_plain_error_and_one_rounding() -> None:
    call, given, upstream = request_of(CASES["plain-bshd"], torch.bfloat16)
    budget: Budget = budget_for(call, given, upstream)
    plain = plain_attention(call, given, upstream, torch.bfloat16)
    once = distance(plain["out"], budget.right["out"]) / float(budget.right["out"].norm())
    eps = torch.finfo(torch.bfloat16).eps
    assert FACTOR == 2
    assert 2 * once + eps <= budget.max_errors["out"] < 3 * once + eps
    assert undivided.verify is verify


@pytest.mark.parametrize("dtype", [DTYPES[0], *(pytest.param(d, marks=pytest.mark.slow) for d in DTYPES[1:])], ids=str)
@pytest.mark.parametrize("case", list(CASES.values()), ids=str)
def test_zeros_are_never_within_a_budget(case: Case, dtype: torch.dtype) -> None:
    """Unless zero is right: then the budget is only the rounding."""
    budget = budget_for(*request_of(case, dtype))
    assert not budget.undecided
    for name, right in budget.right.items():
        size = float(right[right.isfinite()].norm())
        if size > 0 and budget.scale[name] == size:
            assert budget.max_errors[name] < 0.5, name
        else:
            assert size < budget.max_errors[name] * budget.scale[name] < 1, name


def _of_one_number(seed: int, dtype: torch.dtype, argument: str) -> dict[str, Any]:
    """A problem of one head, in which the gradient of its slope or its sink is a single number."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, length, 1, 32, generator=generator).to(dtype) for length in (61, 97, 97))
    number = torch.rand(1, generator=generator)
    return {
        "q": q,
        "k": k,
        "v": v,
        "layout": "bshd",
        "mask": masks.window(None, None, "bottom_right"),
        argument: number,
    }


@pytest.mark.parametrize(
    ("dtype", "argument", "seed"),
    [
        (torch.bfloat16, "alibi_slopes", 26),
        (torch.bfloat16, "sinks", 57),
        (torch.float16, "alibi_slopes", 26),
        (torch.float32, "alibi_slopes", 32),
        (torch.float32, "alibi_slopes", 68),
        (torch.float32, "sinks", 32),
    ],
    ids=str,
)
def test_the_gradient_of_a_single_number_is_not_wrong_by_chance(dtype: torch.dtype, argument: str, seed: int) -> None:
    """Plain arithmetic has hardly any error in these, in all orders of summation; 1 of 100 draws was called wrong."""
    report = verify(**_of_one_number(seed, dtype, argument), backends=["native", "reference"])
    assert report.ok, str(report)


@pytest.mark.parametrize(
    ("dtype", "factor"), [(torch.float32, 1.001), (torch.float16, 1.2), (torch.bfloat16, 2.0)], ids=str
)
@pytest.mark.parametrize("argument", ["sinks", "alibi_slopes"])
def test_a_wrong_gradient_of_a_single_number_is_red(
    argument: str, dtype: torch.dtype, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = reference.BACKEND.backward
    monkeypatch.setattr(
        reference.BACKEND, "backward", lambda *a: [*right(*a)[:4], *(_times(x, factor) for x in right(*a)[4:])]
    )
    for seed in range(4):
        report = verify(**_of_one_number(seed, dtype, argument), backends=["reference"])
        assert {row.quantity for row in report.failures} == {f"d{argument}"}


def _times(x: Tensor | None, factor: float) -> Tensor | None:
    return None if x is None else x * factor


def test_the_rows_shares_sum_up_to_the_gradient() -> None:
    call, given, upstream = request_of(CASES["everything-together"], torch.float64)
    right = oracle.oracle(call, given, upstream)
    shares = {name: x for name, x in right.items() if name.endswith("per row")}
    assert len(shares) >= 2
    for name, rows in shares.items():
        total = right[name.removesuffix(" per row")]
        summed = rows.sum((0, 2)) if total.dim() == 1 else rows.sum(2)
        assert distance(summed, total) < 1e-12 * float(total.norm())


def test_the_lse_of_one_key_may_be_off_by_one_rounding_of_its_sum() -> None:
    """Such a log-sum-exp is a score, here of .01 to .04; its sum is 1, which plain arithmetic has without an error."""
    q, k = torch.tensor([0.1, 0.2, 0.3, 0.4]).view(1, 1, 4, 1), torch.full((1, 1, 1, 1), 0.1)
    case = {"layout": "bshd", "mask": None}
    call, tensors = normalise(Request.from_keywords(q, k, k.clone(), **case))
    budget, eps = budget_for(call, tensors, Upstream(torch.ones_like(q))), torch.finfo(torch.float32).eps
    right = budget.right["lse"]
    assert float(right.abs().min()) > 0.009
    assert float(right.abs().max()) < 0.05
    assert budget.met("lse", right + eps / 2)
    assert not budget.met("lse", right + 3 * eps)
    assert not budget.met("lse", torch.zeros_like(right))


def test_a_nan_a_missing_value_and_another_shape_are_infinitely_wrong() -> None:
    right = torch.ones(2, 3)
    assert distance(right, right) == 0
    assert distance(right.masked_fill(right > 0, math.nan), right) == math.inf
    assert distance(right[:1], right) == math.inf
    assert distance(right, right, zero=torch.tensor([[True, False, False]] * 2)) == math.inf
    assert distance(torch.tensor([-math.inf]), torch.tensor([math.inf])) == math.inf


def test_only_fp32_on_a_gpu_has_sums_of_one_product_after_another() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert orders(torch.float32, gpu) == (0, 1, 2, REVERSED, IN_SEQUENCE)
    assert orders(torch.float32, cpu) == orders(torch.bfloat16, gpu) == (0, 1, 2, REVERSED)
    assert orders(torch.float64, gpu) == (1, 2, 3), "order 0 is that of the oracle"


def test_one_product_after_another_rounds_more_often_in_large_heads() -> None:
    """576 products of a score; the results of an H100 were between the two errors."""
    call, given, upstream = request_of(CASES["mla-latents-decode"], torch.float32)
    right = oracle.oracle(call, given, upstream)["out"]
    norm = float(right.norm())

    def error(order: int) -> float:
        return distance(plain_attention(call, given, upstream, torch.float32, order)["out"], right) / norm

    assert 1.2 * max(error(order) for order in (0, 1, 2)) < error(IN_SEQUENCE) < 1e-6


def test_the_last_rows_of_a_long_causal_sequence_count() -> None:
    """Their norms are small beside those of the first rows: zeros were within the budget of the whole."""
    q, k, v, grad_out = (torch.randn(1, 1024, 1, 64, dtype=torch.bfloat16) for _ in range(4))
    call, tensors = normalise(Request.from_keywords(q, k, v, layout="bshd", mask=masks.causal()))
    budget = budget_for(call, tensors, Upstream(grad_out))
    for name, rows in {"out": 3, "dq": 3, "dk": 40, "dv": 40}.items():
        right = budget.right[name].transpose(1, 2)
        assert budget.met(name, right.bfloat16())
        zeros = right.clone()
        zeros[:, -rows:] = 0
        if name in ("dk", "dv"):
            assert float((zeros - right).norm() / right.norm()) < budget.max_errors[name]
        assert not budget.met(name, zeros)


def test_gradients_that_cancel_may_have_the_rounding_of_their_terms() -> None:
    """Those of q and k with a single key are 0; the budget was one rounding of 1, whatever the size of the terms."""
    for _ in range(20):
        q, k, v, grad_out = (8 * torch.randn(2, 1, 4, 8) for _ in range(4))
        call, tensors = normalise(Request.from_keywords(q, k, v, layout="bshd"))
        budget = budget_for(call, tensors, Upstream(grad_out))
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = undivided.attention(*leaves, layout="bshd", backend="native")
        for name, grad in zip(("dq", "dk"), torch.autograd.grad(out, leaves[:2], grad_out), strict=True):
            assert budget.met(name, grad)
            assert not budget.met(name, grad + 0.01)


@pytest.mark.parametrize("keys", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_few_pairs_are_not_wrong_by_chance(dtype: torch.dtype, keys: int) -> None:
    """Plain arithmetic may be accurate in all of them; 22 of 535 fp32 problems with fewer than 20 pairs were red."""
    generator = torch.Generator().manual_seed(keys)
    for _ in range(15):
        q, k, v = (torch.randn(1, length, 1, 8, generator=generator).to(dtype) for length in (1, keys, keys))
        report = verify(q, k, v, layout="bshd", return_lse=True, backends=["native", "reference"])
        assert report.ok, str(report)


def test_problems_nearby_do_not_make_a_quantity_undecided() -> None:
    """The gradients nearly cancel, and those of some problems nearby have no digit right."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, length, 1, 8, generator=generator).bfloat16() for length in (1, 2, 2))
    v[:, 1] = v[:, 0] * (1 + 2**-6)
    budget = budget_for(*normalise(Request.from_keywords(q, k, v, layout="bshd")), Upstream(torch.ones_like(q)))
    assert not budget.undecided
    assert budget.max_errors["dq"] * budget.scale["dq"] < 1


@pytest.mark.parametrize(("size", "channel"), [(64, 3), (32, 0), (128, 120)])
def test_a_large_channel_of_the_keys_is_not_wrong(size: int, channel: int) -> None:
    """Where it stands in a head decides how many sums it rounds; with (64, 3) all backends were called wrong."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 64, heads, size, generator=generator) for heads in (4, 2, 2))
    k[..., channel] += 50
    q[..., channel] += 5
    report = verify(q, k, v, layout="bshd", backends=["native", "reference", "torch_flash"])
    assert report.ok, str(report)


@pytest.mark.parametrize("name", ["dk", "dv"])
def test_the_gradient_of_the_last_key_alone_may_not_be_lost(name: str) -> None:
    """Under a causal mask one query sees it, and it was lost in the norm of its block."""
    q, k, v, grad_out = (torch.randn(1, 513, 2, 32).bfloat16() for _ in range(4))
    call, tensors = normalise(Request.from_keywords(q, k, v, layout="bshd", mask=masks.causal()))
    budget = budget_for(call, tensors, Upstream(grad_out))
    gradient = budget.right[name].transpose(1, 2).bfloat16()
    assert budget.met(name, gradient)
    gradient[:, -1] = 0
    assert budget.has_lost_rows(name, gradient)
    assert not budget.met(name, gradient)

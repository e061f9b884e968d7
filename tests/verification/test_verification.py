"""Verification itself: the oracle compared with the definition, the budget with wrong results, the report, the
errors."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

import brute_force
import pytest
import torch
from calls import call_of
from torch import Tensor

import undivided
from undivided import InputError, masks
from undivided.backends import reference, torch_flash
from undivided.request.call import Call
from undivided.request.request import Tensors
from undivided.request.result import Result
from undivided.verification import Report, Row, cases, inputs, oracle, verify
from undivided.verification.budget import FACTOR, Budget, budget_for, distance
from undivided.verification.cases import CASES, Case
from undivided.verification.oracle import Upstream
from undivided.verification.plain_attention import plain as plain_attention

DTYPES = [torch.float32, torch.bfloat16]


def _request(case: Case, dtype: torch.dtype) -> tuple[Call, Tensors, Upstream]:
    built = inputs.build(case, dtype, poison=True)
    call, given = call_of(**built.arguments)
    shape = (call.problem.batch, call.problem.heads, call.problem.q_len)
    return (call, given, Upstream(built.grad_out, None if built.grad_lse is None else built.grad_lse.reshape(shape)))


# The catalogue


def test_every_mask_layout_and_way_to_lie_in_memory_is_in_the_catalogue() -> None:
    kinds = frozenset[str]().union(*(case.mask().kinds for case in CASES.values() if case.mask is not None))
    words = "causal window lengths q_lengths starts documents padded document_ids prefix global chunks dense predicate"
    assert kinds == {*words.split(), "tree", "blocks", "origin"}
    assert {case.layout for case in CASES.values()} == {"bshd", "sbhd", "bhsd", "thd"}
    assert {case.layout for case in cases.by_tag("dropout")} == {"bshd", "sbhd", "bhsd", "thd"}
    assert {case.memory for case in CASES.values()} == {
        "contiguous",
        "packed-qkv",
        "sliced",
        "strided-last",
        "shared-kv",
        "latent",
    }
    assert {1, 3, 17, 64, 80, 128, 256} <= {case.qk_dim for case in CASES.values()}


@pytest.mark.parametrize("case", list(CASES.values()), ids=str)
def test_case_makes_a_problem_of_its_sizes(case: Case) -> None:
    call, _, _ = _request(case, case.dtypes[0])
    assert case.name == case.name.lower()
    assert case.sizes == (
        call.problem.batch,
        call.problem.q_len,
        call.problem.kv_len,
        call.problem.heads,
        call.problem.kv_heads,
        call.problem.qk_dim,
        call.problem.v_dim,
    )
    needed = dict(zip(oracle.NAMES, call.needs, strict=True))
    assert case.needs is None or {name for name, need in needed.items() if need} == set(case.needs)


@pytest.mark.parametrize("memory", ["packed-qkv", "sliced", "strided-last", "shared-kv"])
def test_memory_has_the_strides_of_the_case(memory: Any) -> None:
    plain = inputs.build(Case("plain", batch=3)).arguments
    laid = inputs.build(Case("laid out", batch=3, memory=memory)).arguments
    assert not laid["k"].is_contiguous()
    if memory != "shared-kv":
        assert all(torch.equal(plain[name], laid[name]) for name in "qkv")


@pytest.mark.parametrize("name", ["lengths-left-padding-causal", "documents-padded-offsets-thd", "paged-decode"])
def test_memory_outside_the_real_lengths_is_poisoned(name: str) -> None:
    clean, poisoned = (inputs.build(cases.get(name)).arguments, inputs.build(cases.get(name), poison=True).arguments)
    assert not any(clean[x].isnan().any() for x in "qkv")
    assert poisoned["k"].isnan().any()
    if "pages" in poisoned:
        assert (poisoned["pages"] == -1).any()


def test_a_case_or_tag_that_does_not_exist_is_named() -> None:
    with pytest.raises(
        InputError, match=r"case must be one of the .* got 'windows-left3'\n  HINT: near it: window-left3"
    ):
        cases.get("windows-left3")
    with pytest.raises(InputError, match="tag must be one of arbitrary, causal"):
        cases.by_tag("weird")


# The oracle


@pytest.mark.parametrize(
    "name", ["gqa-4", "value-head-wider", "scale-given", "softcap-20-causal", "bias-with-minus-infinity"]
)
def test_the_oracle_equals_the_definition(name: str) -> None:
    """Against loops over pairs that share nothing with it, gradients by torch's autograd through the loops."""
    case = dataclasses.replace(CASES[name], layout="bhsd", q_len=5, kv_len=7, return_lse=True, mask=None, sinks=True)
    call, given, upstream = _request(case, torch.float64)
    q, k, v = (x.detach().requires_grad_() for x in given.heads_first(call.problem.layout))
    extras = {"scale": call.scale, "softcap": call.softcap, "bias": given.bias, "sinks": given.sinks}
    out, lse = brute_force.attend(q, k, v, **extras)
    keep = lse.isfinite()
    torch.autograd.backward([out, lse[keep]], [upstream.out, upstream.lse[keep]])  # type: ignore[index]
    found = oracle.oracle(call, given, upstream)
    assert distance(found["out"], out) < 1e-12
    assert distance(found["lse"].masked_fill(~keep, -math.inf), lse) < 1e-12
    for name, x in (("dq", q), ("dk", k), ("dv", v)):
        assert x.grad is not None
        assert distance(found[name], x.grad) < 1e-11 * float(x.grad.norm())


@pytest.mark.parametrize("case", list(CASES.values()), ids=str)
def test_the_explicit_backward_equals_autograds(case: Case) -> None:
    """The plain reference in fp64 and the oracle are two derivations of one gradient."""
    call, given, upstream = _request(dataclasses.replace(case, bias_dtype=None), torch.float64)
    right, plain = (
        oracle.oracle(call, given, upstream),
        plain_attention(call, given, upstream, torch.float64, order=1),
    )
    right["lse"].masked_fill_(plain["lse"].isinf(), -math.inf)
    for name in right:
        assert distance(plain[name], right[name]) <= 1e-11 * max(
            1.0, float(right[name][right[name].isfinite()].norm())
        ), name


@pytest.mark.parametrize(
    "name", ["everything-together", "alibi-documents-thd", "bias-broadcast-batch", "dropout-left-padding"]
)
def test_pieces_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, given, upstream = _request(CASES[name], torch.float64)
    whole = (oracle.oracle(call, given, upstream), plain_attention(call, given, upstream, torch.float64, 2))
    monkeypatch.setattr("undivided.verification.pieces.MAX_PAIRS", 3 * call.problem.kv_len)
    pieces = (oracle.oracle(call, given, upstream), plain_attention(call, given, upstream, torch.float64, 2))
    for one, other in zip(whole, pieces, strict=True):
        assert all(distance(other[x], one[x]) < 1e-11 for x in one)


# The budget


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", list(CASES.values()), ids=str)
def test_zeros_are_never_within_a_budget(case: Case, dtype: torch.dtype) -> None:
    """Unless zero is right: then the budget is only the rounding."""
    budget = budget_for(*_request(case, dtype))
    for name, right in budget.right.items():
        size = float(right[right.isfinite()].norm())
        if size > 0 and budget.scale[name] == size:
            assert budget.allowed[name] < 0.5, name
        else:
            assert size < budget.allowed[name] * budget.scale[name] < 1, name


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
    call, given, upstream = _request(CASES["everything-together"], torch.float64)
    right = oracle.oracle(call, given, upstream)
    shares = {name: x for name, x in right.items() if name.endswith("per row")}
    assert len(shares) >= 2
    for name, rows in shares.items():
        total = right[name.removesuffix(" per row")]
        summed = rows.sum((0, 2)) if total.dim() == 1 else rows.sum(2)
        assert distance(summed, total) < 1e-12 * float(total.norm())


def test_a_nan_a_missing_value_and_another_shape_are_infinitely_wrong() -> None:
    right = torch.ones(2, 3)
    assert distance(right, right) == 0
    assert distance(right.masked_fill(right > 0, math.nan), right) == math.inf
    assert distance(right[:1], right) == math.inf
    assert distance(right, right, zero=torch.tensor([[True, False, False]] * 2)) == math.inf
    assert distance(torch.tensor([-math.inf]), torch.tensor([math.inf])) == math.inf


def _heads_swapped(result: Result) -> Result:
    return Result(result.out.flip(2), result.lse)


Sabotage = Callable[[Call, Tensors, Callable[[Call, Tensors], Result]], Result]

SABOTAGE: dict[str, tuple[Sabotage, str]] = {
    "zeros": (lambda p, o, run: Result(torch.zeros_like(run(p, o).out), run(p, o).lse), "out"),
    "heads-swapped": (lambda p, o, run: _heads_swapped(run(p, o)), "out"),
    "scale-forgotten": (lambda p, o, run: run(p, dataclasses.replace(o, scale=1.0)), "out"),
    "mask-off-by-one": (
        lambda p, o, run: run(p, dataclasses.replace(o, mask=masks.window(4, 0), _normal_form=None)),
        "out",
    ),
    "mask-forgotten": (lambda p, o, run: run(p, dataclasses.replace(o, mask=masks.FULL, _normal_form=None)), "out"),
    "keys-of-the-wrong-group": (lambda p, o, run: run(p, dataclasses.replace(o, k=o.k.flip(2), v=o.v.flip(2))), "out"),
    "one-row-wrong": (
        lambda p, o, run: Result(run(p, o).out.index_fill(1, torch.tensor([7]), 0.1), run(p, o).lse),
        "out",
    ),
    "lse-in-base-2": (lambda p, o, run: Result(run(p, o).out, run(p, o).lse / math.log(2)), "lse"),
    "nan": (lambda p, o, run: Result(run(p, o).out.index_fill(1, torch.tensor([7]), math.nan), run(p, o).lse), "out"),
    "another-dtype": (lambda p, o, run: Result(run(p, o).out.double(), run(p, o).lse), "out"),
}


def _window(dtype: torch.dtype = torch.float32) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    built = inputs.build(Case("window", q_len=40, heads=8, kv_heads=2, mask=lambda: masks.window(3, 0)), dtype)
    arguments = dict(built.arguments)
    del arguments["return_lse"]
    return (arguments.pop("q"), arguments.pop("k"), arguments.pop("v")), arguments


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SABOTAGE)
def test_a_wrong_forward_is_red(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    how, where = SABOTAGE[name]
    right = reference.BACKEND.forward
    monkeypatch.setattr(reference.BACKEND, "forward", lambda p, o: how(p, o, right))
    tensors, arguments = _window(dtype)
    report = verify(*tensors, **arguments, backends=["reference", "torch_flash"])
    assert not report.ok
    assert not report.of("reference")[where].ok
    assert all(row.ok for row in report.of("torch_flash").values())


BACKWARD: dict[str, tuple[Callable[[list[Any]], list[Any]], set[str]]] = {
    "zeros": (lambda g: [torch.zeros_like(g[0]), *g[1:]], {"dq"}),
    "dk-and-dv-exchanged": (lambda g: [g[0], g[2], g[1], *g[3:]], {"dk", "dv"}),
    "twice-too-large": (lambda g: [g[0], g[1] * 2, *g[2:]], {"dk"}),
    "one-percent-off-in-one-head": (lambda g: [g[0] * torch.tensor([1.2] + [1.0] * 7)[:, None], *g[1:]], {"dq"}),
    "missing": (lambda g: [g[0], g[1], None, *g[3:]], {"dv"}),
}


@pytest.mark.parametrize("name", BACKWARD)
def test_a_wrong_backward_is_red(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    how, where = BACKWARD[name]
    right = reference.BACKEND.backward
    monkeypatch.setattr(reference.BACKEND, "backward", lambda *a: how(list(right(*a))))
    tensors, arguments = _window()
    report = verify(*tensors, **arguments, backends=["reference"])
    assert {row.quantity for row in report.failures} == where


def test_a_shift_by_one_into_the_padding_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one row beyond a document: its size would be within bfloat16's budget."""
    right = reference.BACKEND.forward

    def forward(call: Call, given: Tensors) -> Result:
        out, lse = right(call, given)
        return Result(out.index_fill(0, torch.tensor([3]), 1e-6), lse)

    monkeypatch.setattr(reference.BACKEND, "forward", forward)
    built = inputs.build(CASES["documents-padded-offsets-thd"], torch.bfloat16)
    arguments = {name: value for name, value in built.arguments.items() if name != "return_lse"}
    assert verify(**arguments, backends=["reference"]).of("reference")["out"].error == math.inf


# verify


def test_a_kernel_that_raises_is_a_failed_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(call: Call, given: Tensors) -> Result:
        raise RuntimeError("no valid\nexecution plans")

    monkeypatch.setattr(torch_flash.BACKEND, "forward", forward)
    tensors, arguments = _window()
    report = verify(*tensors, **arguments, backends=["torch_flash", "reference"])
    assert not report.ok
    assert report.of("torch_flash")["out"].note == "raised RuntimeError: no valid execution plans"
    assert "WRONG  raised RuntimeError: no valid execution plans" in str(report)
    assert all(row.ok for row in report.of("reference").values())


def test_every_backend_runs_or_gives_reasons() -> None:
    tensors, arguments = _window()
    report = verify(*tensors, **arguments, backends=["math", "torch_flash", "fused"])
    assert report.ok
    assert report.backends == ("reference", "torch_flash")
    assert "device=cpu (runs on cuda)" in report.refused["torch_cudnn"]
    assert set(report.of("reference")) == {"out", "lse", "dq", "dk", "dv"}


def test_a_backend_that_lacks_one_gradient_is_checked_for_the_others() -> None:
    q, k, v = (torch.randn(2, 5, 2, 8) for _ in range(3))
    report = verify(q, k, v, layout="bshd", bias=torch.randn(5, 5), backends=["reference", "torch_flash"])
    assert set(report.of("reference")) == {"out", "lse", "dq", "dk", "dv", "dbias"}
    assert set(report.of("torch_flash")) == {"out", "lse", "dq", "dk", "dv"}
    (said,) = report.unchecked["torch_flash"]
    assert said.startswith("gradients of q, k, v, bias: no support for the gradient of the bias")
    assert "not checked: gradients of q, k, v, bias" in str(report)


def test_gradients_can_be_left_out() -> None:
    tensors, arguments = _window()
    assert set(verify(*tensors, **arguments, backend="reference", gradients=False).of("reference")) == {"out", "lse"}


@pytest.mark.parametrize(
    "name", ["lse-thd", "everything-together", "paged-decode", "paged-query-gradient", "alibi-documents-thd"]
)
def test_every_kind_of_argument_goes_through(name: str) -> None:
    report = verify(**inputs.build(CASES[name], poison=True).arguments, backends=["reference"])
    assert report.ok, str(report)
    assert ("dk" in report.of("reference")) == ("paged" not in name)


def test_the_callers_tensors_are_left_as_they_are() -> None:
    q, k, v = (torch.randn(2, 5, 2, 8, requires_grad=True) for _ in range(3))
    before = [(x.clone(), x._version) for x in (q, k, v)]
    verify(q * 1, k, v, layout="bshd", backends=["reference", "torch_flash"])
    for x, (value, version) in zip((q, k, v), before, strict=True):
        assert torch.equal(x, value)
        assert x._version == version
        assert x.grad is None


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu")])
def test_it_runs_under_any_mode(context: Callable[[], Any]) -> None:
    with context():
        q = torch.randn(2, 5, 2, 8)
        report = verify(q, q, q, layout="bshd", backends=["reference", "torch_flash"])
    assert report.ok, str(report)
    assert len(report.rows) == 10
    assert ("bfloat16" in report.problem) == (context not in (torch.no_grad, torch.inference_mode))


def test_dropout_without_a_seed_is_one_pattern_for_all() -> None:
    q = torch.randn(2, 5, 2, 8)
    assert verify(q, q, q, layout="bshd", dropout_p=0.5, backends=["reference"]).ok


@pytest.mark.parametrize("dim", [32, 128])
def test_equal_queries_and_keys_are_not_a_false_alarm(dim: int) -> None:
    """With q = k one key has all of the weight, and the remaining error is from computing the scores twice."""
    x = torch.randn(2, 64, 4, dim, generator=torch.Generator().manual_seed(0))
    report = verify(x, x, x, layout="bshd", mask=masks.causal(), backends=["reference", "torch_flash"])
    assert report.ok, str(report)


def test_float64_has_a_float64_budget() -> None:
    q = torch.randn(2, 9, 2, 8, dtype=torch.float64)
    report = verify(q, q, q, layout="bshd", backends=["reference", "torch_flash"])
    assert report.ok
    assert all(row.budget < 1e-14 for row in report.rows)


def test_bad_arguments_raise_as_in_attention() -> None:
    q = torch.randn(2, 5, 2, 8)
    with pytest.raises(InputError, match="layout must be one of"):
        verify(q, q, q, layout="bsh")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="k must have the head size of q"):
        verify(q, q[..., :4], q, layout="bshd")
    with pytest.raises(InputError, match=r"q must be a torch.Tensor, got list"):
        verify([1.0], q, q, layout="bshd")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="backends must contain only"):
        verify(q, q, q, layout="bshd", backends=["fast"])
    with pytest.raises(InputError, match="verify must get only arguments of attention"):
        verify(q, q, q, layout="bshd", is_causal=True)
    empty = torch.empty(2, 5, 2, 8, device="meta")
    with pytest.raises(InputError, match=r"q must hold values.*got a meta tensor\n  HINT: undivided.explain"):
        verify(empty, empty, empty, layout="bshd")
    with pytest.raises(InputError, match=r"finite where the mask does not hide them(.|\n)*HINT: masks.lengths"):
        verify(q.masked_fill(q > 1, math.nan), q, q, layout="bshd")


# The report


def test_the_report_is_a_table_and_json() -> None:
    rows = (
        Row("flash", "out", 1e-7, 3e-7),
        Row("flash", "dq", 2e-3, 3e-7),
        Row("reference", "out", math.inf, 1e-7, "NaN"),
    )
    report = Report(
        "a problem", rows, {"cudnn": ("device=cpu (runs on cuda)", "no wheel")}, {"flash": ("lse: not returned",)}
    )
    assert str(report).splitlines() == [
        "2 backends WRONG, 1 refused: a problem",
        "  backend    quantity    error   budget",
        "  flash      out       1.0e-07  3.0e-07  ok",
        "             dq        2.0e-03  3.0e-07  WRONG",
        "  reference  out           inf  1.0e-07  WRONG  NaN",
        "  flash      not checked: lse: not returned",
        "  cudnn      refused: device=cpu (runs on cuda)",
        "                      no wheel",
    ]
    back = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert back["ok"] is False
    assert back["rows"][2]["error"] is None
    assert back["refused"]["cudnn"] == ["device=cpu (runs on cuda)", "no wheel"]


def test_a_report_of_nothing_is_not_ok() -> None:
    report = Report("a problem", (), {"cudnn": ("no GPU",)}, {})
    assert not report.ok
    assert str(report).startswith("1 backend refused: a problem")


def test_the_budget_is_twice_the_plain_error_and_one_rounding() -> None:
    call, given, upstream = _request(CASES["plain-bshd"], torch.bfloat16)
    budget: Budget = budget_for(call, given, upstream)
    plain = plain_attention(call, given, upstream, torch.bfloat16)
    once = distance(plain["out"], budget.right["out"]) / float(budget.right["out"].norm())
    eps = torch.finfo(torch.bfloat16).eps
    assert FACTOR == 2
    assert 2 * once + eps <= budget.allowed["out"] < 3 * once + eps
    assert undivided.verify is verify

"""`verify`: which backends it runs, its arguments and its report."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from verification_problems import window_problem

from undivided import InputError, masks
from undivided.backends import torch_flash
from undivided.request.call import Call
from undivided.request.request import Tensors
from undivided.request.result import Result
from undivided.verification import Report, Row, inputs, verify
from undivided.verification.cases import CASES


def test_a_kernel_that_raises_is_a_failed_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(call: Call, given: Tensors) -> Result:
        raise RuntimeError("no valid\nexecution plans")

    monkeypatch.setattr(torch_flash.BACKEND, "forward", forward)
    tensors, arguments = window_problem()
    report = verify(*tensors, **arguments, backends=["torch_flash", "reference"])
    assert not report.ok
    assert report.of("torch_flash")["out"].note == "raised RuntimeError: no valid execution plans"
    assert "WRONG  raised RuntimeError: no valid execution plans" in str(report)
    assert all(row.ok for row in report.of("reference").values())


def test_every_backend_runs_or_gives_reasons() -> None:
    tensors, arguments = window_problem()
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
    (reason,) = report.unchecked["torch_flash"]
    assert reason.startswith("gradients of q, k, v, bias: no support for the gradient of the bias")
    assert "not checked: gradients of q, k, v, bias" in str(report)


def test_gradients_can_be_left_out() -> None:
    tensors, arguments = window_problem()
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


@pytest.mark.parametrize("factor", [1e7, 1e8, 1e10, 1e12])
def test_gradients_of_which_plain_attention_has_no_digit_right_are_undecided(factor: float) -> None:
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, 20, 4, 7) for _ in range(3))
    report = verify(q * factor, k, v, layout="bshd", backends=["torch_flash", "reference"])
    assert not report.ok
    assert not report.failures
    for name in ("torch_flash", "reference"):
        verdicts = {quantity: row.verdict for quantity, row in report.of(name).items()}
        gradients = dict.fromkeys(("dq", "dk", "dv"), "undecided")
        assert verdicts == {"out": "ok", "lse": "ok", **gradients}
    assert str(report).startswith("2 backends undecided: ")
    assert [row["undecided"] for row in report.to_dict()["rows"]] == 2 * [False, True, True, True, False]
    assert verify(q * factor, k, v, layout="bshd", backends=["reference"], gradients=False).ok


def test_an_output_of_which_plain_attention_is_infinite_is_undecided() -> None:
    q, v = torch.ones(1, 2, 1, 8), torch.ones(1, 2, 1, 8)
    report = verify(q * 1e30, q * 1e30, v, layout="bshd", backends=["reference"], gradients=False)
    assert {row.verdict for row in report.rows} == {"undecided"}


def test_an_undecided_quantity_does_not_excuse_a_kernel_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> None:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(torch_flash.BACKEND, "forward", fails)
    q = torch.full((1, 2, 1, 8), 1e30)
    report = verify(q, q, q, layout="bshd", backends=["torch_flash"], gradients=False)
    assert [row.verdict for row in report.failures] == ["WRONG", "WRONG"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_that_are_0_because_their_terms_cancel_are_decided(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(1, 300, 2, 32).to(dtype) for _ in range(3))
    report = verify(q, k, v, layout="bshd", mask=masks.window(0, 0), backends=["reference"])
    assert {row.verdict for row in report.rows} == {"ok"}


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
    with pytest.raises(
        InputError, match=r"verify must be called with its own arguments(.|\n)*HINT: mask=masks.causal\(\)"
    ):
        verify(q, q, q, layout="bshd", is_causal=True)
    empty = torch.empty(2, 5, 2, 8, device="meta")
    with pytest.raises(InputError, match=r"q must hold values.*got a meta tensor\n  HINT: undivided.explain"):
        verify(empty, empty, empty, layout="bshd")
    with pytest.raises(InputError, match=r"finite where the mask does not hide them(.|\n)*HINT: masks.lengths"):
        verify(q.masked_fill(q > 1, math.nan), q, q, layout="bshd")


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


def test_a_seed_is_drawn_whatever_the_default_device() -> None:
    """On the meta device there is no generator, and a number drawn there has no value."""
    q = torch.randn(1, 5, 2, 16)
    with torch.device("meta"):
        assert verify(q, q, q, layout="bshd", dropout_p=0.5, backends=["reference"]).ok


@pytest.mark.parametrize("seed", range(6))
def test_a_sequence_with_one_key_beside_a_longer_one(seed: int) -> None:
    """Its gradients of q and k are differences that are 0, and so was the budget of its rows: dk was WRONG."""
    torch.manual_seed(seed)
    q, k, v = torch.randn(2, 1, 8, 64), torch.randn(2, 64, 8, 64), torch.randn(2, 64, 8, 64)
    report = verify(q, k, v, layout="bshd", mask=masks.lengths([1, 64]))
    assert report.ok, report

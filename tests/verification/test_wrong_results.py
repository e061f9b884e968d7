"""Wrong results of a backend: `verify` reports each of them, and no other."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from verification_problems import DTYPES, window_problem

from undivided import masks
from undivided.backends import reference
from undivided.request.call import Call
from undivided.request.request import Tensors
from undivided.request.result import Result
from undivided.verification import inputs, verify
from undivided.verification.cases import CASES

Forward = Callable[[Call, Tensors], Result]


def _with(call: Call, **changes: Any) -> Call:
    return call.with_problem(call.problem, checked_mask=None, **changes)


def _with_row_7(result: Result, value: float) -> Result:
    return result._replace(out=result.out.index_fill(1, torch.tensor([7]), value))


SABOTAGE: dict[str, tuple[Callable[[Forward, Call, Tensors], Result], str]] = {
    "zeros": (lambda run, call, t: run(call, t)._replace(out=torch.zeros_like(t.q)), "out"),
    "heads-swapped": (lambda run, call, t: run(call, t)._replace(out=run(call, t).out.flip(2)), "out"),
    "scale-forgotten": (lambda run, call, t: run(_with(call, scale=1.0), t), "out"),
    "mask-off-by-one": (lambda run, call, t: run(_with(call, mask=masks.window(4, 0)), t), "out"),
    "mask-forgotten": (lambda run, call, t: run(_with(call, mask=masks.FULL), t), "out"),
    "keys-of-the-wrong-group": (lambda run, call, t: run(call, t._replace(k=t.k.flip(2), v=t.v.flip(2))), "out"),
    "one-row-wrong": (lambda run, call, t: _with_row_7(run(call, t), 0.1), "out"),
    "lse-in-base-2": (lambda run, call, t: run(call, t)._replace(lse=run(call, t).lse / math.log(2)), "lse"),
    "nan": (lambda run, call, t: _with_row_7(run(call, t), math.nan), "out"),
    "another-dtype": (lambda run, call, t: run(call, t)._replace(out=run(call, t).out.double()), "out"),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SABOTAGE)
def test_a_wrong_forward_is_red(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    how, where = SABOTAGE[name]
    right = reference.BACKEND.forward
    monkeypatch.setattr(reference.BACKEND, "forward", lambda call, given: how(right, call, given))
    tensors, arguments = window_problem(dtype)
    report = verify(*tensors, **arguments, backends=["reference", "torch_flash"])
    assert not report.ok
    wrong = report.of("reference")[where]
    assert not wrong.ok
    assert not wrong.note.startswith("raised"), wrong.note  # it computed something wrong
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
    tensors, arguments = window_problem()
    report = verify(*tensors, **arguments, backends=["reference"])
    assert {row.quantity for row in report.failures} == where


@pytest.mark.parametrize("return_lse", [False, True])
def test_a_wrong_output_of_calls_without_gradients_is_red(monkeypatch: pytest.MonkeyPatch, return_lse: bool) -> None:
    right = reference.BACKEND.forward

    def wrong(call: Call, given: Tensors) -> Result:
        result = right(call, given)
        return result if any(call.needs) else result._replace(out=torch.zeros_like(result.out))

    monkeypatch.setattr(reference.BACKEND, "forward", wrong)
    tensors, arguments = window_problem()
    report = verify(*tensors, **arguments, backends=["reference", "torch_flash"], return_lse=return_lse)
    assert [(row.backend, row.quantity, row.note) for row in report.failures] == [
        ("reference", "out", "a row that must not be 0 is 0, in a call without gradients")
    ]


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

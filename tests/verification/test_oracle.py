"""The oracle compared with the definition, and with a second derivation of the gradients."""

from __future__ import annotations

import dataclasses
import math

import brute_force
import pytest
import torch
from verification_problems import request_of

from undivided.verification import oracle
from undivided.verification.budget import distance
from undivided.verification.cases import CASES, Case
from undivided.verification.plain_attention import plain as plain_attention


@pytest.mark.parametrize(
    "name", ["gqa-4", "value-head-wider", "scale-positive", "softcap-20-causal", "bias-with-minus-infinity"]
)
def test_the_oracle_equals_the_definition(name: str) -> None:
    """Against loops over pairs that share nothing with it, gradients by torch's autograd through the loops."""
    case = dataclasses.replace(CASES[name], layout="bhsd", q_len=5, kv_len=7, return_lse=True, mask=None, sinks=True)
    call, given, upstream = request_of(case, torch.float64)
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
    call, given, upstream = request_of(dataclasses.replace(case, bias_dtype=None), torch.float64)
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
    call, given, upstream = request_of(CASES[name], torch.float64)
    whole = (oracle.oracle(call, given, upstream), plain_attention(call, given, upstream, torch.float64, 2))
    monkeypatch.setattr("undivided.verification.pieces.MAX_PAIRS", 3 * call.problem.kv_len)
    pieces = (oracle.oracle(call, given, upstream), plain_attention(call, given, upstream, torch.float64, 2))
    for one, other in zip(whole, pieces, strict=True):
        assert all(distance(other[x], one[x]) < 1e-11 for x in one)

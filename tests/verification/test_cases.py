"""The catalogue of cases: what it contains, and how its inputs lie in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from verification_problems import request_of

from undivided import InputError
from undivided.verification import cases, inputs, oracle
from undivided.verification.cases import CASES, Case


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
    call, _, _ = request_of(case, case.dtypes[0])
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

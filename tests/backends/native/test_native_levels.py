"""The native kernel's contract on every instruction set that this machine has, on 1 and 3 threads."""

from __future__ import annotations

import functools

import levels
import pytest
import torch

from undivided.backends import get
from undivided.verification import contract, runs
from undivided.verification.cases import CASES, Case


@functools.lru_cache(3)
def _trial(name: str, dtype: torch.dtype) -> runs.Trial:
    """The trial of a case, which the levels share."""
    return contract.build_case_trial(CASES[name], dtype)[1]


@pytest.mark.parametrize("level", levels.parameters())
@pytest.mark.parametrize("case", list(CASES.values()), ids=str)
def test_every_case_is_within_its_budget_and_equal_on_any_number_of_threads(case: Case, level: str) -> None:
    for dtype in case.dtypes:
        if dtype == torch.float64:
            continue
        trial, outcomes = _trial(case.name, dtype), []
        for threads in (1, 3):
            with levels.running(level, threads):
                outcomes.append(runs.run(get("native"), trial).rows)
        rows = outcomes[0]
        assert rows or case.name.startswith("last-axis-strided"), dtype
        wrong = [f"{row.quantity}: {row.error:.2e} of {row.budget:.2e}" for row in rows if not row.ok]
        assert not wrong, (dtype, wrong)
        errors = [[(row.quantity, row.error) for row in some] for some in outcomes]
        assert errors[0] == errors[1], dtype

"""The native kernel's contract on every instruction set that this machine has, on 1, 2 and 3 threads."""

from __future__ import annotations

import levels
import pytest
import torch

from undivided.backends import get
from undivided.verification import contract, runs
from undivided.verification.cases import CASES, Case


@pytest.mark.parametrize("case", list(CASES.values()), ids=str)
def test_every_case_is_within_its_budget_and_equal_on_any_number_of_threads(case: Case) -> None:
    for dtype in case.dtypes:
        if dtype == torch.float64:
            continue
        _, trial = contract.build_case_trial(case, dtype)
        for level in levels.here():
            outcomes = []
            for threads in (1, 3):
                with levels.running(level, threads):
                    outcomes.append(runs.run(get("native"), trial).rows)
            rows = outcomes[0]
            assert rows or case.name.startswith("last-axis-strided"), (level, dtype)
            wrong = [f"{row.quantity}: {row.error:.2e} of {row.budget:.2e}" for row in rows if not row.ok]
            assert not wrong, (level, dtype, wrong)
            errors = [[(row.quantity, row.error) for row in some] for some in outcomes]
            assert errors[0] == errors[1], (level, dtype)

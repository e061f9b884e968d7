"""A few hundred cases of `fuzz_inputs`; CONTRIBUTING.md describes how to run more."""

from __future__ import annotations

import pytest
from fuzz_inputs import failures, fuzz


def test_a_few_hundred_cases_of_the_fuzz_end_no_process_and_raise_nothing_else() -> None:
    found = fuzz(300, first=100_000)
    assert failures(found) == {}
    assert sum(map(len, found.values())) == 300
    assert len(found["ok"]) > 20


@pytest.mark.slow
def test_a_case_of_the_fuzz_that_ends_its_process_is_reported_and_the_others_go_on() -> None:
    found = fuzz(3, first=-1)
    assert sum(map(len, found.values())) == 3
    ((outcome, numbers),) = failures(found).items()
    assert outcome.startswith("!! ended by signal 6: Fatal Python error: Aborted")
    assert numbers == [-1]

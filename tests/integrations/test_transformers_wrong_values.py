"""Every argument of the integration of transformers, with values that it may not have."""

from __future__ import annotations

import pytest
from public_calls import transformers_calls
from wrong_value_checks import wrong_outcomes

import undivided.integrations.transformers as hf

CALLS = transformers_calls()


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_value_is_an_input_error(name: str) -> None:
    assert wrong_outcomes(CALLS[name]) == []


def test_the_table_has_every_function_that_takes_arguments() -> None:
    built_by_us, without_arguments = {"ModelMask"}, {"register"}
    assert {f"transformers.{name}" for name in set(hf.__all__) - built_by_us - without_arguments} == set(CALLS)

"""Every argument of the integration of transformers, with values that it may not have."""

from __future__ import annotations

import pytest
import torch
from public_calls import transformers_calls
from torch import nn
from wrong_value_checks import wrong_outcomes

import undivided.integrations.transformers as hf
from undivided.errors import InputError

CALLS = transformers_calls()


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_value_is_an_input_error(name: str) -> None:
    assert wrong_outcomes(CALLS[name]) == []


def test_the_table_has_every_function_that_takes_arguments() -> None:
    built_by_us, without_arguments = {"ModelMask"}, {"register"}
    assert {f"transformers.{name}" for name in set(hf.__all__) - built_by_us - without_arguments} == set(CALLS)


@pytest.mark.parametrize(
    ("offsets", "longest", "message"),
    [
        ([0, 4, 9], 5, r"mask must have cu_seq_lens_q\[-1\] of 10"),
        ([0, 6, 4, 10], 6, "cu_seq_lens_q must never decrease"),
        ([0, 4, 10], 5, r"max_length_q must be at least the longest document \(6\)"),
    ],
    ids=["short", "descending", "max-length"],
)
def test_errors_of_packed_documents_have_the_librarys_names(offsets: list[int], longest: int, message: str) -> None:
    q = torch.randn(1, 2, 10, 16)
    offsets_of_both = torch.tensor(offsets, dtype=torch.int32)
    documents = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), offsets_of_both)
    with pytest.raises(InputError, match=message):
        hf.attention(nn.Module(), q, q, q, **documents, max_length_q=longest, max_length_k=10)

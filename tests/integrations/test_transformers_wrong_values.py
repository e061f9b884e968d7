"""Every argument of the integration of transformers, with values that it may not have."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import transformers
from public_calls import transformers_calls
from torch import nn
from wrong_value_checks import wrong_outcomes

import undivided.integrations.transformers as hf
from undivided.errors import InputError
from undivided.integrations.transformers import _positions

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
        ([0, 4, 9], 5, r"cu_seq_lens_q must end with the 10 tokens of query, got 9"),
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


Q = torch.randn(2, 4, 5, 8)
BIASES = torch.zeros(2, 1, 5, 5)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"s_aux": torch.zeros(3)}, "s_aux must have shape [heads] = [4], got [3]"),
        ({"sinks": torch.zeros(3)}, "sinks must have shape [B, H, Sq, 1] = [2, 4, 5, 1], got [3]"),
        ({"scaling": "x"}, "scaling must be a number from -1e30 to 1e30"),
        ({"dropout": 2.0}, "dropout must be a number from 0 to 1, got 2.0"),
        ({"key": Q[:, :3], "value": Q[:, :3]}, "key must have a number of heads that divides query's (4), got 3"),
        ({"key": Q.half()}, "key must have the dtype of query"),
        ({"value": Q[:, :2]}, "value must"),
        (
            {"attention_mask": BIASES.long()},
            "attention_mask must be bool (True = attend) or a floating-point bias, got torch.int64\n"
            "  HINT: attention_mask.bool()",
        ),
        ({"attention_mask": BIASES[:, :, :3]}, "attention_mask must be broadcastable to"),
        ({"attention_mask": BIASES[:, :, :3].bool()}, "attention_mask must have dense(tensor) broadcastable to"),
        (
            {"position_bias": BIASES.long()},
            "position_bias must be a floating-point tensor, got torch.int64\n  HINT: position_bias.to(query.dtype)",
        ),
        ({"position_bias": BIASES[:, :, :3], "attention_mask": BIASES.bool()}, "position_bias must be broadcastable"),
        (
            {"position_bias": BIASES[:, :, :3], "attention_mask": BIASES[:, :, :3]},
            "attention_mask must be broadcastable",
        ),
        (
            {"cu_seq_lens_q": torch.tensor([0, 5, 10])},
            "cu_seq_lens_q must be given with a batch of one row, got 2 rows\n  HINT: DataCollatorWithFlattening(",
        ),
    ],
)
def test_errors_have_the_names_of_the_caller(arguments: dict[str, Any], expected: str) -> None:
    states = dict.fromkeys(("query", "key", "value"), Q)
    with pytest.raises(InputError) as caught:
        hf.attention(nn.Module(), **(states | arguments))
    assert str(caught.value).startswith(expected)
    assert caught.value.argument == expected.split(" ")[0]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"query": Q[:, :0]}, "query must have at least one head and a head size of at least 1, got [2, 0, 5, 8]"),
        ({"key": Q[:1]}, "key must have the batch size of query (2), got 1 in [1, 4, 5, 8]"),
        (
            {"key": Q[:, :3], "value": Q[:, :3]},
            "key must have a number of heads that divides query's (4), got 3 in [2, 3",
        ),
        ({"key": Q[..., :6]}, "key must have the head size of query (8), got 6 in [2, 4, 5, 6]\n"),
        ({"value": Q[:, :, :3]}, "value must have the length of key (5), got 3 in [2, 4, 3, 8]\n"),
        (
            {"key": Q[:, :3].transpose(1, 2), "value": Q[:, :3].transpose(1, 2), "query": Q.transpose(1, 2)[:, :4]},
            "key must have a number of heads that divides query's (4), got 5 in [2, 5, 3, 8]\n",
        ),
        ({"indices": torch.zeros(2, 4, 3).long()}, "indices must have shape [B, Sq, n] = [2, 5, n], got [2, 4, 3]"),
        (
            {"block_indices": torch.zeros(2, 0, 5, 3).long()},
            "block_indices must have shape [B, G, Sq, n] = [2, G, 5, n], where G divides the 4 heads, got [2, 0, 5, 3]",
        ),
    ],
)
def test_errors_have_the_shapes_of_the_caller(arguments: dict[str, Any], expected: str) -> None:
    states = dict.fromkeys(("query", "key", "value"), Q)
    with pytest.raises(InputError) as caught:
        hf.attention(nn.Module(), **(states | arguments))
    assert str(caught.value).startswith(expected)


def test_states_with_the_tokens_before_the_heads_are_recognised() -> None:
    """The hint named a layout, which the function does not have as an argument."""
    query, key = torch.randn(2, 64, 6, 8), torch.randn(2, 100, 2, 8)
    with pytest.raises(InputError) as caught:
        hf.attention(nn.Module(), query, key, key)
    assert caught.value.hint == "query, key and value are [B, H, S, D]; these shapes would fit [B, S, H, D]"


@pytest.mark.parametrize(
    ("offsets", "expected"),
    [
        ({"cu_seq_lens_k": torch.tensor([0, 2, 6])}, "cu_seq_lens_k must end with the 5 tokens of key, got 6"),
        ({"cu_seq_lens_q": torch.tensor([0, 2, 6])}, "cu_seq_lens_q must end with the 5 tokens of query, got 6"),
        ({"key": Q[:1, :, :4], "value": Q[:1, :, :4]}, "cu_seq_lens_k must be given if there are 4 keys for 5 queries"),
    ],
)
def test_offsets_that_do_not_end_with_the_tokens_are_named(offsets: dict[str, Any], expected: str) -> None:
    arguments = dict.fromkeys(("query", "key", "value"), Q[:1]) | {"cu_seq_lens_q": torch.tensor([0, 2, 5])}
    with pytest.raises(InputError) as caught:
        hf.attention(nn.Module(), **(arguments | offsets))
    assert str(caught.value).startswith(expected)
    assert "masks.documents" not in str(caught.value)


@pytest.mark.parametrize("reads_documents", [False, True])
def test_documents_that_other_layers_do_not_keep_apart_are_reported_once(
    reads_documents: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short convolutions continue from one document to the next."""
    monkeypatch.setattr(_positions, "_reported", set())
    layer, q, offsets = nn.Module(), Q[:1], torch.tensor([0, 2, 5])
    layer.config = transformers.Lfm2Config(num_hidden_layers=2, layer_types=["conv", "full_attention"])
    others = {"seq_idx": torch.tensor([[0, 0, 1, 1, 1]])} if reads_documents else {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hf.attention(layer, q, q, q)
        assert not caught
        for _ in range(2):
            hf.attention(layer, q, q, q, cu_seq_lens_q=offsets, **others)
    named = [str(warning.message) for warning in caught if "layers of the kinds conv" in str(warning.message)]
    assert len(named) == (not reads_documents)

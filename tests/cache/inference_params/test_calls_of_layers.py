"""`InferenceParams.attend`: the options that it refuses, and layers that lack tokens of earlier steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from undivided import InferenceParams, InputError

HEADS, KV_HEADS, DIM = 4, 2, 8
PAGES: dict[str, Any] = {"is_paged": True, "page_size": 4}
BOTH = pytest.mark.parametrize("pages", [{}, PAGES], ids=["contiguous", "paged"])


def new_params(pages: dict[str, Any], **options: Any) -> InferenceParams:
    return InferenceParams(2, 32, KV_HEADS, DIM, torch.float32, **pages, **options)


def tokens(count: int, batch: int = 1) -> list[Tensor]:
    """q, k and v."""
    return [torch.randn(batch, count, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "bhsd"}, "got 'layout'"),
        ({"dropout_p": 0.5}, "got 'dropout_p'"),
        ({"pages": torch.zeros(2, 1, dtype=torch.int32)}, "got 'pages'"),
        ({"k_scale": None, "by": "ring"}, "got 'by', 'k_scale'"),
        ({"soft_cap": 2.0}, r"got 'soft_cap'\n  HINT: softcap=\n"),
    ],
)
@BOTH
def test_options_that_attend_does_not_have_are_refused(
    pages: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    params = new_params(pages)
    params.pre_step({"a": 2, "b": 2})
    with pytest.raises(InputError, match=r"InferenceParams\.attend must be called with its own arguments") as error:
        params.attend(1, *tokens(2, batch=2), **options)
    assert error.match(message)
    assert isinstance(error.value, TypeError)
    assert not params.has_memory(1)


@BOTH
def test_a_layer_without_the_tokens_of_earlier_steps_is_refused(pages: dict[str, Any]) -> None:
    params = new_params(pages)
    params.pre_step({"a": 3})
    params.attend(1, *tokens(3))
    params.pre_step({"a": 1, "b": 1})
    with pytest.raises(InputError, match=r"layer_number must be .* got 2, which received none(.|\n)*with tokens: 1"):
        params.attend(2, *tokens(1, batch=2))
    with pytest.raises(InputError, match="layer_number must be that of a layer that received all earlier tokens"):
        params.step(2, *tokens(1, batch=2)[1:])
    assert not params.has_memory(2)
    params.attend(1, *tokens(1, batch=2))


@BOTH
def test_a_step_that_no_layer_has_received_is_named_in_the_hint(pages: dict[str, Any]) -> None:
    """The hint ended in an empty list of layers."""
    params = new_params(pages)
    params.pre_step({"a": 3})
    params.pre_step({"a": 1})
    with pytest.raises(InputError) as raised:
        params.attend(1, *tokens(1))
    assert raised.value.hint == "call every layer in every step, before the next pre_step"


@BOTH
def test_a_layer_may_start_with_new_sequences(pages: dict[str, Any]) -> None:
    params = new_params(pages)
    params.pre_step({"a": 3})
    params.attend(1, *tokens(3))
    params.pre_step({"b": 2})
    params.attend(2, *tokens(2))
    params.truncate("b", 0)
    params.pre_step({"b": 2})
    params.attend(4, *tokens(2))


@BOTH
def test_a_layer_that_was_not_called_in_an_earlier_step_is_refused(pages: dict[str, Any]) -> None:
    params = new_params(pages)
    params.pre_step({"a": 3, "b": 3})
    for layer in (1, 2):
        params.attend(layer, *tokens(3, batch=2))
    params.pre_step({"a": 0, "b": 2})
    params.attend(1, *tokens(2, batch=2))
    params.pre_step({"a": 1, "b": 1})
    message = r"layer_number must be .* got 2, which lacks the token at position 3 of 'b'(.|\n)*truncate\('b', 3\)"
    before = params._storages[2].k.view(torch.int32).clone()  # memory without tokens may hold NaN
    with pytest.raises(InputError, match=message):
        params.attend(2, *tokens(1, batch=2))
    with pytest.raises(InputError, match=message):
        params.step(2, *tokens(1, batch=2)[1:])
    assert torch.equal(params._storages[2].k.view(torch.int32), before)
    params.attend(1, *tokens(1, batch=2))
    params.pre_step({"a": 1, "b": 1})
    with pytest.raises(InputError, match=r"position 3 of '(a|b)'"):
        params.attend(2, *tokens(1, batch=2))


@BOTH
def test_a_layer_that_was_not_called_may_go_on_without_the_tokens_that_it_lacks(pages: dict[str, Any]) -> None:
    params = new_params(pages)
    params.pre_step({"a": 3})
    for layer in (1, 2):
        params.attend(layer, *tokens(3))
    for _ in range(3):  # drafts of the first layer
        params.pre_step({"a": 1})
        params.attend(1, *tokens(1))
    params.fork("a", "b")
    params.truncate("a", 3)
    params.truncate("b", 4)
    params.pre_step({"a": 3})  # "b" has ended
    for layer in (1, 2):
        params.attend(layer, *tokens(3))
    params.fork("a", "b")
    params.pre_step({"a": 1, "b": 2})
    params.attend(1, *tokens(2, batch=2))
    params.keep({"a": [], "b": []})
    params.pre_step({"b": 1})
    for layer in (1, 2):
        params.attend(layer, *tokens(1))


@BOTH
def test_a_copy_of_a_sequence_lacks_the_same_tokens(pages: dict[str, Any]) -> None:
    params = new_params(pages)
    params.pre_step({"a": 3})
    for layer in (1, 2):
        params.attend(layer, *tokens(3))
    params.pre_step({"a": 1})
    params.attend(1, *tokens(1))
    params.fork("a", "b")
    params.pre_step({"b": 1})
    with pytest.raises(InputError, match="got 2, which lacks the token at position 3 of 'b'"):
        params.attend(2, *tokens(1))
    params.reset()
    params.pre_step({"b": 1})
    params.attend(2, *tokens(1))


@BOTH
def test_a_layer_with_memory_from_the_start_is_called_from_the_first_step_on(pages: dict[str, Any]) -> None:
    params = new_params(pages, device="cpu")
    params.allocate_memory(2)
    params.pre_step({"a": 3})
    params.attend(1, *tokens(3))
    params.allocate_memory(3)
    params.pre_step({"a": 1})
    for layer in (2, 3):
        with pytest.raises(InputError, match=f"got {layer}, which lacks the token at position 0 of 'a'"):
            params.attend(layer, *tokens(1))


def test_prompts_are_remembered_after_every_layer_has_received_them() -> None:
    params = new_params(PAGES)
    params.pre_step({"a": 6})
    for layer in (1, 2):
        params.attend(layer, *tokens(6))
    params.pre_step({"a": 2})
    params.attend(1, *tokens(2))
    message = "tokens must be at most the 6 tokens of 'a' that every layer has received, got 8"
    with pytest.raises(InputError, match=message):
        params.remember(list(range(8)), "a")
    params.pre_step({"a": 0})
    with pytest.raises(InputError, match=message):
        params.remember(list(range(8)), "a")
    params.remember(list(range(6)), "a")
    assert params.match(list(range(8)), "b") == 4

"""What `InferenceParams` refuses; it is unchanged afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from inference_steps import DIM, HEADS, KV_HEADS, VALUE_DIM, Model, new_params, state

from undivided import InferenceParams, InputError


@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
def test_prompts_that_are_refused(paged: bool) -> None:
    model = Model(new_params(paged))
    model.step({"a": 3, "b": 3, "c": 0})
    before = state(model.params)
    cases = [
        (lambda: model.params.match([1, 2], "a"), "seq_id must not be the id of a sequence in the batch"),
        (lambda: model.params.match([1, 2], "d"), "seq_id must be one of at most max_batch_size=3"),
        (lambda: model.params.remember([1, 2], "d"), "seq_id must be the id of a sequence"),
        (lambda: model.params.remember([1] * 4, "a"), "tokens must be at most the 3 cached tokens of 'a'"),
        (lambda: model.params.match("ab", "e"), "tokens must be a list of ints"),
    ]
    for call, message in cases:
        with pytest.raises(InputError, match=message if paged or "list" in message else "is_paged must be True"):
            call()
        assert state(model.params) == before
    model.step({"b": 1, "a": 4})


K, V, Q = (torch.randn(2, 3, KV_HEADS, DIM), torch.randn(2, 3, KV_HEADS, VALUE_DIM), torch.randn(2, 3, HEADS, DIM))
REFUSED: dict[str, tuple[Callable[[InferenceParams], object], str]] = {
    "too-many-sequences": (
        lambda p: p.pre_step(dict.fromkeys(range(4), 1)),
        "step_dict must hold at most max_batch_size=3",
    ),
    "too-long": (
        lambda p: p.pre_step({"a": 1, "b": 19}),
        r"step_dict\['b'\] must leave the sequence within max_sequence_l",
    ),
    "negative": (lambda p: p.pre_step({"a": -1}), r"step_dict\['a'\] must be at least 0"),
    "ids-that-are-tensors": (
        lambda p: p.pre_step(dict.fromkeys(torch.tensor([0, 1]), 1)),
        r"step_dict must have ids that equal those of the next step(.|\n)*seq_ids\.tolist\(\)",
    ),
    "not-a-mapping": (lambda p: p.pre_step([1, 1]), "step_dict must map the id of each sequence"),
    "k-of-another-batch": (lambda p: p.attend(1, Q, K[:1], V[:1]), r"new_k must have shape \[2, new, 2, 8\] in 'bshd'"),
    "k-too-short": (
        lambda p: p.step(1, K[:, :1], V[:, :1]),
        r"new_k must have the 2 tokens per sequence that pre_step announced, got 1",
    ),
    "q-unlike-k": (lambda p: p.attend(1, Q[:, :2], K, V), r"q must have the tokens of new_k \(3\), got 2"),
    "q-of-another-batch": (lambda p: p.attend(1, Q[:1], K, V), "q must have the batch size of the cache"),
    "another-dtype": (lambda p: p.step(1, K.double(), V.double()), "new_k must have the dtype of the cache"),
    "a-format-that-is-none": (lambda p: p.step(1, K, V, "bhsd"), "qkv_format must be one of(.|\n)*x.transpose"),
    "packed-tokens-too-many": (lambda p: p.step(1, K[0, :2], V[0, :2], "thd"), "new_k must have the 3 tokens that"),
    "k-of-other-heads": (
        lambda p: p.step(1, Q[:, :, :3], V),
        r"new_k must have shape(.|\n)*HINT: num_heads_kv=3 at the construction of InferenceParams",
    ),
    "k-in-another-format": (
        lambda p: p.step(1, K.transpose(0, 1), V.transpose(0, 1)),
        r"new_k must have shape(.|\n)*HINT: this shape would fit qkv_format='sbhd'$",
    ),
    "k-in-no-format": (
        lambda p: p.step(1, K.transpose(1, 2), V.transpose(1, 2)),
        r"new_k must have shape(.|\n)*HINT: new_k\.permute\(0, 2, 1, 3\), if its axes are 'bhsd'",
    ),
    "fork-of-nobody": (lambda p: p.fork("z", "y"), "src must be the id of a sequence(.|\n)*the batch has 'a', 'b'"),
    "fork-onto-somebody": (lambda p: p.fork("a", "b"), "dst must not be the id of a sequence"),
    "fork-of-a-list": (lambda p: p.fork(["a"], "z"), r"src must be hashable, got \['a'\]"),
    "fork-onto-a-list": (lambda p: p.fork("a", ["z"]), r"dst must be hashable, got \['z'\]"),
    "truncate-nobody": (lambda p: p.truncate("z", 0), "seq_id must be the id"),
    "truncate-up": (lambda p: p.truncate("a", 6), "length must be at most the 4 cached tokens of 'a'"),
    "no-such-layer": (lambda p: p.convert_paged_to_nonpaged(7), "layer_number must be that of a layer with a cache"),
    "layer-no-number": (lambda p: p.step("first", K, V), "layer_number must be an int"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
def test_refused_and_nothing_changed(paged: bool, case: str) -> None:
    model = Model(new_params(paged))
    model.step({"a": 3, "b": 3})
    model.step({"a": 1, "b": 2})
    before = state(model.params)
    call, message = REFUSED[case]
    with pytest.raises(InputError, match=message):
        call(model.params)
    assert state(model.params) == before
    model.step({"b": 1, "a": 4})  # the cache still works


def test_no_pages_and_nothing_changed() -> None:
    """Half of the batch fits, and one sequence ends: still all or nothing."""
    model = Model(new_params(True, max_sequence_length=100))
    model.step({"a": 10, "b": 10, "c": 10})
    before = state(model.params)
    with pytest.raises(InputError, match="step_dict must fit into the 5 free pages of 11") as refusal:
        model.params.pre_step({"d": 3, "a": 1, "b": 40})
    assert "total_num_pages" in str(refusal.value)
    assert state(model.params) == before
    model.step({"a": 1, "b": 2, "c": 0})


def test_a_full_batch_cannot_fork() -> None:
    params = new_params(False)
    params.pre_step(dict.fromkeys("abc", 1))
    with pytest.raises(InputError, match="dst must be one of at most max_batch_size=3"):
        params.fork("a", "d")


@pytest.mark.parametrize("call", [lambda p: p.attend(1, Q, K, V), lambda p: p.step(1, K, V)], ids=["attend", "step"])
@pytest.mark.parametrize("after", ["construction", "fork", "truncate", "an-empty-step"])
def test_a_layer_before_its_step(after: str, call: Callable[[InferenceParams], object]) -> None:
    """A fork or a truncation invalidates the last step: `pre_step` is required again."""
    params = new_params(False)
    if after != "construction":
        params.pre_step({"a": 3, "b": 3})
        {
            "fork": lambda: params.fork("a", "c"),
            "truncate": lambda: params.truncate("a", 1),
            "an-empty-step": lambda: params.pre_step({}),
        }[after]()
    with pytest.raises(InputError, match="inference_params must have a step"):
        call(params)


SIZES: dict[str, Any] = {
    "max_batch_size": 3,
    "max_sequence_length": 20,
    "num_heads_kv": KV_HEADS,
    "head_dim_k": DIM,
    "dtype": torch.float32,
    "head_dim_v": None,
    "is_paged": True,
    "page_size": 4,
    "total_num_pages": 4,
    "max_ctx_len": None,
    "qkv_format": "thd",
    "custom_cache_manager": None,
}


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("max_batch_size", 0),
        ("max_sequence_length", 1.5),
        ("num_heads_kv", None),
        ("head_dim_k", None),
        ("dtype", None),
        ("dtype", torch.int8),
        ("head_dim_v", 0),
        ("page_size", None),
        ("page_size", 0),
        ("total_num_pages", 0),
        ("max_ctx_len", 21),
        ("max_ctx_len", 0),
        ("qkv_format", "bhsd"),
        ("custom_cache_manager", object()),
    ],
)
def test_invalid_params_are_refused(argument: str, value: object) -> None:
    with pytest.raises(InputError, match=f"^{argument} must"):
        InferenceParams(**SIZES | {argument: value})

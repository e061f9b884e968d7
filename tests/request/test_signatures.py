"""Calls that do not fit a signature: an argument is missing, misspelt, given twice, or one too many."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import undivided
from undivided import InputError, masks, parallel, quantization
from undivided.arguments.signature import checked_call
from undivided.integrations import checkpoints

Q = torch.zeros(2, 5, 4, 8)
UNTYPED: Any = undivided
"""For calls that type checkers refuse."""

RESULTS = {"Decision", "Checkpoint", "Quantized", "Mask", "NormalForm", "Structure"}
"""What the library returns; nobody builds one by hand."""

PLAIN = {"backends", "last_decision", "describe", "format_of"}
"""Functions of at most one argument that reads itself."""


def _public() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every public function and class, and every public method that requires an argument."""
    for module in (undivided, masks, quantization, parallel, checkpoints):
        for name in module.__all__:
            value = getattr(module, name)
            if callable(value) and name not in RESULTS | PLAIN | {"Format"} and not _is_error(value):
                yield f"{module.__name__}.{name}", value
    for thing, methods in METHODS.items():
        for method in methods.split():
            yield f"{thing}.{method}", _bound(thing, method)


METHODS = {
    "KVCache": "append attend fork free keep truncate",
    "PagedKVCache": "append attend evict fork free keep match remember truncate",
    "InferenceParams": "allocate_memory attend evict fork free keep match pre_step remember step truncate",
    "ContextParallel": "bind shard unshard",
    "RotaryPositionEmbedding": "forward cos_sin",
    "MultiheadAttention": "forward set_context_parallel_group",
    "TransformerLayer": "forward set_tensor_parallel_group",
    "Mask": "draw intervals plot to_dense",
}


def _bound(thing: str, method: str) -> Callable[..., Any]:
    """The method of an object, which is built at the call."""

    def call(*arguments: Any, **options: Any) -> Any:
        return getattr(_build(thing), method)(*arguments, **options)

    call.__signature__ = inspect.signature(getattr(_class(thing), method))  # type: ignore[attr-defined]
    return call


def _class(thing: str) -> Any:
    return masks.Mask if thing == "Mask" else getattr(undivided, thing)


def _build(thing: str) -> Any:
    fp32 = {"dtype": torch.float32}
    arguments: tuple[tuple[Any, ...], dict[str, Any]] = {
        "KVCache": ((1, 8, 1, 4), fp32),
        "PagedKVCache": ((4, 4, 1, 4), {"batch": 1, **fp32}),
        "InferenceParams": ((1, 8), {"num_heads_kv": 1, "head_dim_k": 4, **fp32}),
        "ContextParallel": ((), {"rank": 0, "world": 2}),
        "RotaryPositionEmbedding": ((8,), {}),
        "MultiheadAttention": ((16, 2), {"qkv_format": "bshd"}),
        "TransformerLayer": ((16, 32, 2), {"attn_input_format": "bshd"}),
        "Mask": ((), {}),
    }[thing]
    return _class(thing)(*arguments[0], **arguments[1])


def _is_error(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, BaseException)


def _required(call: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(call).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in parameters if p.default is p.empty and p.kind in kinds and p.name != "self"]


PUBLIC = dict(_public())


@pytest.mark.parametrize("name", [name for name, call in PUBLIC.items() if _required(call)])
def test_a_call_without_arguments_names_one_that_it_requires(name: str) -> None:
    """Python's TypeError did not say what the argument is."""
    with pytest.raises(InputError, match=r"must .*, got no value") as caught:
        PUBLIC[name]()
    assert isinstance(caught.value, TypeError)
    assert caught.value.argument in _required(PUBLIC[name])
    assert caught.value.hint is not None


@pytest.mark.parametrize("name", PUBLIC)
def test_an_unknown_keyword_is_named_beside_those_that_exist(name: str) -> None:
    with pytest.raises(
        InputError, match=r"must be called with its own arguments, got 'qqqqq'\n  HINT: (.|\n)*arguments: "
    ) as caught:
        PUBLIC[name](qqqqq=1)
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize("name", ["attention", "scaled_dot_product_attention"])
def test_an_unknown_keyword_is_named_by_export(name: str) -> None:
    """While torch.export runs the code, PyTorch reports that it compiles: the error was a RecursionError."""

    class Wrong(torch.nn.Module):
        def forward(self, q: torch.Tensor) -> torch.Tensor:
            return getattr(UNTYPED, name)(q, q, q, qqqqq=1)  # type: ignore[no-any-return]

    with pytest.raises(InputError, match="must be called with its own arguments, got 'qqqqq'"):
        torch.export.export(Wrong(), (Q,), strict=False)


def test_a_wrong_mask_is_named_by_export() -> None:
    class Wrong(torch.nn.Module):
        def forward(self, q: torch.Tensor) -> torch.Tensor:
            return UNTYPED.attention(q, q, q, layout="bshd", mask=UNTYPED.masks.window(3, ritgh=0))  # type: ignore[no-any-return]

    with pytest.raises(InputError, match="did you mean 'right'"):
        torch.export.export(Wrong(), (Q,), strict=False)


def test_a_forgotten_layout_is_an_error_with_the_layouts() -> None:
    want = r"layout must be one of 'bshd', 'sbhd', 'bhsd', 'thd', got no value\n  HINT: b batch, "
    with pytest.raises(TypeError, match=want) as caught:
        UNTYPED.attention(Q, Q, Q)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (type(copy), str(copy)) == (type(caught.value), str(caught.value))
    with pytest.raises(TypeError, match="layout must be given to explain, one of 'bshd', 'sbhd', 'bhsd', 'thd', got"):
        UNTYPED.explain(Q, Q, Q)
    torch.compiler.reset()  # after too many recompilations in other tests the call would run uncompiled
    with pytest.raises(InputError, match=r"layout must be one of .*, got no value"):
        torch.compile(UNTYPED.attention, backend="eager")(Q, Q, Q)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: UNTYPED.attention(Q, Q, layout="bshd"), "v must be a torch.Tensor, got no value"),
        (
            lambda: UNTYPED.attention(Q, Q, Q, "bshd"),
            "attention must be called with at most q, k and v by position, got 4 arguments\n  HINT: layout='bshd'",
        ),
        (
            lambda: UNTYPED.attention(Q, Q, Q, UNTYPED.masks.causal(), layout="bshd"),
            "got 4 arguments\n  HINT: mask=...",
        ),
        (lambda: UNTYPED.attention(Q, key=Q, v=Q, layout="bshd"), "got 'key'\n  HINT: k="),
        (lambda: UNTYPED.scaled_dot_product_attention(Q, Q), "value must be a torch.Tensor, got no value"),
        (lambda: UNTYPED.scaled_dot_product_attention(Q, Q, Q, is_casual=True), "did you mean 'is_causal'?"),
        (
            lambda: UNTYPED.scaled_dot_product_attention(Q, Q, Q, layout="bshd"),
            "got 'layout'\n  HINT: undivided.attention has layout=",
        ),
        (
            lambda: UNTYPED.masks.window(3),
            "right must be given to window, got no value\n  HINT: window(left, right, ...)",
        ),
        (
            lambda: UNTYPED.masks.window(3),
            "right: number of keys after it. masks.window(256, 0) is the 256 keys before",
        ),
        (lambda: UNTYPED.masks.window((256, 0)), "for a tuple of both, masks.window(*window_size)."),
        (lambda: UNTYPED.masks.window(right=0), "left: number of keys before the query's own key, int; None"),
        (lambda: UNTYPED.masks.window(1, 2, None, 4), "window must be given at most 3 arguments by position, got 4"),
        (lambda: UNTYPED.masks.window(1, 2, left=3), "left must be given once, got a position and a keyword"),
        (lambda: UNTYPED.masks.documents(cu_seqlens=[0, 5]), "got 'cu_seqlens'\n  HINT: did you mean 'cu_seqlens_q'?"),
        (lambda: UNTYPED.KVCache(1, 8, 1, 4), "dtype must be given to KVCache, got no value"),
        (lambda: _build("KVCache").append(Q), "v must be given to KVCache.append, got no value"),
        (lambda: _build("TransformerLayer")(attention_maks=Q), "HINT: did you mean 'attention_mask'?"),
        (
            lambda: UNTYPED.MultiheadAttention(embed_dim=16, num_heads=2),
            "got 'embed_dim', 'num_heads'\n  HINT: embed_dim: hidden_size=; num_heads: num_attention_heads=\n  argum",
        ),
        (lambda: UNTYPED.MultiheadAttention(16, 2, batch_first=True), "HINT: qkv_format='bshd' for True, 'sbhd' for"),
        (lambda: UNTYPED.TransformerLayer(16, 32, 2, batch_first=True), "HINT: attn_input_format='bshd' for True, 'sb"),
        (lambda: UNTYPED.TransformerLayer(16, 32, 2, qkv_format="bshd"), "HINT: attn_input_format="),
        (lambda: UNTYPED.TransformerLayer(d_model=16, nhead=2), "d_model: hidden_size=; nhead: num_attention_heads="),
        (lambda: UNTYPED.DotProductAttention(2, 8, dropout=0.1), "HINT: attention_dropout="),
        (lambda: _build("MultiheadAttention")(Q, need_weights=False), "HINT: leave it out: no backend returns weights"),
        (
            lambda: _build("MultiheadAttention")(Q, key_padding_mask=Q),
            "HINT: attention_mask=key_padding_mask[:, None, None], with a padding mask type",
        ),
    ],
)
def test_the_message_says_what_to_write(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError) as caught:
        call()
    assert message in str(caught.value)


def test_a_type_error_from_inside_a_checked_function_stays_as_it_is() -> None:
    @checked_call
    def add(left: Any, right: Any = "x") -> Any:
        return left + right

    with pytest.raises(TypeError, match="unsupported operand") as caught:
        add(1)
    assert not isinstance(caught.value, InputError)


def test_signatures_are_those_that_the_source_has() -> None:
    assert _required(undivided.attention) == ["q", "k", "v", "layout"]
    assert _required(undivided.scaled_dot_product_attention) == ["query", "key", "value"]
    assert _required(undivided.TransformerLayer) == ["hidden_size", "ffn_hidden_size", "num_attention_heads"]

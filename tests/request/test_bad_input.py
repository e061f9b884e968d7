"""One table of wrong calls: each raises InputError with exactly this message, and no other exception.

A message names the argument, what it must be, and what it was; a HINT follows where one step fixes it.
"""

from __future__ import annotations

import inspect
import math
import pickle
import re
import typing
from collections.abc import Callable
from typing import Any

import pytest
import torch
from wrong_call_inputs import Q, WrongCalls, att, paged, square, t
from wrong_mask_constructions import CONSTRUCTIONS
from wrong_masks import MASKS
from wrong_options import OPTIONS
from wrong_other_calls import OTHERS
from wrong_tensors import TENSORS

import undivided
from undivided import InputError, explain, masks
from undivided.request import foreign as _foreign

# call, message, hint
CALLS: WrongCalls = {**TENSORS, **MASKS, **CONSTRUCTIONS, **OPTIONS, **OTHERS}


UNAVAILABLE: dict[str, Callable[[Any], Any]] = {
    "alibi_slopes": lambda device: undivided.alibi_slopes(4, device=device),
    "KVCache": lambda device: undivided.KVCache(1, 8, 1, 16, dtype=torch.float32, device=device),
    "MultiheadAttention": lambda device: undivided.MultiheadAttention(64, 4, qkv_format="bshd", device=device),
    "Mask.to": lambda device: masks.causal().to(device),
    "Machine.this": lambda device: undivided.Machine.this(device),
}


@pytest.mark.parametrize("call", UNAVAILABLE.values(), ids=UNAVAILABLE)
@pytest.mark.parametrize("device", ["cuda:99", torch.device("cuda:99"), 99], ids=["name", "device", "number"])
def test_a_device_that_pytorch_cannot_use_is_named(device: Any, call: Callable[[Any], Any]) -> None:
    """PyTorch's error, "Torch not compiled with CUDA enabled", came from the first tensor that was made there.

    A number, as of `torch.cuda.current_device()`, was said to be no device if there is no accelerator.
    """
    message = r"^device must be available, got (cuda:)?99\n  HINT: PyTorch says: \w+"
    with pytest.raises(InputError, match=message) as caught:
        call(device)
    assert caught.value.argument == "device"


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_call_raises_its_message(name: str) -> None:
    call, message, hint = CALLS[name]
    with pytest.raises(InputError) as caught:
        call()
    assert str(caught.value) == (message if hint is None else f"{message}\n  HINT: {hint}")
    assert caught.value.hint == hint
    assert message.startswith(f"{caught.value.argument} must ")


@pytest.mark.parametrize("name", [name for name in CALLS if not name.startswith(("merge", "machine"))])
def test_a_repeated_wrong_call_raises_the_same_error(name: str) -> None:
    """Nothing that is cached from the first call makes the second one pass."""
    call, message, _ = CALLS[name]
    for _ in range(2):
        with pytest.raises(InputError) as caught:
            call()
        assert str(caught.value).startswith(message)


def test_explain_refuses_what_attention_refuses() -> None:
    for arguments in ({"layout": "bhds"}, {"layout": "bshd", "scale": math.nan}, {"layout": "bshd", "sinks": t(3)}):
        messages = []
        for function in (undivided.attention, explain):
            with pytest.raises(InputError) as caught:
                function(Q, Q, Q, **arguments)
            messages.append(str(caught.value))
        assert messages[0] == messages[1]


def test_values_of_a_mask_changed_in_place_are_checked_again() -> None:
    n = torch.tensor([5, 3])
    mask = masks.lengths(n, n)
    square(mask=mask)
    n[0] = 6
    with pytest.raises(InputError, match=r"lengths\(kv\) of at most 5, the kv length of the call, got 6"):
        square(mask=mask)


def test_page_numbers_beyond_a_sequences_length_may_be_anything() -> None:
    table = torch.tensor([[0, -1, 99], [1, 2, 3]], dtype=torch.int32)
    assert paged(pages=table).shape == Q.shape
    table[0, 0] = 6
    with pytest.raises(InputError, match=r"pages must number pages of the pool, 0 to 5, .*, got 6"):
        paged(pages=table)


@pytest.mark.parametrize(("heads", "qk_dim", "v_dim", "name"), [(0, 4, 4, "q"), (2, 0, 4, "q"), (2, 4, 0, "v")])
def test_pages_without_numbers_are_refused_as_other_keys_are(heads: int, qk_dim: int, v_dim: int, name: str) -> None:
    """A head size of 0 ended in a ZeroDivisionError or in a RuntimeError of the kernel, no heads in a ValueError."""
    q, k, v = torch.ones(1, 1, heads, qk_dim), torch.ones(2, 4, heads, qk_dim), torch.ones(2, 4, heads, v_dim)
    with pytest.raises(InputError, match=f"^{name} must have at least one head and a head size of at least 1"):
        undivided.attention(q, k, v, layout="bshd", mask=masks.lengths([3]), pages=torch.zeros(1, 2, dtype=torch.int32))


def test_tensors_without_a_value_on_the_host_are_checked_by_structure_alone() -> None:
    meta = {"device": "meta"}
    q = t(2, 5, 4, 8, **meta)
    n = t(2, dtype=torch.int32, **meta)
    assert explain(q, q, q, layout="bshd", mask=masks.causal() & masks.lengths(n, n)).chosen is not None
    with pytest.raises(InputError, match="values on a GPU are not compared"):
        explain(q, q, q, layout="bshd", mask=masks.causal() & masks.lengths(n, n.clone()))


def test_an_input_error_is_a_value_error_and_survives_pickling() -> None:
    with pytest.raises(ValueError, match="layout must be one of") as caught:
        att(layout="bhds")
    copy = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(copy, InputError)
    assert (str(copy), copy.argument, copy.hint) == (str(caught.value), "layout", caught.value.hint)  # type: ignore[attr-defined]


FOREIGN = {
    "is_causal": (True, "mask=masks.causal(); "),
    "causal": (True, "mask=masks.causal(); "),
    "attn_mask": (None, "mask=masks.dense(tensor) for booleans"),
    "cu_seqlens_q": (None, 'layout="thd" and mask=masks.documents('),
    "window_size": ((3, 0), "mask=masks.window(left, right)"),
    "softmax_scale": (0.5, "scale="),
    "softcapp": (0.5, "softcap="),
    "need_weights": (True, "no backend returns weights; v = identity gives them: docs/troubleshooting.md#hf-output-at"),
    "training": (True, "dropout_p=p if self.training else 0.0"),
    "score_mod": (None, "bias=, alibi_slopes= or softcap="),
    "softmax_scal": (0.5, "scale="),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", FOREIGN)
def test_a_keyword_of_another_library_gives_a_hint_with_ours(name: str, compiled: bool) -> None:
    """The error was once a bare "unexpected keyword argument"."""
    call = torch.compile(undivided.attention, backend="eager") if compiled else undivided.attention
    value, hint = FOREIGN[name]
    with pytest.raises(InputError, match=rf"attention must be called with its own arguments, got '{name}'") as caught:
        call(Q, Q, Q, layout="bshd", **{name: value})  # type: ignore[call-overload]
    assert (caught.value.hint or "").startswith(hint)
    assert isinstance(caught.value, TypeError)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (type(copy), str(copy), copy.hint) == (type(caught.value), str(caught.value), caught.value.hint)


def test_every_foreign_keyword_is_one_that_attention_does_not_have() -> None:
    own = set(inspect.signature(undivided.attention).parameters)
    assert not own & set(_foreign._KEYWORD_HINTS)
    for hint in _foreign._KEYWORD_HINTS.values():
        word = re.match(r"(\w+)=", hint)
        assert word is None or word[1] in own


def test_the_typed_signature_takes_no_other_keyword() -> None:
    for overload in typing.get_overloads(undivided.attention):
        kinds = {p.kind for p in inspect.signature(overload).parameters.values()}
        assert inspect.Parameter.VAR_KEYWORD not in kinds


@pytest.mark.parametrize("name", ["bias", "sinks"])
def test_a_sparse_input_is_refused_after_a_dense_one_of_its_shape(name: str) -> None:
    """The cache key of a call once did not distinguish the two."""
    tensor = torch.ones(2)
    q = torch.randn(1, 2, 2, 8)
    undivided.attention(q, q, q, layout="bshd", **{name: tensor})
    with pytest.raises(InputError, match=f"{name} must be a dense"):
        undivided.attention(q, q, q, layout="bshd", **{name: tensor.to_sparse()})


def test_a_numpy_scale_is_a_number() -> None:
    """Comparing it to the largest double warned of an overflow in its own precision."""
    numpy = pytest.importorskip("numpy")
    q = torch.randn(1, 2, 2, 8)
    want = undivided.attention(q, q, q, layout="bshd", scale=0.5)
    assert torch.equal(undivided.attention(q, q, q, layout="bshd", scale=numpy.float32(0.5)), want)
    with pytest.raises(InputError, match="scale must be a number from -1e30"):
        undivided.attention(q, q, q, layout="bshd", scale=numpy.float16("inf"))


def test_views_of_one_block_table_are_checked_one_by_one() -> None:
    q, pool = torch.randn(2, 1, 2, 16), torch.randn(4, 8, 2, 16)
    table = torch.tensor([[0, 1], [2, 3], [-1, 4]], dtype=torch.int32)
    given: dict[str, Any] = {"layout": "bshd", "mask": masks.lengths([12, 16])}
    for _ in range(2):
        undivided.attention(q, pool, pool, pages=table[:2], **given)
        undivided.attention(q, pool, pool, pages=table[:2].T, **given)
        for wrong in (table[1:], table[::2], torch._neg_view(table[:2])):
            with pytest.raises(undivided.InputError, match=r"pages must number pages of the pool.* got -1"):
                undivided.attention(q, pool, pool, pages=wrong, **given)
    table[1, 1] = 5
    with pytest.raises(undivided.InputError, match="pages must number pages of the pool"):
        undivided.attention(q, pool, pool, pages=table[:2], **given)


@pytest.mark.parametrize("array", ["none", "small", "large"])
def test_a_block_table_is_checked_again_once_it_was_changed(array: str) -> None:
    """A write to the array of NumPy below the table leaves its version as it is."""
    q, pool = torch.randn(1, 1, 2, 16), torch.randn(4, 8, 2, 16)
    pages, mask = torch.tensor([[0, 1] + [0] * 5000 * (array == "large")], dtype=torch.int32), masks.lengths([12])
    if array != "none":
        pytest.importorskip("numpy")
        pages = torch.from_numpy(pages.numpy().copy())
    given = {"layout": "bshd", "mask": mask, "pages": pages}
    for _ in range(2):
        undivided.attention(q, pool, pool, **given)
    written = pages if array == "none" else pages.numpy()
    written[0, 1] = 4
    with pytest.raises(undivided.InputError, match="pages must number pages of the pool, 0 to 3"):
        undivided.attention(q, pool, pool, **given)
    written[0, 1] = 3
    undivided.attention(q, pool, pool, **given)
    with pytest.raises(undivided.InputError, match="0 to 1"):  # the same table, a smaller pool
        undivided.attention(q, pool[:2], pool[:2], **given)


def test_a_hint_does_not_search_billions_of_heads() -> None:
    """It lists the divisors of the query heads: for 2^31 - 1 heads that took a minute and a half."""
    q, k = torch.empty(1).expand(1, 4, 2**31 - 1, 1), torch.empty(1).expand(1, 5, 3, 1)
    with pytest.raises(InputError, match="a number of key heads that divides the query heads"):
        undivided.explain(q, k, k, layout="bshd")


@pytest.mark.parametrize("wrong", [False, torch.tensor(0.0), 0j], ids=repr)
def test_a_wrong_dropout_is_refused_after_a_right_one_too(wrong: Any) -> None:
    q = torch.randn(1, 5, 2, 8)
    for _ in range(2):
        with pytest.raises(InputError, match="dropout_p must be a number from 0 to 1"):
            undivided.attention(q, q, q, layout="bshd", dropout_p=wrong)
        undivided.attention(q, q, q, layout="bshd", dropout_p=0)
        undivided.attention(q, q, q, layout="bshd", dropout_p=0.0)

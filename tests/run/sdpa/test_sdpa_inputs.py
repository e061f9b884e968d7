"""Odd input: `undivided.scaled_dot_product_attention` returns or raises what PyTorch returns or raises, case by
case."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import undivided
from undivided.errors import InputError

ours = undivided.scaled_dot_product_attention
Call = tuple[tuple[Any, ...], dict[str, Any]]
DTYPES = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.uint8,
    torch.complex64,
    torch.float8_e4m3fn,
)


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape).to(dtype)


def query(dtype: torch.dtype = torch.float32) -> Tensor:
    return ones(2, 4, 3, 8, dtype=dtype)


def key(dtype: torch.dtype = torch.float32) -> Tensor:
    return ones(2, 4, 5, 8, dtype=dtype)


def of_few_axes() -> Iterator[tuple[str, Call]]:
    for shape in ((), (0,), (3,), (8,)):
        yield f"all-{shape}", ((ones(*shape),) * 3, {})
    for place, short in itertools.product(range(3), ((), (8,))):
        tensors = [ones(3, 8), ones(5, 8), ones(5, 8)]
        tensors[place] = ones(*short)
        yield f"{place}-{short}", (tuple(tensors), {})


def of_size_zero() -> Iterator[tuple[str, Call]]:
    """Every combination of empty batch, heads, lengths and head sizes, for every rank."""
    for rank, q_len, kv_len, size in itertools.product((2, 3, 4, 5), (0, 3), (0, 5), (0, 8)):
        for value_size, heads, batch in itertools.product((0, size or 8, 6), (0, 2), (0, 2)):
            lead = (2, batch, heads)[5 - rank :]
            if (rank == 2 and not (heads and batch)) or (rank == 3 and not batch):
                continue
            if 0 not in (*lead, q_len, kv_len, size, value_size):
                continue
            tensors = ones(*lead, q_len, size), ones(*lead, kv_len, size), ones(*lead, kv_len, value_size)
            name = f"{list(lead)}-{q_len}x{kv_len}-{size}-{value_size}"
            yield name, (tensors, {})
            if rank == 4:
                yield f"{name}-causal", (tensors, {"is_causal": True})
                yield f"{name}-bool", ((*tensors, ones(q_len, kv_len, dtype=torch.bool)), {})
                yield f"{name}-added", ((*tensors, ones(q_len, kv_len)), {})
                if heads:
                    yield f"{name}-gqa", (tensors, {"enable_gqa": True})


def of_dtypes() -> Iterator[tuple[str, Call]]:
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        for axes in (2, 3, 4):
            tensors = (query(dtype), key(dtype), key(dtype))
            yield f"all-{name}-{axes}d", (tuple(t[(0,) * (4 - axes)] for t in tensors), {})
        yield f"query-{name}", ((query(dtype), key(), key()), {})
        yield f"key-{name}", ((query(), key(dtype), key()), {})
        yield f"value-{name}", ((query(), key(), key(dtype)), {})
        for of_query in DTYPES[:4]:
            tensors = query(of_query), key(of_query), key(of_query)
            yield f"mask-{name}-of-{of_query}", ((*tensors, ones(3, 5, dtype=dtype)), {})


def of_shapes() -> Iterator[tuple[str, Call]]:
    yield "head-size", ((query(), ones(2, 4, 5, 7), key()), {})
    yield "batches", ((query(), ones(3, 4, 5, 8), key()), {})
    yield "value-batch", ((query(), key(), ones(3, 4, 5, 8)), {})
    for of_q, of_k, of_v in itertools.product((1, 2, 3, 4), repeat=3):
        tensors = ones(2, of_q, 3, 8), ones(2, of_k, 5, 8), ones(2, of_v, 5, 8)
        yield f"heads-{of_q}-{of_k}-{of_v}", (tensors, {})
        yield f"gqa-{of_q}-{of_k}-{of_v}", (tensors, {"enable_gqa": True})
    yield "gqa-of-no-heads", ((ones(2, 0, 3, 8), ones(2, 0, 5, 8), ones(2, 0, 5, 8)), {"enable_gqa": True})


def of_options() -> Iterator[tuple[str, Call]]:
    wrong: dict[str, tuple[Any, ...]] = {
        "dropout_p": (2.0, -0.1, float("nan"), "a", None),
        "scale": ("1", torch.ones(2)),
        "is_causal": (1, None, torch.tensor(True)),
        "enable_gqa": (1, None),
        "attn_mask": ([True], 1),
        "wrong_name": (1,),
    }
    for mask in ("x", ones(4, 4, dtype=torch.int64), ones(4, 4), ones(4, 4, dtype=torch.bool)):
        for sizes in ((0, 4, 8), (2, 0, 3, 4, 8)):
            empty = ones(*sizes), ones(*sizes), ones(*sizes)
            kind = mask if isinstance(mask, str) else mask.dtype
            yield f"attn_mask={kind}-for-{sizes}", (empty, {"attn_mask": mask})
    for name, values in wrong.items():
        for value in values:
            yield f"{name}={value!r}".replace("\n", ""), ((query(), key(), key()), {name: value})
    yield "scale=0", ((query(), key(), key()), {"scale": 0.0})
    yield "scale=1", ((query(), key(), key()), {"scale": 1})
    yield "scale=-1.0", ((query(), key(), key()), {"scale": -1.0})
    yield "dropout_p=0", ((query(), key(), key()), {"dropout_p": 0})


def of_kinds() -> Iterator[tuple[str, Call]]:
    yield "list", (([1.0], key(), key()), {})
    yield "none", ((query(), None, key()), {})
    yield "nothing", ((), {})
    for place in range(3):
        tensors = [query(), key(), key()]
        tensors[place] = tensors[place].to("meta")
        yield f"{place}-meta", (tuple(tensors), {})
    yield "sparse", ((query().to_sparse(), key(), key()), {})


CASES = dict(itertools.chain(of_few_axes(), of_size_zero(), of_dtypes(), of_shapes(), of_options(), of_kinds()))
SAME_TEXT = (
    "Expected query, key, and value",
    "Expected attn_mask dtype",
    "must be Tensor",
    "must be bool",
    "must be float",
    "must match the size",
    "not implemented for",
    "Number of heads",
)
"""Parts of PyTorch's messages; other parts differ between its CPU kernels and meta tensors."""


@pytest.mark.parametrize(("args", "options"), CASES.values(), ids=CASES)
def test_as_pytorch(args: tuple[Any, ...], options: dict[str, Any]) -> None:
    theirs, expected = outcome(args, options)
    if theirs is None:
        found = ours(*args, **options)
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        torch.testing.assert_close(found, expected.nan_to_num(0.0), rtol=0.02, atol=0.02)
        return
    with pytest.raises(type(theirs)) as mine:
        ours(*args, **options)
    if any(text in str(theirs) for text in SAME_TEXT):
        assert str(theirs).partition("\n")[0] in str(mine.value)


def outcome(args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Exception | None, Any]:
    """The error that PyTorch raises, or its result."""
    if torch.__version__ < "2.12" and has_no_heads(args[:3]):
        pytest.skip("PyTorch 2.10 and 2.11 end the process for tokens without heads")
    try:
        return None, F.scaled_dot_product_attention(*args, **options)
    except Exception as error:
        return error, None


def has_no_heads(tensors: Sequence[Any]) -> bool:
    """Whether q, k and v [B, H, S, D] have tokens of one head size, but no heads."""
    fits = all(isinstance(t, Tensor) and t.dim() == 4 and t.shape[1] == 0 and t.shape[2] > 0 for t in tensors)
    return fits and len({t.shape[3] for t in tensors}) == 1


def masks_of_every_shape() -> list[tuple[int, ...]]:
    sizes = ((), (3,), (5,), (3, 4), (3, 5), (2, 3, 5), (4, 3, 5), (2, 2, 3, 5), (2, 1, 4, 3, 5), (0, 5), (3, 0))
    return list(sizes)


@pytest.mark.parametrize("shape", masks_of_every_shape(), ids=str)
@pytest.mark.parametrize("axes", [2, 3, 4])
def test_a_mask_that_does_not_broadcast_is_a_runtime_error(shape: tuple[int, ...], axes: int) -> None:
    """PyTorch's is an IndexError for one axis, which its CPU kernel does not take; here it is taken if it
    broadcasts."""
    tensors = [t[(0,) * (4 - axes)] for t in (query(), key(), key())]
    try:
        expected = F.scaled_dot_product_attention(*tensors, ones(*shape))
    except RuntimeError:
        with pytest.raises(InputError) as error:
            ours(*tensors, ones(*shape))
        assert isinstance(error.value, RuntimeError)
    except IndexError:
        if shape != (3,):
            torch.testing.assert_close(ours(*tensors, ones(*shape)), tensors[2][..., :3, :])
    else:
        torch.testing.assert_close(ours(*tensors, ones(*shape)), expected)


@pytest.mark.parametrize("rank", [2, 4])
def test_a_head_size_of_zero_has_gradients(rank: int) -> None:
    lead = (2, 3)[4 - rank :]
    shapes = ((*lead, 3, 0), (*lead, 5, 0), (*lead, 5, 4))
    inputs = [torch.ones(shape, requires_grad=True) for shape in shapes]
    out, theirs = (f(*inputs) for f in (ours, F.scaled_dot_product_attention))
    found, expected = (torch.autograd.grad(o.sum(), inputs) for o in (out, theirs))
    assert [g.shape for g in found] == [g.shape for g in expected]
    torch.testing.assert_close(found[2], torch.full(shapes[2], 3 / 5))


def test_an_error_is_of_both_types_has_both_messages_and_can_be_pickled() -> None:
    with pytest.raises(InputError) as caught:
        ours(query(), key().double(), key())
    error = caught.value
    assert isinstance(error, ValueError)
    assert isinstance(error, RuntimeError)
    assert (error.argument, error.hint) == ("key", "key.to(query.dtype), or run under torch.autocast")
    first, pytorchs, hint = str(error).split("\n")
    assert first == "key must have the dtype of query (torch.float32), got torch.float64"
    assert pytorchs.startswith("  PYTORCH: Expected query, key, and value to have the same dtype")
    assert hint.startswith("  HINT: key.to")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.argument) == (type(error), str(error), "key")


def test_an_error_under_autocast_is_of_both_types() -> None:
    q = torch.randn(1, 2, 4, 8)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(undivided.InputError) as caught:
        undivided.scaled_dot_product_attention(q.to_sparse(), q, q)
    assert isinstance(caught.value, RuntimeError)


def test_without_an_allowed_kernel_the_error_has_pytorchs_message() -> None:
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        for function in (F.scaled_dot_product_attention, ours):
            with pytest.raises(RuntimeError, match="No viable backend for scaled_dot_product_attention was found"):
                function(query(), key(), key())
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), pytest.raises(RuntimeError, match="No available kernel"):
        ours(query(), key(), key())


def test_arguments_that_crash_pytorch_are_a_runtime_error_too() -> None:
    """It divides by the number of key heads, which ends the process where that is 0."""
    with pytest.raises(RuntimeError, match=r"key must have a number of heads that divides query's \(4\), got 0"):
        ours(query(), ones(2, 0, 5, 8), ones(2, 0, 5, 8), enable_gqa=True)


@pytest.mark.parametrize("flag", [torch.ones(2), torch.ones(0), torch.ones((), device="meta")], ids=str)
@pytest.mark.parametrize("name", ["is_causal", "enable_gqa"])
def test_a_flag_that_is_a_tensor_is_refused(name: str, flag: Tensor) -> None:
    q = torch.randn(1, 2, 3, 8)
    with pytest.raises(InputError, match=f"{name} must be True or False"):
        undivided.scaled_dot_product_attention(q, q, q, **{name: flag})


@pytest.mark.parametrize(
    "shapes",
    [
        pytest.param(((0, 2, 3, 8), (0, 2, 4, 8), (0, 2, 4, 8)), id="no-batch-element"),
        pytest.param(((2, 0, 3, 8), (2, 0, 4, 8), (2, 0, 4, 8)), id="no-head"),
        pytest.param(((2, 2, 3, 8), (2, 2, 4, 8), (2, 2, 4, 0)), id="no-head-size-of-values"),
        pytest.param(((0, 3, 8), (0, 4, 8), (0, 4, 8)), id="no-head-of-three-axes"),
    ],
)
@pytest.mark.parametrize("mask_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("enable_gqa", [False, True])
def test_every_argument_of_an_empty_result_has_zero_gradients(
    shapes: tuple[tuple[int, ...], ...], mask_dtype: torch.dtype, enable_gqa: bool
) -> None:
    q, k, v = (torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes)
    attn_mask = torch.zeros(3, 4, dtype=mask_dtype, requires_grad=True)
    out = ours(q, k, v, attn_mask, enable_gqa=enable_gqa)
    assert out.shape == (*q.shape[:-1], v.shape[-1])
    assert out.dtype == q.dtype
    inputs = (q, k, v, attn_mask)
    for tensor, gradient in zip(inputs, torch.autograd.grad(out.sum(), inputs), strict=True):
        assert gradient.dtype == tensor.dtype
        assert torch.equal(gradient, torch.zeros_like(tensor))

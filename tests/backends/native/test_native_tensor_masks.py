"""Masks that are tensors run as the ranges that they are: boolean ones, and biases of 0 and -inf."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from native_oracle import ALLOWED, apart, needs_library
from torch import Tensor

import undivided
from undivided import masks
from undivided.masks import Mask

pytestmark = needs_library
DTYPES = pytest.mark.parametrize("dtype", ALLOWED, ids=lambda dtype: str(dtype).removeprefix("torch."))
B, H = 3, 2

MASKS: dict[str, Mask] = {
    "causal": masks.causal("top_left"),
    "window": masks.window(40, 3, align="top_left"),
    "lengths": masks.lengths(torch.tensor([1, 130, 77])),
    "lengths-and-causal": masks.lengths(torch.tensor([150, 130, 77])) & masks.causal("top_left"),
    "no-keys": masks.lengths(torch.tensor([150, 0, 77])),
    "every-key": masks.window(None, None),
}
SIZES = [(150, 150), (1, 150), (5, 150), (150, 260)]


def inputs(q_len: int, kv_len: int, dtype: torch.dtype = torch.float32, heads: int = H) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(B, heads, length, 32).to(dtype) for length in (q_len, kv_len, kv_len))


def pairs_of(mask: Mask, q_len: int, kv_len: int) -> Tensor:
    """Boolean [B, 1, Sq, Sk]."""
    return mask.to_dense(B, 1, q_len, kv_len).expand(B, 1, q_len, kv_len).contiguous()


def as_bias(pairs: Tensor, dtype: torch.dtype) -> Tensor:
    """0, or -0, where a key is allowed, -inf elsewhere."""
    zeros = torch.zeros(pairs.shape, dtype=dtype) * torch.where(torch.rand(pairs.shape) < 0.5, 1.0, -1.0).to(dtype)
    return zeros.masked_fill(~pairs, -torch.inf)


def native(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
    return undivided.attention(q, k, v, layout="bhsd", backend="native", **options)


@DTYPES
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_a_tensor_has_the_bits_of_the_mask_that_it_is(name: str, sizes: tuple[int, int], dtype: torch.dtype) -> None:
    q, k, v = inputs(*sizes, dtype)
    pairs = pairs_of(MASKS[name], *sizes)
    expected = native(q, k, v, mask=MASKS[name])
    assert torch.equal(undivided.scaled_dot_product_attention(q, k, v, pairs), expected)
    for bias_dtype in {torch.float32, dtype}:
        assert torch.equal(native(q, k, v, bias=as_bias(pairs, bias_dtype)), expected)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_so_do_gradients(name: str, sizes: tuple[int, int]) -> None:
    q, k, v = (x.requires_grad_() for x in inputs(*sizes))
    bias = as_bias(pairs_of(MASKS[name], *sizes), torch.float32)
    grad = torch.randn(B, H, sizes[0], 32)
    gradients = torch.autograd.grad(native(q, k, v, bias=bias), (q, k, v), grad)
    expected = torch.autograd.grad(native(q, k, v, mask=MASKS[name]), (q, k, v), grad)
    assert all(map(torch.equal, gradients, expected))


def test_the_blocks_of_a_mask_are_documents() -> None:
    q, k, v = (x[:1] for x in inputs(160, 160))
    documents = masks.documents([0, 40, 47, 130, 160])
    pairs = documents.to_dense(1, 1, 160, 160)
    packed = [x[0].transpose(0, 1) for x in (q, k, v)]
    expected = undivided.attention(*packed, layout="thd", backend="native", mask=documents).transpose(0, 1)
    assert torch.equal(undivided.scaled_dot_product_attention(q, k, v, pairs)[0], expected)


def random_gaps(pairs: Tensor) -> Tensor:
    return pairs & (torch.rand(pairs.shape) < 0.9)


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "one key of a row": lambda pairs: pairs.index_put(
        (torch.tensor(1), torch.tensor(0), torch.tensor(149), torch.tensor(3)), torch.tensor(False)
    ),
    "some keys": random_gaps,
    "one head": lambda pairs: torch.cat((pairs, random_gaps(pairs)), 1),
    "heads with other lengths": lambda pairs: torch.cat((pairs, pairs.roll(1, 0)), 1),
    "one head sees nothing": lambda pairs: torch.cat((pairs, torch.zeros_like(pairs)), 1),
    "the same for all rows": lambda pairs: pairs[:, :, -1:],
    "the same for all keys": lambda pairs: pairs[..., :1],
    "the same for all sequences": lambda pairs: pairs[2:],
    "transposed": lambda pairs: pairs.mT.contiguous().mT,
    "every second key of its memory": lambda pairs: pairs.repeat_interleave(2, -1)[..., ::2],
}


@pytest.mark.parametrize("name", ["causal", "lengths"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("is_causal", [False, True])
def test_other_masks_stay_as_they_are(name: str, change: str, is_causal: bool) -> None:
    torch.manual_seed(1)
    q, k, v = inputs(150, 150)
    pairs = CHANGES[change](pairs_of(MASKS[name], 150, 150))
    allowed = pairs & torch.ones(150, 150, dtype=torch.bool).tril() if is_causal else pairs
    expected = undivided.attention(q, k, v, mask=masks.dense(allowed), layout="bhsd", backend="reference")
    assert apart(undivided.scaled_dot_product_attention(q, k, v, pairs, is_causal=is_causal), expected) < 1e-5
    mask = masks.causal("top_left") if is_causal else None
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        bias = torch.zeros(pairs.shape, dtype=dtype).masked_fill(~pairs, -torch.inf)
        if dtype == torch.float32:
            assert apart(native(q, k, v, bias=bias, mask=mask), expected) < 1e-5
        else:
            own = [x.to(dtype) for x in (q, k, v)]
            assert apart(native(*own, bias=bias, mask=mask).float(), expected) < 0.02


@pytest.mark.parametrize("value", [1e-30, 2.0, -1e30, torch.inf, torch.nan])
@pytest.mark.parametrize("place", [(0, 0), (70, 0), (70, 70), (149, 149)])
def test_a_bias_with_another_number_is_added(value: float, place: tuple[int, int]) -> None:
    """-inf hides, at one key of a row or at all of them; each other number counts."""
    q, k, v = inputs(150, 150)
    bias = as_bias(pairs_of(MASKS["causal"], 150, 150), torch.float32)
    bias[:, :, place[0], place[1]] = value
    expected = undivided.attention(q, k, v, bias=bias, layout="bhsd", backend="reference")
    torch.testing.assert_close(native(q, k, v, bias=bias), expected, equal_nan=True, rtol=1e-4, atol=1e-5)


def test_the_gradient_of_a_bias_that_only_hides() -> None:
    q, k, v = (x.requires_grad_() for x in inputs(70, 150))
    bias = as_bias(pairs_of(MASKS["lengths"], 70, 150), torch.float32).requires_grad_()
    grad = torch.randn(B, H, 70, 32)
    gradients = [
        torch.autograd.grad(
            undivided.attention(q, k, v, bias=bias, layout="bhsd", backend=backend), (q, k, v, bias), grad
        )
        for backend in ("native", "reference")
    ]
    for own, expected in zip(*gradients, strict=True):
        assert apart(own, expected) < 1e-5


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("batch", [0, 2])
def test_masks_without_rows_or_keys(sizes: tuple[int, int], batch: int) -> None:
    q, k, v = (x[:batch] for x in inputs(*sizes))
    for shape in (sizes, (1, sizes[1]), (batch, 1, *sizes)):
        pairs = torch.ones(shape, dtype=torch.bool)
        assert not undivided.scaled_dot_product_attention(q, k, v, pairs).any()
        bias = torch.zeros(shape).view((1,) * (4 - len(shape)) + tuple(shape))
        assert not native(q, k, v, bias=bias).any()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_share_large_masks(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        q, k, v = (torch.randn(1, 2, length, 16) for length in (700, 1500, 1500))
        pairs = torch.ones(700, 1500, dtype=torch.bool).tril(800)
        expected = native(q, k, v, mask=masks.causal("bottom_right"))
        assert torch.equal(undivided.scaled_dot_product_attention(q, k, v, pairs), expected)
        pairs[699, 5] = False
        reference = undivided.attention(
            q, k, v, mask=masks.dense(pairs[None, None]), layout="bhsd", backend="reference"
        )
        assert apart(undivided.scaled_dot_product_attention(q, k, v, pairs), reference) < 1e-5
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "as_tensor", [lambda pairs: pairs, lambda pairs: as_bias(pairs, torch.float32)], ids=["bool", "bias"]
)
def test_hidden_keys_may_hold_anything(as_tensor: Callable[[Tensor], Tensor]) -> None:
    q, k, v = inputs(150, 150)
    pairs = pairs_of(MASKS["lengths"], 150, 150)
    expected = undivided.scaled_dot_product_attention(q, k, v, as_tensor(pairs))
    for b, length in enumerate((1, 130, 77)):
        k[b, :, length:] = v[b, :, length:] = torch.nan
    assert torch.equal(undivided.scaled_dot_product_attention(q, k, v, as_tensor(pairs)), expected)

"""Gradients of rows whose scores a bias makes so large that their log-sum-exp does not determine the weights."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import undivided
from undivided import masks
from undivided.backends import reference

LOWEST = torch.finfo(torch.float32).min
ROWS, KEYS = 7, 9


def tensors(
    layout: undivided.Layout = "bhsd", lowest: float = LOWEST, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """q, k, v and a bias that hides keys from 9 on, and all keys from rows 7 to 10, as models do with padding."""
    bias = torch.randn(2, 3, 12, 12, dtype=dtype)
    bias[..., KEYS:] = lowest
    bias[:, :, ROWS:11] = lowest
    shapes = {"bhsd": (2, 3, 12, 8), "bshd": (2, 12, 3, 8), "sbhd": (12, 2, 3, 8)}
    return [torch.randn(shapes[layout], dtype=dtype) for _ in range(3)] + [bias]


def softmax(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) by plain operations, in layout bhsd. PyTorch's own gradient of logsumexp is exp(score - lse) too."""
    score = q @ k.mT / q.shape[-1] ** 0.5 + bias
    weights = score.softmax(-1)
    change = (score - score.detach()).nan_to_num(0.0)  # 0, with the gradient of the score
    return weights @ v, score.detach().logsumexp(-1) + (weights.detach() * change).sum(-1)


def gradients(function: Callable[..., tuple[Tensor, ...]], inputs: list[Tensor], needs: int = 4) -> list[Tensor]:
    leaves = [t.clone().requires_grad_(n < needs) for n, t in enumerate(inputs)]
    outputs = function(*leaves)
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(out.shape, generator=generator).to(out.dtype) for out in outputs]
    return [*outputs, *torch.autograd.grad(outputs, leaves[:needs], grads)]


def assert_same(mine: list[Tensor], exact: list[Tensor], tolerance: float) -> None:
    for one, other in zip(mine, exact, strict=True):
        assert (one.double() - other.double()).norm() <= tolerance * other.double().norm()


@pytest.mark.parametrize("backend", ["native", "torch_flash", "reference"])
@pytest.mark.parametrize("lowest", [LOWEST, LOWEST / 2, -1e9], ids=["lowest", "half-of-it", "-1e9"])
def test_a_row_whose_keys_all_have_the_lowest_bias_has_the_gradients_of_equal_weights(
    backend: str, lowest: float
) -> None:
    """lse was the lowest number too, because it has no digits left for the logarithm of the sum, and the backward's
    weights exp(score - lse) were 1 instead of 1/n (in PyTorch's flash kernel they are): Parakeet's padding."""
    needs = 3 if backend == "torch_flash" else 4
    inputs = tensors(lowest=lowest)
    attention = functools.partial(undivided.attention, layout="bhsd", backend=backend)
    mine = gradients(lambda q, k, v, bias: (attention(q, k, v, bias=bias),), inputs, needs)
    exact = gradients(lambda *leaves: softmax(*leaves)[:1], inputs, needs)
    assert_same(mine, exact, 1e-6)


def test_so_have_half_types_with_scores_of_their_lowest_number() -> None:
    inputs = tensors(lowest=torch.finfo(torch.bfloat16).min, dtype=torch.bfloat16)
    mine = gradients(lambda *t: (undivided.scaled_dot_product_attention(*t),), inputs)
    exact = gradients(lambda *t: softmax(*t)[:1], [t.float() for t in inputs])
    assert_same(mine, exact, 1e-2)


@pytest.mark.parametrize(("layout", "compiled"), [("bshd", False), ("sbhd", True)], ids=["eager", "compiled"])
def test_the_gradients_of_lse_and_a_mask_are_part_of_it(layout: undivided.Layout, compiled: bool) -> None:
    torch._dynamo.reset()
    inputs = tensors(layout)
    order = {"bshd": (0, 2, 1, 3), "sbhd": (1, 2, 0, 3)}[layout]
    hidden = torch.ones(12, 12, dtype=torch.bool).tril(-1)

    def exact(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = softmax(*(t.permute(order) for t in (q, k, v)), bias.masked_fill(hidden.T, -torch.inf))
        return out.transpose(1, 2) if layout == "bshd" else out.permute(2, 0, 1, 3), lse

    def mine(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return undivided.attention(q, k, v, layout=layout, mask=masks.causal(), bias=bias, return_lse=True)

    found = torch.compile(mine, backend="aot_eager", fullgraph=True) if compiled else mine
    assert_same(gradients(found, inputs), gradients(exact, inputs), 1e-6)


def test_rows_of_other_sequences_keep_their_bits() -> None:
    """Only blocks with such rows are computed again, and the others are added to 0."""
    q, k, v, bias = tensors()
    bias[0] = torch.randn(3, 12, 12)
    attention = functools.partial(undivided.attention, layout="bhsd", batch_invariant=True)
    together = gradients(lambda q, k, v, bias: (attention(q, k, v, bias=bias),), [q, k, v, bias])
    bias[1] = 0.0
    others = gradients(lambda q, k, v, bias: (attention(q, k, v, bias=bias),), [q, k, v, bias])
    for one, other in zip(together, others, strict=True):
        assert torch.equal(one[0], other[0])


def test_rows_without_a_gradient_are_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual case: no real token attends to the padding, and the loss does not read it."""
    monkeypatch.setattr(reference, "attend", None)
    *qkv, bias = tensors()
    leaves = [t.requires_grad_() for t in qkv]
    out = undivided.attention(*leaves, layout="bhsd", bias=bias, backend="native")
    out[:, :, :ROWS].sum().backward()
    assert leaves[0].grad is not None
    assert not leaves[0].grad[:, :, ROWS:].any()

"""What a call keeps for backward() is freed there, as PyTorch frees the saved tensors: losses may live longer."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import undivided
from undivided import masks
from undivided.context_parallel import simulate
from undivided.masks import Mask

SIZE = 40


def operands(tokens: int = SIZE) -> list[Tensor]:
    return [torch.randn(1, tokens, 2, 8, requires_grad=True) for _ in range(3)]


def dense_mask() -> Mask:
    return masks.dense(torch.rand(SIZE, SIZE) < 0.5)


def backward_of(loss: Tensor, _: list[Tensor]) -> None:
    loss.backward()


def retained_backwards_of(loss: Tensor, _: list[Tensor]) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


def second_derivative_of(loss: Tensor, inputs: list[Tensor]) -> None:
    (gradient,) = torch.autograd.grad(loss, inputs[0], create_graph=True)
    gradient.square().sum().backward()


@pytest.mark.parametrize("derive", [backward_of, retained_backwards_of, second_derivative_of])
@pytest.mark.parametrize("backend", ["reference", None])
def test_a_loss_that_is_kept_after_backward_keeps_no_mask(
    derive: Callable[[Tensor, list[Tensor]], None], backend: str | None
) -> None:
    mask, inputs = dense_mask(), operands()
    loss = undivided.attention(*inputs, layout="bshd", mask=mask, backend=backend).square().sum()
    reference = weakref.ref(mask)
    del mask
    derive(loss, inputs)
    gc.collect()
    assert reference() is None
    assert loss.grad_fn is not None


def test_a_loss_that_is_kept_after_backward_keeps_no_attn_mask() -> None:
    def count() -> int:
        gc.collect()
        return sum(type(x) is Tensor and x.dtype == torch.bool and x.numel() == size * size for x in gc.get_objects())

    size = 600  # smaller masks are copied
    attn_mask, inputs = torch.rand(size, size) < 0.5, [x.transpose(1, 2) for x in operands(size)]
    before = count() - 1
    loss = undivided.scaled_dot_product_attention(*inputs, attn_mask=attn_mask).sum()
    del attn_mask
    loss.backward()
    assert count() == before


def test_a_loss_that_is_kept_after_backward_keeps_no_mask_under_context_parallelism() -> None:
    def rank(group: object) -> bool:
        cp = undivided.ContextParallel(group, strategy="ring")  # type: ignore[arg-type]
        inputs = [cp.shard(x.detach(), layout="bshd").requires_grad_() for x in operands()]
        mask = masks.causal("top_left") & masks.lengths([SIZE - 3])
        loss = undivided.attention(*inputs, layout="bshd", mask=mask, context_parallel=cp).sum()
        reference = weakref.ref(mask)
        del mask
        loss.backward()
        gc.collect()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        return reference() is None and loss.grad_fn is not None

    torch.manual_seed(0)
    assert all(simulate(2, rank))


@pytest.mark.parametrize("backend", ["reference", None])
def test_a_second_backward_raises_the_error_of_pytorch(backend: str | None) -> None:
    inputs = operands()
    loss = undivided.attention(*inputs, layout="bshd", mask=dense_mask(), backend=backend).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
        loss.backward()


def test_a_backward_that_failed_can_be_repeated() -> None:
    mask, (q, k, v) = dense_mask(), operands()
    out = undivided.attention(q, k, v, layout="bshd", mask=mask)
    handle = out.register_hook(lambda grad: grad.to_sparse())
    with pytest.raises((ValueError, RuntimeError)):
        torch.autograd.grad(out.sum(), q)
    handle.remove()
    (gradient,) = torch.autograd.grad(out.sum(), q)
    expected = undivided.attention(q, k, v, layout="bshd", mask=mask)
    assert torch.equal(gradient, torch.autograd.grad(expected.sum(), q)[0])


@pytest.mark.parametrize("vectorize", [False, True])
def test_a_jacobian_calls_one_backward_many_times(vectorize: bool) -> None:
    mask, (q, k, v) = masks.dense(torch.rand(4, 4) < 0.7), operands(4)
    jacobian = torch.autograd.functional.jacobian(
        lambda x: undivided.attention(x, k, v, layout="bshd", mask=mask)[0, :2, 0, :2], q, vectorize=vectorize
    )
    assert jacobian.shape == (2, 2, *q.shape)

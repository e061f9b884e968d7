"""Additions to the native kernel's scores, one kind at a time: compared with fp64, over threads, and next to other
rows.

On AMX they have a separate pass, with masks as bits and maxima that ALiBi places above the scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from native_oracle import ALLOWED, apart, needs_library, oracle
from torch import Tensor

import undivided
from undivided import masks

ROWS = KEYS = 430  # several blocks of rows and tiles of keys, none whole


class Extra(NamedTuple):
    """`arguments` of attention(), the same as a function of the scores, and as a boolean mask."""

    arguments: dict[str, object]
    score: Callable[[Tensor], Tensor]
    allowed: Tensor


def bias_of(bias: Tensor) -> Extra:
    added = bias.double().masked_fill(bias == -math.inf, 0.0)
    return Extra({"bias": bias}, lambda s: s + added, bias != -math.inf)


def mask_of(allowed: Tensor) -> Extra:
    return Extra({"mask": masks.dense(allowed)}, lambda s: s, allowed)


def alibi_of(slopes: list[float], causal: bool) -> Extra:
    slope = torch.tensor(slopes)
    ahead = torch.arange(ROWS).unsqueeze(1) - torch.arange(KEYS)
    return Extra(
        {"alibi_slopes": slope, "mask": masks.causal() if causal else None},
        lambda s: s - slope.double()[:, None, None] * ahead.abs(),
        (ahead >= 0) | (not causal),
    )


def holes(*shape: int) -> Tensor:
    allowed = torch.rand(*shape) < 0.6
    allowed[..., 64:140] = False  # a step that no row sees, and a part of one
    allowed[..., 200:230, :] = False  # rows that see nothing
    return allowed


EXTRAS: dict[str, Callable[[torch.dtype], Extra]] = {
    "mask": lambda dtype: mask_of(holes(1, 1, ROWS, KEYS)),
    "mask-of-heads": lambda dtype: mask_of(holes(2, 2, ROWS, KEYS)),
    "mask-transposed": lambda dtype: mask_of(holes(1, 1, KEYS, ROWS).mT),
    "bias": lambda dtype: bias_of(torch.randn(1, 2, ROWS, KEYS).to(dtype)),
    "bias-fp32": lambda dtype: bias_of(torch.randn(2, 1, ROWS, KEYS)),
    "bias-of-keys": lambda dtype: bias_of(torch.randn(1, 1, 1, KEYS).to(dtype)),
    "bias-of-rows": lambda dtype: bias_of(torch.randn(1, 2, ROWS, 1).to(dtype)),
    "bias-transposed": lambda dtype: bias_of(torch.randn(1, 2, KEYS, ROWS).to(dtype).mT),
    "bias-that-masks": lambda dtype: bias_of(
        torch.randn(1, 2, ROWS, KEYS).to(dtype).masked_fill(~holes(1, 1, ROWS, KEYS), -math.inf)
    ),
    "softcap": lambda dtype: Extra(
        {"softcap": 1.5}, lambda s: 1.5 * torch.tanh(s / 1.5), torch.ones(1, dtype=torch.bool)
    ),
    "alibi": lambda dtype: alibi_of([0.5, 0.004], causal=False),
    "alibi-causal": lambda dtype: alibi_of([0.5, 0.004], causal=True),
    "alibi-steep-and-rising": lambda dtype: alibi_of([4.0, -0.05], causal=True),
}
each_extra = pytest.mark.parametrize("name", EXTRAS)
each_dtype = pytest.mark.parametrize("dtype", ALLOWED, ids=lambda dtype: str(dtype).removeprefix("torch."))


def operands(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(2, 2, n, 64).to(dtype) for n in (ROWS, KEYS, KEYS))
    return q, k, v


def attend(q: Tensor, k: Tensor, v: Tensor, extra: Extra) -> tuple[Tensor, Tensor]:
    return undivided.attention(  # type: ignore[call-overload, no-any-return]
        q, k, v, layout="bhsd", backend="native", return_lse=True, **extra.arguments
    )


@needs_library
@each_dtype
@each_extra
def test_each_addition_equals_its_definition(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    extra = EXTRAS[name](dtype)
    q, k, v = operands(dtype)
    out, lse = attend(q, k, v, extra)
    want, want_lse = oracle(q, k, v, extra.allowed, extra.score)
    assert apart(out, want) < ALLOWED[dtype]
    seen = want_lse > -math.inf
    assert torch.equal(lse > -math.inf, seen)
    assert apart(lse[seen], want_lse[seen]) < 1e-6
    assert not out[~seen].any()


@needs_library
@each_dtype
@each_extra
def test_a_row_depends_neither_on_other_rows_nor_on_the_number_of_threads(name: str, dtype: torch.dtype) -> None:
    """Scores of some rows exceed their running maximum repeatedly; the other rows keep their bits."""
    torch.manual_seed(1)
    extra = EXTRAS[name](dtype)
    q, k, v = operands(dtype)
    out, lse = attend(q, k, v, extra)
    kept = torch.arange(ROWS) % 5 == 2
    louder = torch.where(kept.unsqueeze(1), q, q * 30)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            other, other_lse = attend(louder, k, v, extra)
            assert torch.equal(other[:, :, kept], out[:, :, kept])
            assert torch.equal(other_lse[:, :, kept], lse[:, :, kept])
    finally:
        torch.set_num_threads(before)


@needs_library
@each_dtype
@pytest.mark.parametrize("return_lse", [False, True])
def test_an_infinite_sink_leaves_no_gradient(return_lse: bool, dtype: torch.dtype) -> None:
    """It takes all of the weight, and no change of the scores or of the sink changes that."""
    torch.manual_seed(2)
    leaves = [x.requires_grad_() for x in operands(dtype)]
    sinks = torch.randn(leaves[0].shape[1])
    sinks[1] = math.inf
    leaves.append(sinks.requires_grad_())
    out, lse = undivided.attention(*leaves[:3], layout="bhsd", sinks=sinks, backend="native", return_lse=True)
    loss = out.float().sum() + (lse.sum() if return_lse else 0)
    gradients = torch.autograd.grad(loss, leaves)
    assert not out[:, 1].any()
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert gradients[3][1] == 0
    assert return_lse or not gradients[0][:, 1].any()
    assert gradients[3][0] != 0

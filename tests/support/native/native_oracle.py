"""The native kernel compared with fp64: sizes, masks and the check of a result."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import undivided
from undivided import masks
from undivided.kernels import cpu
from undivided.masks import Mask

LIBRARY = cpu.load()
needs_library = pytest.mark.skipif(isinstance(LIBRARY, str), reason="the native kernel is not built")


# Largest relative errors of the norm: fp32 a few roundings; bf16 and fp16 one rounding of the result (2^-9, 2^-12 at
# most, about 0.6 of that on average), for bf16 dot products one of the weights besides.
ALLOWED = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}


def oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor,
    score: Callable[[Tensor], Tensor] | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of [B, H, S, D] in fp64, by the definition; keys that no row attends to may be NaN."""
    q, k, v = (t.double() for t in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    used = allowed.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2]).any(-2).unsqueeze(-1)
    k, v = torch.where(used, k, 0.0), torch.where(used, v, 0.0)
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = (scores if score is None else score(scores)).masked_fill(~allowed, -math.inf)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1))
    return weights @ v, lse


def apart(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm().clamp_min(1e-30))


def check(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, **arguments: object) -> None:
    """bhsd against the oracle, output and log-sum-exp."""
    out, lse = undivided.attention(  # type: ignore[call-overload]
        q, k, v, layout="bhsd", mask=mask, backend="native", return_lse=True, **arguments
    )
    sizes = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    allowed = torch.ones(sizes, dtype=torch.bool) if mask is None else mask.to_dense(*sizes)
    agree(out, lse, *oracle(q, k, v, allowed, scale=arguments.get("scale")))  # type: ignore[arg-type]


def agree(out: Tensor, lse: Tensor, want: Tensor, want_lse: Tensor) -> None:
    """An output and a log-sum-exp are those of the oracle."""
    assert apart(out, want) < ALLOWED[out.dtype]
    assert torch.equal(lse == -math.inf, want_lse == -math.inf)
    seen = want_lse > -math.inf
    assert not seen.any() or float(((lse.double() - want_lse).abs() / (1 + want_lse.abs()))[seen].max()) < 2e-6


# (B, H, N, Sq, Sk, Dk, Dv): a single number, odd everything, whole tiles, several blocks, grouped heads, few rows
SIZES = {
    "one": (1, 1, 1, 1, 1, 1, 1),
    "odd": (2, 4, 2, 37, 53, 17, 9),
    "tiles": (1, 2, 2, 256, 256, 64, 64),
    "blocks": (1, 1, 1, 1100, 700, 32, 32),
    "one-short-of-a-tile": (1, 2, 1, 127, 129, 80, 80),
    "values-narrower": (1, 4, 2, 65, 257, 192, 128),
    "decode": (2, 8, 2, 1, 1000, 64, 64),
    "decode-four-rows": (1, 2, 1, 4, 300, 128, 64),
    "decode-odd-group": (1, 6, 2, 1, 77, 64, 32),
    "few-rows-odd-head": (1, 8, 2, 3, 140, 24, 40),
    "few": (2, 4, 2, 7, 13, 64, 80),
    "few-and-wide": (1, 2, 2, 16, 16, 256, 128),
    "few-keys": (2, 6, 3, 5, 4, 32, 48),
    "few-rows": (1, 4, 1, 2, 32, 128, 16),
    "one-key": (2, 2, 1, 3, 1, 32, 32),
}


MASKS: dict[str, Callable[[int, int], Mask | None]] = {
    "full": lambda q, k: None,
    "causal": lambda q, k: masks.causal("bottom_right"),
    "top-left": lambda q, k: masks.causal("top_left"),
    "window": lambda q, k: masks.window(20, 3, "bottom_right"),
    "globals": lambda q, k: masks.window(9, 0, "bottom_right") | masks.prefix(3),
    "dense": lambda q, k: masks.dense(torch.rand(q, k) > 0.7),
    "predicate": lambda q, k: masks.predicate(lambda b, h, i, j: (i + j + h) % 3 != 0),
}


# From what two fp16 have the range for to what only fp32 has.
SCALES = [
    (1, 1),
    (2.0**5, 2.0**5),
    (2.0**-5, 2.0**-8),
    (2.0**-7, 2.0**-11),
    (2.0**30, 2.0**-60),
    (2.0**-30, 2.0**60),
    (1e-20, 1e-33),
]

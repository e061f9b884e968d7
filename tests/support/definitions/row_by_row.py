"""Attention by definition, one row at a time: each row takes the keys that it sees before anything is multiplied.

What a row does not see cannot reach it, in the output and in the gradients, whatever it is. In fp64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Options:
    """scale; softcap; bias [B|1, H|1, Sq|1, Sk|1]; slopes [H] and distance [B|1, 1, Sq, Sk]; sinks [H]; factor [B, H,
    Sq, Sk]: of each weight under dropout, 0 if dropped."""

    scale: float | None = None
    softcap: float | None = None
    bias: Tensor | None = None
    slopes: Tensor | None = None
    distance: Tensor | None = None
    sinks: Tensor | None = None
    factor: Tensor | None = None


def attend(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """(out [B, H, Sq, Dv], lse [B, H, Sq]) of q [B, H, Sq, Dk], k and v [B, N, Sk, D] and the allowed pairs [B, H, Sq,
    Sk]; autograd differentiates it."""
    batch, heads, rows, dim = q.shape
    scale = 1 / math.sqrt(dim) if options.scale is None else options.scale
    bias = None if options.bias is None else options.bias.expand(allowed.shape)
    if bias is not None:
        allowed = allowed & (bias != -math.inf)
    outs, lses = [], []
    for b in range(batch):
        for h in range(heads):
            n = h * k.shape[1] // heads
            head_q, head_k, head_v = q[b, h].unbind(0), k[b, n], v[b, n]  # a gradient of all of k for each row is slow
            for i in range(rows):
                keys = allowed[b, h, i].nonzero().flatten()
                if not len(keys):
                    outs.append(v.new_zeros(v.shape[-1]))
                    lses.append(v.new_full((), -math.inf))
                    continue
                score = head_k.index_select(0, keys) @ head_q[i] * scale
                if options.softcap is not None:
                    score = options.softcap * torch.tanh(score / options.softcap)
                if options.slopes is not None and options.distance is not None:
                    distance = options.distance.expand(batch, 1, rows, allowed.shape[3])
                    score = score - options.slopes[h] * distance[b, 0, i, keys]
                if bias is not None:
                    score = score + bias[b, h, i, keys]
                outs.append(_row(score, head_v.index_select(0, keys), (b, h, i), keys, options, lses))
    zero = q[..., :0].sum() + k[..., :0].sum() + v[..., :0].sum()  # of every leaf, also if no row has a key
    out = torch.stack(outs).view(batch, heads, rows, v.shape[-1])
    return out + zero, torch.stack(lses).view(batch, heads, rows) + zero


def _row(
    score: Tensor, v: Tensor, at: tuple[int, int, int], keys: Tensor, options: Options, lses: list[Tensor]
) -> Tensor:
    """The output of a row from its scores and its keys' values; its log-sum-exp is appended."""
    largest = score.detach().max()
    largest = torch.zeros_like(largest) if largest == -math.inf else largest
    exponential = torch.exp(score - largest)
    total = exponential.sum()
    if float(total.detach()) == 0:  # every score is -inf
        lses.append(score.new_full((), -math.inf))
        return exponential @ v
    lse = largest + total.log()
    lses.append(lse)
    weights = exponential / total
    if options.sinks is not None:
        weights = weights * torch.sigmoid(lse - options.sinks[at[1]])
    if options.factor is not None:
        kept = options.factor[at][keys]
        weights = weights.masked_fill(kept == 0, 0.0) * kept
    return weights @ v

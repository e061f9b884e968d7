"""Stand-ins for GPU kernels, with the kernels' own conventions, computed by plain torch on the CPU.

Each keeps what makes its kernel different: +inf for the log-sum-exp of rows without keys, memory that it does not write
left NaN, bottom-right alignment, an exclusive left edge. They are written from the kernels' documentation, not from ours.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Band = tuple[int | None, int | None]


def plain(
    q: Tensor, k: Tensor, v: Tensor, scale: float, allowed: Tensor, *, softcap: float = 0.0, bias: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """[H, S, D] attention of one sequence -> (out [H, S, Dv], lse [H, S] with the sinks in it, -inf without keys)."""
    k, v = (t.repeat_interleave(q.shape[0] // t.shape[0], 0) for t in (k, v))
    score = scale * (q @ k.mT)
    if softcap:
        score = softcap * torch.tanh(score / softcap)
    if bias is not None:
        score = score + bias
    score = score.masked_fill(~allowed, -torch.inf)
    if sinks is not None:
        score = torch.cat([score, sinks[:, None, None].expand(*score.shape[:2], 1)], -1)
    lse = score.logsumexp(-1)
    weight = torch.exp(score - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1))
    return weight[..., : k.shape[1]] @ v, lse


def band_pairs(q_len: int, kv_len: int, band: Band, shift: int) -> Tensor:
    """Pairs with ``i + shift - left <= j <= i + shift + right``, both ends included."""
    i, j = torch.arange(q_len)[:, None] + shift, torch.arange(kv_len)
    allowed = torch.ones(q_len, kv_len, dtype=torch.bool)
    if band[0] is not None:
        allowed &= j >= i - band[0]
    if band[1] is not None:
        allowed &= j <= i + band[1]
    return allowed


def sequences(q: Tensor, k: Tensor, cu_q: Tensor | None, cu_k: Tensor | None) -> Iterator[tuple[Any, Any]]:
    """Index of each sequence's rows and keys: batch elements, or slices of packed tokens."""
    if cu_q is None or cu_k is None:
        yield from ((b, b) for b in range(q.shape[0]))
        return
    for n in range(len(cu_q) - 1):
        yield slice(int(cu_q[n]), int(cu_q[n + 1])), slice(int(cu_k[n]), int(cu_k[n + 1]))


def flash(
    q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band, *, cu_q: Tensor | None = None, cu_k: Tensor | None = None,
    softcap: float = 0.0, slopes: Tensor | None = None, sinks: Tensor | None = None, empty_lse: float = torch.inf,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """FlashAttention: [B, S, H, D] or packed [T, H, D]; bottom-right; unwritten memory is NaN."""
    out = torch.full((*q.shape[:-1], v.shape[-1]), torch.nan, dtype=q.dtype)
    lse = torch.full(q.shape[:-1], torch.nan, dtype=q.dtype)
    for n, (rows, keys) in enumerate(sequences(q, k, cu_q, cu_k)):
        one, ones = q[rows].transpose(0, 1), [t[keys].transpose(0, 1) for t in (k, v)]
        shift = ones[0].shape[1] - one.shape[1]
        allowed = band_pairs(one.shape[1], ones[0].shape[1], band, shift)
        bias = None
        if slopes is not None:
            distance = (torch.arange(one.shape[1])[:, None] + shift - torch.arange(ones[0].shape[1])).abs()
            bias = -(slopes if slopes.dim() == 1 else slopes[n])[:, None, None] * distance
        found, total = plain(one, *ones, scale, allowed, softcap=softcap, bias=bias, sinks=sinks)
        empty = ~allowed.any(-1)
        out[rows] = found.masked_fill(empty[:, None], 0.0).transpose(0, 1)
        lse[rows] = total.masked_fill(empty, empty_lse).transpose(0, 1)
    return out, lse.transpose(-1, -2).contiguous()


def gradients(
    run: Callable[..., tuple[Tensor, Tensor]],
    tensors: tuple[Tensor, ...],
    grad: Tensor,
    grad_lse: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Gradients of ``run(*tensors)``, whose rows that are not written (NaN) have none."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    with torch.enable_grad():
        out, lse = run(*leaves)
    written = ~out.isnan()
    outputs, grads = [out[written]], [grad[written]]
    if grad_lse is not None:
        real = lse.isfinite()
        outputs, grads = [*outputs, lse[real]], [*grads, grad_lse[real]]
    return torch.autograd.grad(outputs, leaves, grads)


def flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    score_mod: Any,
    block_mask: Any,
    scale: float,
    enable_gqa: bool,
    return_aux: Any,
) -> Any:
    """FlexAttention without its kernels: [B, H, S, D], functions called on broadcasting indices."""
    assert enable_gqa == (q.shape[1] != k.shape[1])
    assert return_aux.lse
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    sizes = (*q.shape[:3], k.shape[2])
    index = [torch.arange(n).view([-1 if axis == a else 1 for a in range(4)]) for axis, n in enumerate(sizes)]
    score = scale * (q @ k.mT)
    if score_mod is not None:
        score = score_mod(score, *index)
    allowed = torch.ones((), dtype=torch.bool) if block_mask is None else block_mask.mask_mod(*index)
    score = score.masked_fill(~allowed, -torch.inf)
    lse = score.logsumexp(-1)
    weight = torch.exp(score - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1))
    return weight @ v, types.SimpleNamespace(lse=lse)

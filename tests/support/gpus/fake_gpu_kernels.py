"""Fake GPU kernels with the conventions of the real ones, computed by plain torch on the CPU.

Each keeps what makes its kernel different: +inf for the log-sum-exp of rows without keys, memory that it does not write
left NaN, bottom-right alignment, an exclusive left edge. They are written from the kernels' documentation.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Band = tuple[int | None, int | None]


def plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    allowed: Tensor,
    *,
    softcap: float = 0.0,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
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


def are_aligned(*given: Tensor) -> bool:
    """Whether every row starts at a multiple of 16 bytes, which kernels assume."""
    return all(
        t.data_ptr() % 16 == 0 and all(step * t.element_size() % 16 == 0 for step in t.stride()[:-1]) for t in given
    )


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
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    band: Band,
    *,
    cu_q: Tensor | None = None,
    cu_k: Tensor | None = None,
    softcap: float = 0.0,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    empty_lse: float = torch.inf,
) -> tuple[Tensor, Tensor]:
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
        found, total = plain(one, ones[0], ones[1], scale, allowed, softcap=softcap, bias=bias, sinks=sinks)
        empty = ~allowed.any(-1)
        out[rows] = found.masked_fill(empty[:, None], 0.0).transpose(0, 1)
        lse[rows] = total.masked_fill(empty, empty_lse).transpose(0, 1)
    return out, lse.transpose(-1, -2).contiguous()


def efficient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    mask_type: int,
    *,
    bias: Tensor | None = None,
    cu_q: Tensor | None = None,
    cu_k: Tensor | None = None,
    max_q: int = 0,
) -> tuple[Tensor, Tensor]:
    """PyTorch's memory-efficient kernel: [B, S, H, D], or [1, T, H, D] with offsets; mask 0 none, 1 top-left, 2
    bottom-right.

    The log-sum-exp is padded, [sequences, H, L], L the longest rounded up to 32: +inf up to a sequence's own multiple
    of 32, unwritten behind it, 0 in rows without keys. The output of a sequence without keys is not written. A
    bottom-right diagonal that starts outside the keys leaves tiles unmasked, so it must not be requested.
    """
    packed = cu_q is not None
    out = torch.full((*q.shape[:-1], v.shape[-1]), torch.nan, dtype=q.dtype)
    longest = max_q if packed else q.shape[1]
    count = len(cu_q) - 1 if cu_q is not None else len(q)
    lse = torch.full((count, q.shape[2], -(-longest // 32) * 32), torch.nan, dtype=q.dtype)
    tokens = (t[0] if packed else t for t in (q, k, v))
    flat_q, flat_k, flat_v = tokens
    for n, (rows, keys) in enumerate(sequences(flat_q, flat_k, cu_q, cu_k)):
        one, *ones = (t[at].transpose(0, 1) for t, at in ((flat_q, rows), (flat_k, keys), (flat_v, keys)))
        q_len, kv_len = one.shape[1], ones[0].shape[1]
        assert q_len <= longest
        shift = (kv_len - q_len) * (mask_type == 2)
        assert shift >= 0 or not kv_len, "the diagonal is an unsigned number"
        lse[n, :, : -(-q_len // 32) * 32] = torch.inf
        lse[n, :, :q_len] = 0.0
        if kv_len:
            allowed = band_pairs(q_len, kv_len, (None, 0 if mask_type else None), shift)
            found, total = plain(one, ones[0], ones[1], scale, allowed, bias=None if bias is None else bias[n])
            (out[0] if packed else out)[rows] = found.transpose(0, 1)
            lse[n, :, :q_len] = total.masked_fill(total == -torch.inf, 0.0)
    return out, lse


def efficient_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: Tensor,
    lse: Tensor,
    scale: float,
    mask_type: int,
    *,
    splits: int | None,
    bias: Tensor | None = None,
    bias_grad: bool = False,
    cu_q: Tensor | None = None,
    cu_k: Tensor | None = None,
    max_q: int = 0,
) -> tuple[Tensor | None, ...]:
    """Its backward: given what the forward wrote, +inf in every row that has no key; it writes no row of dq without
    keys."""

    def run(q: Tensor, k: Tensor, v: Tensor, *maybe: Tensor) -> tuple[Tensor, Tensor]:
        extra = maybe[0] if maybe else bias
        return efficient(q, k, v, scale, mask_type, bias=extra, cu_q=cu_q, cu_k=cu_k, max_q=max_q)

    _, want = run(q, k, v)
    assert lse.shape == want.shape
    assert lse.is_contiguous()
    real = lse.isfinite()
    torch.testing.assert_close(lse[real], want[real])
    assert (lse[~real] == torch.inf).all(), "exp(score - lse) must be 0 for a row that does not exist"
    inputs = (q, k, v, bias) if bias_grad and bias is not None else (q, k, v)
    grads = list(gradients(run, inputs, grad))
    if cu_q is not None and cu_k is not None:
        rows, keys = cu_q.diff(), cu_k.diff()
        assert splits == 1 or mask_type or not ((rows == 0) & (keys > 0)).any(), "a remainder by 0 queries"
        has_keys = torch.repeat_interleave(keys > 0, rows)
        grads[0][0, : len(has_keys)][~has_keys] = torch.nan
        for g, cu in zip(grads, (cu_q, cu_k, cu_k), strict=True):
            g[0, int(cu[-1]) :] = torch.nan
    return *grads, *(() if len(grads) == 4 else (None,))


def gradients(
    run: Callable[..., tuple[Tensor, Tensor]], tensors: tuple[Tensor, ...], grad: Tensor, grad_lse: Tensor | None = None
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
    q: Tensor, k: Tensor, v: Tensor, *, score_mod: Any, block_mask: Any, scale: float, enable_gqa: bool, return_aux: Any
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

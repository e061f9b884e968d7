"""Results of attention, and the one place where partial results are merged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from undivided import _layout
from undivided._layout import LAYOUTS, Layout
from undivided.errors import InputError


class Result(NamedTuple):
    """What a backend returns.

    out: [B, Sq, H, Dv] (a view; its memory may be in any layout), dtype of the inputs.
    lse: [B, H, Sq] natural logarithm of the sum of exp(score) over the allowed keys, fp32 (fp64 for fp64 inputs);
        -inf for a row with no allowed key; sinks not included.
    """

    out: Tensor
    lse: Tensor


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64 inputs, else fp32: the precision that softmax is computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def merge(
    outs: Sequence[Tensor],
    lses: Sequence[Tensor],
    sinks: Tensor | None = None,
    *,
    layout: Layout | None = None,
) -> tuple[Tensor, Tensor]:
    """Combine attention over disjoint sets of keys into attention over their union.

    ``lse = log(sum_i exp(lse_i))``, ``out = sum_i exp(lse_i - lse) * out_i``, then, with sinks,
    ``out * sigmoid(lse - sink)``: parts are computed without sinks, and merge applies them once.

    Args:
        outs: partial outputs, all of one shape: [B, Sq, H, D] in any layout, or [T, H, D].
        lses: their log-sum-exps, [B, H, Sq] ([H, T] for thd), fp32 or fp64.
        sinks: [H], or None.
        layout: of the outputs; needed only where the shapes fit more than one layout.

    Returns:
        (out, lse): out with the dtype and layout of the parts, lse over all keys, sinks not included.
        A row that no part could attend from gives out 0 and lse -inf.

    Raises:
        InputError: no parts, shapes that do not agree, or a layout that must be said.

    Source: the online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867).

    >>> import torch, undivided
    >>> q, k, v = (torch.randn(2, 6, 3, 8) for _ in range(3))
    >>> parts = [undivided.attention(q, k[:, s], v[:, s], layout="bshd", return_lse=True)
    ...          for s in (slice(0, 2), slice(2, 6))]
    >>> out, lse = undivided.merge(*zip(*parts))
    >>> torch.allclose(out, undivided.attention(q, k, v, layout="bshd"), atol=1e-5)
    True
    """
    outs, lses = list(outs), list(lses)
    layout = _check_parts(outs, lses, sinks, layout)
    dtype = torch.promote_types(lses[0].dtype, torch.float32)
    lse_parts = torch.stack([part.to(dtype) for part in lses])
    largest = lse_parts.detach().amax(0)
    largest = largest.masked_fill(largest == -torch.inf, 0.0)
    weights = torch.exp(lse_parts - largest)
    total = weights.sum(0)
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    lse = (largest + total.log()).masked_fill(empty, -torch.inf)
    weights = weights / total
    if sinks is not None:
        weights = weights * sink_factor(lse, sinks)
    weights = weights if layout != "thd" else weights.unsqueeze(1)  # [parts, B, H, S]
    combined = torch.zeros((), dtype=dtype, device=lse.device)
    for part, weight in zip(outs, weights, strict=True):
        # a part without keys has weight 0 and output 0 by contract; where() keeps garbage out should it not be
        part_BHSD = _layout.heads_first(part, layout).to(dtype)
        combined = combined + torch.where(weight.unsqueeze(-1) > 0, part_BHSD * weight.unsqueeze(-1), 0.0)
    out_BSHD = combined.transpose(1, 2).to(outs[0].dtype)
    return _layout.restore(out_BSHD, layout).contiguous(), lse


def sink_factor(lse: Tensor, sinks: Tensor) -> Tensor:
    """What sinks multiply an output by: ``exp(lse) / (exp(lse) + exp(sink))``; lse is [.., H, S], sinks [H].

    A row with no key (lse = -inf) keeps its 0 output, and its factor is 0 with zero gradients.
    """
    empty = lse == -torch.inf
    factor = torch.sigmoid(lse.masked_fill(empty, 0.0) - sinks.to(lse.dtype).unsqueeze(-1))
    return factor.masked_fill(empty, 0.0)


def _check_parts(
    outs: list[Tensor], lses: list[Tensor], sinks: Tensor | None, layout: Layout | None
) -> Layout:
    if not outs or len(outs) != len(lses):
        raise InputError(
            "lses", "be one for each of outs, and at least one", f"{len(lses)} for {len(outs)} outs"
        )
    for name, parts in (("outs", outs), ("lses", lses)):
        for part in parts:
            if not isinstance(part, Tensor) or part.shape != parts[0].shape or part.dtype != parts[0].dtype:
                got = f"{list(part.shape)} {part.dtype}" if isinstance(part, Tensor) else type(part).__name__
                raise InputError(
                    name, f"be tensors like the first, {list(parts[0].shape)} {parts[0].dtype}", got
                )
    fitting = [name for name in LAYOUTS if _fits(outs[0], lses[0], name)]
    if layout is None and len(fitting) == 1:
        layout = fitting[0]
    if layout is None and fitting:
        raise InputError(
            "layout", f"be said, as {list(outs[0].shape)} fits {' and '.join(fitting)}", "None",
            hint=f"merge(outs, lses, layout={fitting[0]!r})",
        )  # fmt: skip
    if layout not in fitting:
        raise InputError(
            "lses", "be [B, H, Sq] for outs in bshd, sbhd or bhsd, [H, T] in thd",
            f"{list(lses[0].shape)} for outs of {list(outs[0].shape)}",
        )  # fmt: skip
    heads = lses[0].shape[-2]
    if sinks is not None and tuple(sinks.shape) != (heads,):
        raise InputError("sinks", f"have shape [heads] = [{heads}]", list(sinks.shape))
    return layout


def _fits(out: Tensor, lse: Tensor, layout: Layout) -> bool:
    if out.dim() != _layout.rank(layout) or lse.dim() != _layout.rank(layout) - 1:
        return False
    batch, length, heads, _ = _layout.sizes(out.shape, layout)
    return tuple(lse.shape) == ((heads, length) if layout == "thd" else (batch, heads, length))

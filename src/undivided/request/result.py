"""Results of attention, and the functions that merge partial results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from undivided.arguments import layout as _layout
from undivided.arguments.checks import check_tensor
from undivided.arguments.layout import LAYOUTS, Layout
from undivided.arguments.signature import checked_call
from undivided.errors import InputError

Output = Tensor | tuple[Tensor, Tensor]
"""out, or (out, lse) if the log-sum-exp is requested."""


class Result(NamedTuple):
    """What a backend returns.

    out: in the caller's layout, [.., H, Dv], any strides; dtype of the inputs.
    lse: [B, H, Sq] natural logarithm of the sum of exp(score) over the allowed keys, fp32 (fp64 for fp64 inputs);
        -inf for a row with no allowed key; sinks not included. `UNREAD` is enough if `Problem.lse_is_read` is false.
    """

    out: Tensor
    lse: Tensor

    def canonical(self, layout: Layout) -> Result:
        """The result with out viewed as [B, Sq, H, Dv]; out is given in `layout`."""
        return self if layout == "bshd" else Result(_layout.canonical(self.out, layout), self.lse)

    def in_layout(self, layout: Layout) -> Result:
        """The result with out viewed in `layout`; out is given as [B, Sq, H, Dv]."""
        return self if layout == "bshd" else Result(_layout.from_canonical(self.out, layout), self.lse)


UNREAD = torch.full((), torch.nan)
"""Placeholder for a log-sum-exp that is not read."""


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64 inputs, else fp32: the precision that softmax is computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@checked_call
def merge(
    outs: Sequence[Tensor], lses: Sequence[Tensor], sinks: Tensor | None = None, *, layout: Layout | None = None
) -> tuple[Tensor, Tensor]:
    """(out, lse) of attention over the union of disjoint sets of keys, from the results for each set.

    ``lse = log(sum_i exp(lse_i))``, ``out = sum_i exp(lse_i - lse) * out_i``, then, with sinks,
    ``out * sigmoid(lse - sink)``: partial results are computed without sinks, and merge applies them once.

    Args:
        outs: partial outputs, all of one shape: [B, Sq, H, D] in any layout, or [T, H, D].
        lses: their log-sum-exps, [B, H, Sq] ([H, T] for thd), fp32 or fp64.
        sinks: [H], or None.
        layout: layout of the outputs; required only if the shapes fit more than one layout.

    Returns:
        (out, lse): out with the dtype and layout of ``outs``, lse over all keys, sinks not included.
        A row with no allowed key in any of them has out 0 and lse -inf.

    Raises:
        InputError: no results, shapes that do not agree, or a layout that must be given.

    Source: the online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867).

    >>> import torch, undivided
    >>> q, k, v = (torch.randn(2, 6, 3, 8) for _ in range(3))
    >>> parts = [undivided.attention(q, k[:, s], v[:, s], layout="bshd", return_lse=True)
    ...          for s in (slice(0, 2), slice(2, 6))]
    >>> out, lse = undivided.merge(*zip(*parts))
    >>> torch.allclose(out, undivided.attention(q, k, v, layout="bshd"), atol=1e-5)
    True
    """
    outs, lses = _as_list("outs", outs), _as_list("lses", lses)
    layout = _check_partials(outs, lses, sinks, layout)
    dtype = torch.promote_types(lses[0].dtype, torch.float32)
    partial_lses = torch.stack([one.to(dtype) for one in lses])
    largest = partial_lses.detach().amax(0)
    largest = largest.masked_fill(largest == -torch.inf, 0.0)
    weights = torch.exp(partial_lses - largest)
    total = weights.sum(0)
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    lse = (largest + total.log()).masked_fill(empty, -torch.inf)
    weights = weights / total
    if sinks is not None:
        weights = weights * sink_factor(lse, sinks)
    weights = weights if layout != "thd" else weights.unsqueeze(1)  # [results, B, H, S]
    combined = torch.zeros((), dtype=dtype, device=lse.device)
    for partial, weight in zip(outs, weights, strict=True):
        # a result without keys has weight 0; where() drops its output, even NaN, before it could reach the gradients
        partial_BHSD, weight = _layout.heads_first(partial, layout).to(dtype), weight.unsqueeze(-1)
        combined = combined + torch.where(weight > 0, partial_BHSD, 0.0) * weight
    out_BSHD = combined.transpose(1, 2).to(outs[0].dtype)
    return _layout.from_canonical(out_BSHD, layout).contiguous(), lse


def merge_into(total: Result, partial: Result) -> None:
    """`merge` of two results in place: ``total`` (in the precision of the softmax) becomes the result for all keys.

    It needs less memory than `merge`: an eighth of one output if ``partial`` has a half-precision dtype. Weights add up
    to 1 even if both lse are so large that their sum is not represented (-1e9 in fp32).

    >>> total = Result(torch.zeros(1, 2, 1, 4), torch.full((1, 1, 2), -torch.inf))
    >>> merge_into(total, Result(torch.ones(1, 2, 1, 4), torch.zeros(1, 1, 2)))
    >>> merge_into(total, Result(torch.full((1, 2, 1, 4), 3.0), torch.zeros(1, 1, 2)))
    >>> total.out.unique().tolist(), total.lse.exp().round().unique().tolist()
    ([2.0], [2.0])
    """
    lse = torch.logaddexp(total.lse, partial.lse.to(total.lse.dtype))
    finite = lse.masked_fill(lse == -torch.inf, 0.0)
    weights_BHS = [(lse_i - finite).exp() for lse_i in (total.lse, partial.lse)]
    sum_BHS = (weights_BHS[0] + weights_BHS[1]).clamp(min=0.5)  # 0 without keys
    keep, take = ((weight / sum_BHS).transpose(1, 2).unsqueeze(-1) for weight in weights_BHS)
    rows = max(1, total.out.shape[1] if partial.out.dtype == total.out.dtype else -(-total.out.shape[1] // 8))
    for out, added, *weights in zip(*(t.split(rows, 1) for t in (total.out, partial.out, keep, take)), strict=True):
        out.mul_(weights[0]).addcmul_(added.to(out.dtype), weights[1])
    total.lse.copy_(lse)


def sink_factor(lse: Tensor, sinks: Tensor) -> Tensor:
    """The factor by which sinks scale an output: ``exp(lse) / (exp(lse) + exp(sink))``; lse is [.., H, S], sinks [H].

    For a row with no key (lse = -inf) the output stays 0; the factor is 0, with zero gradients.
    """
    empty = lse == -torch.inf
    factor = torch.sigmoid(lse.masked_fill(empty, 0.0) - sinks.to(lse.dtype).unsqueeze(-1))
    return factor.masked_fill(empty, 0.0)


def _as_list(name: str, values: Sequence[Tensor]) -> list[Tensor]:
    try:
        return list(values)
    except TypeError:
        raise InputError(name, "be a sequence of tensors", type(values).__name__) from None


def _check_partials(outs: list[Tensor], lses: list[Tensor], sinks: Tensor | None, layout: Layout | None) -> Layout:
    if not outs or len(outs) != len(lses):
        raise InputError("lses", "be one for each of outs, and at least one", f"{len(lses)} for {len(outs)} outs")
    for name, tensors in (("outs", outs), ("lses", lses)):
        for tensor in tensors:
            if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
                got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
                raise InputError(name, "be floating-point tensors", got)
            check_tensor(name, tensor)
            if (tensor.shape, tensor.dtype, tensor.device) != (tensors[0].shape, tensors[0].dtype, tensors[0].device):
                raise InputError(name, f"be tensors like the first, {_summary(tensors[0])}", _summary(tensor))
    if lses[0].device != outs[0].device:
        raise InputError("lses", f"be on the device of outs ({outs[0].device})", lses[0].device)
    layout = _which_layout(outs[0], lses[0], layout)
    if sinks is not None:
        _check_sinks(sinks, lses[0])
    return layout


def _summary(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}"


def _which_layout(out: Tensor, lse: Tensor, layout: Layout | None) -> Layout:
    """The given layout, or the only one that the shapes fit; otherwise InputError."""
    if layout is not None and not (isinstance(layout, str) and layout in LAYOUTS):
        raise InputError("layout", f"be one of {', '.join(map(repr, LAYOUTS))}, or None", repr(layout))
    fitting = [name for name in LAYOUTS if _fits(out, lse, name)]
    if layout in fitting:
        return layout
    if not fitting or layout is not None:
        raise InputError(
            "lses",
            f"be [B, H, Sq] for outs in {layout or 'bshd, sbhd or bhsd'}, [H, T] in thd",
            f"{list(lse.shape)} for outs of {list(out.shape)}",
            hint=f"these shapes would fit layout={fitting[0]!r}" if len(fitting) == 1 else None,
        )
    if len(fitting) > 1:
        raise InputError(
            "layout",
            f"be given, as {list(out.shape)} fits {' and '.join(fitting)}",
            "None",
            hint=f"merge(outs, lses, layout={fitting[0]!r})",
        )
    return fitting[0]


def _check_sinks(sinks: Tensor, lse: Tensor) -> None:
    if not isinstance(sinks, Tensor) or not sinks.is_floating_point():
        got = sinks.dtype if isinstance(sinks, Tensor) else type(sinks).__name__
        raise InputError("sinks", "be a floating-point tensor", got)
    check_tensor("sinks", sinks)
    if tuple(sinks.shape) != (lse.shape[-2],):
        raise InputError("sinks", f"have shape [heads] = [{lse.shape[-2]}]", list(sinks.shape))
    if sinks.device != lse.device:
        raise InputError("sinks", f"be on the device of outs ({lse.device})", sinks.device)


def _fits(out: Tensor, lse: Tensor, layout: Layout) -> bool:
    if out.dim() != _layout.axis_count(layout) or lse.dim() != _layout.axis_count(layout) - 1:
        return False
    batch, length, heads, _ = _layout.sizes(out.shape, layout)
    return tuple(lse.shape) == ((heads, length) if layout == "thd" else (batch, heads, length))

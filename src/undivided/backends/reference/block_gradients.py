"""Derivatives of `attend` by automatic differentiation, block by block, and their sums over blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from undivided.arguments import layout
from undivided.backends.shared.alibi import slope_index
from undivided.backends.shared.block import Block
from undivided.request.call import Call
from undivided.request.request import Tensors
from undivided.request.result import Result, lse_dtype


class Accumulators:
    """Sums over blocks of the gradients of (q, k, v, bias, sinks, alibi_slopes), in the precision of the softmax."""

    def __init__(self, call: Call, tensors: Tensors) -> None:
        problem = call.problem
        self._call, self._tensors = call, tensors
        precision = lse_dtype(problem.dtype)
        self._sums = [
            torch.zeros(t.shape, dtype=precision, device=t.device) if t is not None and needed else None
            for t, needed in zip(tensors, call.needs, strict=True)
        ]

    def add(self, block: Block, gradients: Sequence[Tensor | None]) -> None:
        """Add the gradients of one block, in the shapes of its slices (`_slices`)."""
        for i, gradient in enumerate(gradients):
            total = self._sums[i]
            if gradient is None or total is None:
                continue
            if i < 3:
                heads, span = (block.heads, block.rows) if i == 0 else (block.kv_heads, block.keys)
                layout.heads_first(total, self._call.problem.layout)[block.batch, heads, span] += gradient
            elif i == 3:
                block.slice_pairs(total).add_(gradient)
            elif i == 4:
                total[block.heads] += gradient
            else:
                self._add_slopes(total, block, gradient)

    def _add_slopes(self, total: Tensor, block: Block, gradient: Tensor) -> None:
        """gradient is [1, H, 1, 1] or [B, H, R, 1]; see `block_slopes`."""
        if total.dim() == 1:
            total[block.heads] += gradient.sum((0, 2, 3))
            return
        form = self._call.normal_form(self._tensors.q)
        index = slope_index(block.slice_rows(form.q_sequence), total)
        rows = gradient.squeeze(-1).transpose(1, 2)  # [B, R, H]
        total[:, block.heads].index_add_(0, index.reshape(-1), rows.reshape(-1, rows.shape[-1]))

    def finish(self) -> list[Tensor | None]:
        """The sums in the dtypes of the inputs."""
        return [
            None if total is None or t is None else total.to(t.dtype)
            for total, t in zip(self._sums, self._tensors, strict=True)
        ]


def partial_gradients(partial: Result, whole: Result, grads: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of a partial (out, lse) from those of the result that it was merged into; out is [B, H, R, Dv].

    The derivative of ``out = sum_i w_i out_i`` and of ``lse = log(sum_i exp(lse_i))``, where ``w_i = exp(lse_i -
    lse)``.
    """
    empty = partial.lse == -torch.inf
    share = torch.exp(partial.lse.detach() - whole.lse).masked_fill(empty, 0.0)
    through_out = (grads[0] * (partial.out.detach() - whole.out)).sum(-1)
    for_lse = through_out if len(grads) == 1 else through_out + grads[1]
    return [grads[0] * share.unsqueeze(-1), (for_lse * share).masked_fill(empty, 0.0)]

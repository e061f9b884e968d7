"""Chosen key blocks on the CPU: what `explain` says, and the gradients.

The forward reads keys in place (`shared.chosen`). The backward copies the chosen keys, in parts of bounded size, and
adds each block's gradients in fp32 in the order of the table.
"""

from __future__ import annotations

import torch
from torch import Tensor

from undivided.arguments import layout
from undivided.arguments.tensors import has_dispatch
from undivided.backends._base import Gradients
from undivided.backends.native.chosen.sums import BlockSums
from undivided.backends.native.gradients import plain_fp32
from undivided.backends.shared.chosen import VirtualSequences, block_pairs, evaluated_note
from undivided.masks.normal_form import BlockPairs
from undivided.request.call import Call
from undivided.request.request import Tensors
from undivided.request.result import Result

__all__ = ["gradients", "notes"]


def notes(call: Call, tensors: Tensors) -> list[str]:
    """Whether only the chosen blocks are computed, and if not, why."""
    if any(has_dispatch(tensor) or not tensor.is_cpu for tensor in tensors[:3]):
        return []
    if (pairs := block_pairs(call, tensors, reads_values=True)) is None:
        return [evaluated_note(call)]
    chosen = float((pairs.table < pairs.limit).sum()) / (pairs.table[..., 0].numel() * pairs.limit)
    return [f"only the chosen key blocks are computed: {chosen:.1%} of all"]


def gradients(
    call: Call, tensors: Tensors, pairs: BlockPairs, result: Result, grad_out: Tensor, grad_lse: Tensor | None
) -> Gradients:
    """The gradients of q, k and v, for chosen blocks that `block_pairs` returned."""
    if call.pages is not None:
        tensors, call = (
            tensors.without_pages(call.pages, call.problem.layout),
            call.with_problem(call.problem, pages=None),
        )
    virtual, problem = VirtualSequences.of_call(call, tensors, pairs), call.problem
    q, out, grad = (virtual.heads(x.to(problem.dtype)) for x in (tensors.q, result.out, grad_out))
    lse = virtual.row_values(result.lse)
    lse_gradient = None if grad_lse is None else virtual.row_values(grad_lse.float())
    inputs = [layout.heads_first(x, problem.layout).transpose(1, 2) for x in tensors[:3]]
    sums = [
        BlockSums(virtual, x.shape[3]) if need else None for x, need in zip(inputs[1:], call.needs[1:3], strict=True)
    ]
    dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device) if call.needs[0] else None
    for gathered in virtual.gathered():
        span = gathered.span
        own_dq, *own_dkv = plain_fp32(
            virtual.virtual_call(gathered.form, None),
            Tensors(q[span], gathered.k, gathered.v, None, None, None),
            Result(out[span], lse[span]),
            grad[span],
            None if lse_gradient is None else lse_gradient[span],
        )
        if dq is not None and own_dq is not None:
            dq[span] = own_dq
        for total, gradient in zip(sums, own_dkv[:2], strict=True):
            if total is not None and gradient is not None:
                total.add(gathered, gradient)
    results = [None if x is None else x.tokens(like) for x, like in zip(sums, inputs[1:], strict=True)]
    dq_BSHD = None
    if dq is not None:
        dq_BSHD = torch.zeros_like(inputs[0], memory_format=torch.contiguous_format)
        virtual.rows.put_heads(dq, dq_BSHD)
    results.insert(0, dq_BSHD)
    restored = [None if x is None else layout.from_heads_first(x.transpose(1, 2), problem.layout) for x in results]
    return [*restored, None, None, None]

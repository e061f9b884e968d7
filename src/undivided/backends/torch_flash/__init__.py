"""`torch_flash`: PyTorch's fused flash kernels, called directly: the CPU's here, CUDA's in `cuda`.

The CPU kernel (aten/src/ATen/native/cpu/FlashAttentionKernel.cpp) has only a top-left causal flag and a dense additive
mask. A call becomes kernel calls that are exact:

- no mask, or a top-left causal one: one kernel call;
- packed documents and padded batches: one kernel call per sequence, on views: padding is neither read nor computed;
- any other mask, bias or ALiBi: one kernel call per block of query rows, with the keys that its rows may attend to and
  a mask of that block, so that memory stays O(S * block) and the cost follows the allowed pairs.

The kernel multiplies what it masks (0 * NaN = NaN) and returns lse = 0 for rows without keys; both are corrected here.
It has no gradient for its mask or through its lse; such problems are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from undivided.arguments import layout
from undivided.arguments.tensors import materialise
from undivided.backends._base import ALL_MASK_KINDS, Backend, Gradients, Limits, limit_reasons
from undivided.backends.shared.block import Block, block_slopes, distance, hide
from undivided.backends.shared.empty_rows import result_without_keys
from undivided.backends.torch_flash import cuda
from undivided.machine import Machine
from undivided.masks import Mask
from undivided.request.call import Call
from undivided.request.checks import DTYPES
from undivided.request.problem import Problem
from undivided.request.request import Tensors
from undivided.request.result import Result, lse_dtype

_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_forward = torch._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

ROWS = 256
"""Query rows of a masked block: the kernel's largest tile of rows."""


MASK_ENTRIES = 1 << 22
"""Entries of the dense mask of one kernel call (16 MiB in fp32), for masks where fewer rows do not need fewer keys."""

_ANYWHERE = {"dense", "predicate"}
"""Kinds of mask under which a block of few rows needs as many keys as a block of many."""


class KernelCall(NamedTuple):
    """One call of the kernel: its queries and keys, its causal flag, and whether it needs a dense mask."""

    block: Block
    causal: bool
    masked: bool


class TorchFlash(Backend):
    """PyTorch's flash kernels: exact softmax in one pass, no score matrix."""

    name = "torch_flash"
    family = "flash"
    summary = "PyTorch's fused CPU kernel, and its FlashAttention-2 on CUDA"
    limits = Limits(
        devices=frozenset({"cpu"}),
        dtypes=frozenset(DTYPES),
        masks=ALL_MASK_KINDS,
        alignments=frozenset({"top_left", "bottom_right"}),
        features=frozenset({"backward", "bias", "alibi", "gqa", "lse", "flipped", "partial"}),
        notes={
            "dropout": "PyTorch's CPU kernel has none",
            "lse_grad": "its backward has no term for it",
            "bias_grad": "its mask has no gradient",
            "alibi_grad": "its mask has no gradient",
            "value_dim": "one head size for q, k and v",
        },
    )

    def runs_on(self, device: str) -> bool:
        """Also on CUDA, within limits of its own."""
        return device in self.limits.devices | cuda.LIMITS.devices

    def summary_on(self, machine: Machine) -> str:
        """The summary, with the FlashAttention version that was activated in place of PyTorch's, if any."""
        if machine.flash_impl is None:
            return self.summary
        return f"PyTorch's fused CPU kernel, and on CUDA {machine.flash_impl}, activated in PyTorch"

    def reasons(self, problem: Problem, machine: Machine) -> list[str]:
        """The CPU kernel's limits, or CUDA's."""
        if problem.device == "cuda":
            return cuda.reasons(problem, machine)
        reasons = limit_reasons(self.limits, problem, machine)
        if problem.q_len == 0 or problem.kv_len == 0 or problem.batch == 0:
            reasons.append("an empty tensor (needs at least one query and one key)")
        return reasons

    def forward(self, call: Call, tensors: Tensors) -> Result:
        """One kernel call, or one per sequence or block of rows."""
        problem = call.problem
        if problem.device == "cuda":
            return cuda.forward(call, tensors)
        q, k, v = _inputs(call, tensors)
        if (causal := _one_call(call, tensors)) is not None:
            out, lse = _forward(q, k, v, 0.0, causal, scale=call.scale)
            # the kernel's output has q's strides in most layouts, but not in all
            return Result(layout.from_heads_first(out, problem.layout).contiguous(), lse)
        result = result_without_keys(problem, tensors.q)
        out_BHSD = result.out.transpose(1, 2)
        for kernel_call in _calls(call, tensors):
            block = _CallTensors(kernel_call, call, tensors, q, k, v)
            block_out, block_lse = _forward(
                block.q, block.k, block.v, 0.0, kernel_call.causal, attn_mask=block.mask, scale=call.scale
            )
            rows = (kernel_call.block.batch, slice(None), kernel_call.block.rows)
            out_BHSD[rows] = block.without_empty(block_out, 0.0)
            result.lse[rows] = block.without_empty(block_lse.unsqueeze(-1), -torch.inf).squeeze(-1)
        return result.in_layout(problem.layout)

    def recorded(self, call: Call, tensors: Tensors) -> Tensor | None:
        """The CPU kernel's output if one call of it is exact; None otherwise."""
        problem = call.problem
        if problem.device != "cpu" or call.pages is not None or (causal := _one_call(call, tensors)) is None:
            return None
        if _saved_tensors_hooks(False) is not None:  # PyTorch's node computes wrong gradients if they change strides
            return None
        return _forward(*_inputs(call, tensors), 0.0, causal, scale=call.scale)[0]

    def backward(
        self, call: Call, tensors: Tensors, result: Result, grad_out: Tensor, grad_lse: Tensor | None
    ) -> Gradients:
        """The kernel's backward, for the same kernel calls as the forward."""
        problem = call.problem
        if problem.device == "cuda":
            return cuda.backward(call, tensors, result, grad_out, grad_lse)
        q, k, v = _inputs(call, tensors)
        grad = layout.heads_first(grad_out, problem.layout)
        out = layout.heads_first(result.out, problem.layout)
        if (causal := _one_call(call, tensors)) is not None:
            grads = _backward(grad, q, k, v, out, result.lse, 0.0, causal, scale=call.scale)
            return [*(layout.from_heads_first(g, problem.layout) for g in grads), None, None, None]
        return self._backward_by_blocks(call, tensors, result, grad)

    def _backward_by_blocks(self, call: Call, tensors: Tensors, result: Result, grad_BHSD: Tensor) -> Gradients:
        problem = call.problem
        views = _inputs(call, tensors)
        precision = lse_dtype(problem.dtype)
        sums = [
            torch.zeros_like(t, dtype=precision, memory_format=torch.contiguous_format)
            for t in (tensors.q, tensors.k, tensors.v)
        ]
        dq, dk, dv = (layout.heads_first(total, problem.layout) for total in sums)
        out_BHSD = layout.heads_first(result.out, problem.layout)
        for kernel_call in _calls(call, tensors):
            block = _CallTensors(kernel_call, call, tensors, *views)
            rows = (kernel_call.block.batch, slice(None), kernel_call.block.rows)
            keys = (kernel_call.block.batch, slice(None), kernel_call.block.keys)
            lse = result.lse[rows]
            block_dq, block_dk, block_dv = _backward(
                block.without_empty(grad_BHSD[rows], 0.0),
                block.q,
                block.k,
                block.v,
                out_BHSD[rows],
                lse.masked_fill(lse == -torch.inf, 0.0),
                0.0,
                kernel_call.causal,
                attn_mask=block.mask,
                scale=call.scale,
            )
            dq[rows] += block_dq
            dk[keys] += block_dk
            dv[keys] += block_dv
        return [*(total.to(problem.dtype) for total in sums), None, None, None]


def _inputs(call: Call, tensors: Tensors) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, [B, H, S, D].

    The kernel allocates its output like q. If another axis of q has stride 1 too, as in views of `unfold`, the output's
    last axis may have another stride, and the kernel writes where no row is; so q is copied then. It also reads the
    memory of zero tensors, which have none.
    """
    q, k, v = tensors.heads_first(call.problem.layout)
    if 1 in q.stride()[:3]:
        q = q.clone(memory_format=torch.contiguous_format)
    if q._is_zerotensor() or k._is_zerotensor() or v._is_zerotensor():
        q, k, v = materialise(q), materialise(k), materialise(v)
    return q, k, v


def _one_call(call: Call, tensors: Tensors) -> bool | None:
    """The causal flag if a single kernel call without a dense mask is exact; None otherwise."""
    problem = call.problem
    if tensors.bias is not None or tensors.alibi_slopes is not None:
        return None
    kinds = problem.mask.kinds
    if not kinds:
        return False
    if kinds != {"causal"} or problem.align not in ("both", "top_left"):
        return None
    # the kernel multiplies by the scale after it has masked with -inf: a negative scale would give +inf; and it
    # multiplies keys beyond the last query, which may be NaN, with a weight of 0
    return True if "flipped" not in problem.features and problem.kv_len <= problem.q_len else None


def _calls(call: Call, tensors: Tensors) -> Iterator[KernelCall]:
    """The kernel calls that together cover every query row that has a key."""
    problem = call.problem
    biased = tensors.bias is not None or tensors.alibi_slopes is not None
    heads = slice(0, problem.heads), slice(0, problem.kv_heads)
    key = ("sequences", problem.batch, problem.q_len, problem.kv_len, _mask_heads(problem))
    sequences, rest = call.mask.cached(key, _sequences, problem, call.mask)
    for batch, q, k in sequences:
        if not (q.stop > q.start and k.stop > k.start):
            continue
        whole = Block(batch, *heads, q, k)
        square = problem.align != "bottom_right" or q.stop - q.start == k.stop - k.start
        if not biased and not rest:
            yield KernelCall(whole, causal=False, masked=False)
        elif not biased and rest == {"causal"} and square and "flipped" not in problem.features:
            seen = slice(k.start, min(k.stop, k.start + q.stop - q.start))  # the others may hold anything
            yield KernelCall(Block(batch, *heads, q, seen), causal=True, masked=False)
        else:
            form = call.normal_form(tensors.q)
            step = ROWS if rest - _ANYWHERE else max(ROWS, MASK_ENTRIES // _entries(problem, batch, k))
            for start in range(q.start, q.stop, step):
                rows = slice(start, min(start + step, q.stop))
                keys = slice(*form.hull(batch, rows))
                if keys.stop > keys.start:
                    block = Block(batch, *heads, rows, keys)
                    yield KernelCall(block, causal=False, masked=biased or not block.is_covered(form))


def _sequences(problem: Problem, mask: Mask) -> tuple[list[tuple[slice, slice, slice]], set[str]]:
    """(batch, queries, keys) of every sequence, and the kinds of mask that apply within each."""
    kinds = set(problem.mask.kinds)
    batch, rows, keys = slice(0, problem.batch), slice(0, problem.q_len), slice(0, problem.kv_len)
    documents, _ = mask.take("documents")
    if documents is not None:
        q = _spans(documents.cu_seqlens_q, documents.padded_q)
        kv = _spans(documents.cu_seqlens_kv, documents.padded_kv)
        return [(slice(0, 1), *spans) for spans in zip(q, kv, strict=True)], kinds - {"documents", "padded"}
    lengths, _ = mask.take("lengths")
    if lengths is not None:
        q = _real_tokens(lengths.q, lengths.q_start, problem.q_len, problem.batch)
        kv = _real_tokens(lengths.kv, lengths.kv_start, problem.kv_len, problem.batch)
        rest = kinds - {"lengths", "q_lengths", "starts"}
        return [(slice(b, b + 1), *spans) for b, spans in enumerate(zip(q, kv, strict=True))], rest
    entries = problem.q_len * _entries(problem, batch, keys)
    if kinds & {"dense", "predicate", "tree", "blocks", "document_ids", "global", "prefix"} and entries > MASK_ENTRIES:
        return [(slice(b, b + 1), rows, keys) for b in range(problem.batch)], kinds
    return [(batch, rows, keys)], kinds


def _entries(problem: Problem, batch: slice, keys: slice) -> int:
    """Upper bound of the entries of one query row's additive mask."""
    entries: int = (batch.stop - batch.start) * _mask_heads(problem) * (keys.stop - keys.start)
    return max(1, entries)


def _mask_heads(problem: Problem) -> int:
    """Upper bound of the heads of the additive mask: 1 unless a bias or slopes may give each head its own."""
    return problem.heads if problem.bias is not None or "alibi" in problem.features else 1


def _spans(cu_seqlens: Tensor, padded: Tensor | None) -> list[slice]:
    """The slice of each document in the packed tensor."""
    lengths = cu_seqlens.diff().tolist()
    starts = (cu_seqlens if padded is None else padded).tolist()
    return [slice(start, start + length) for start, length in zip(starts, lengths, strict=False)]


def _real_tokens(lengths: Tensor | None, starts: Tensor | None, whole: int, batch: int) -> list[slice]:
    """The slice of each batch element's real tokens."""
    begin = [0] * batch if starts is None else starts.tolist()
    size = [whole] * batch if lengths is None else lengths.tolist()
    return [slice(b, b + n) for b, n in zip(begin, size, strict=True)]


class _CallTensors:
    """The tensors of one kernel call, with 0 where the mask hides them."""

    def __init__(self, kernel_call: KernelCall, call: Call, tensors: Tensors, q: Tensor, k: Tensor, v: Tensor) -> None:
        block = kernel_call.block
        self.q = q[block.batch, :, block.rows]
        self.k, self.v = (x[block.batch, :, block.keys] for x in (k, v))
        self.mask: Tensor | None = None
        self._some_row: Tensor | None = None
        if kernel_call.masked:
            self._hide(block, call, tensors)

    def _hide(self, block: Block, call: Call, tensors: Tensors) -> None:
        """Set the additive mask of the block, and 0 where no row attends: the kernel multiplies what it masks."""
        problem = call.problem
        allowed = block.allowed(call.normal_form(tensors.q))
        score = _additive(block, call, tensors)
        if score is None:
            score = torch.zeros((), dtype=problem.dtype, device=self.q.device)
        else:
            allowed = allowed & (score != -torch.inf)
        self.mask = score.masked_fill(~allowed, -torch.inf)
        self.q, self.k, self.v, self._some_row = hide(allowed, self.q, self.k, self.v)

    def without_empty(self, tensor: Tensor, value: float) -> Tensor:
        """[B, H, R, X] with `value` in the rows that have no key."""
        return tensor if self._some_row is None else torch.where(self._some_row, tensor, value)


def _additive(block: Block, call: Call, tensors: Tensors) -> Tensor | None:
    """Bias and ALiBi of the block in the precision of the softmax, broadcastable to [B, H, R, K]."""
    problem = call.problem
    precision = lse_dtype(problem.dtype)
    score: Tensor | None = None
    if tensors.alibi_slopes is not None:
        form = call.normal_form(tensors.q)
        score = -block_slopes(tensors.alibi_slopes.to(precision), block, form) * distance(block, form)
    if tensors.bias is not None:
        bias = block.slice_pairs(tensors.bias).to(precision)
        score = bias if score is None else score + bias
    return score


BACKEND = TorchFlash()

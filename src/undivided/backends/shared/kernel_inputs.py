"""q, k and v as GPU kernels take them: with aligned rows, and cleared where no pair reads them.

In some kernels a NaN in memory that they mask reaches the result. The specification allows no such garbage.

Legend: B batch, S sequence (Sk keys), H heads, N key/value heads, D head size, T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from undivided.arguments import layout
from undivided.backends.shared.documents import packed_documents
from undivided.backends.shared.empty_rows import clear_rows
from undivided.masks import NormalForm
from undivided.request.call import Call
from undivided.request.request import Tensors

MAY_HOLD_GARBAGE = frozenset({"lengths", "q_lengths", "starts", "documents", "padded", "document_ids"})
"""Kinds of mask under which tokens may lie outside of all sequences, where memory may hold anything."""

_LOAD_BYTES = 16
"""Bytes that the kernels of cuDNN and FlashAttention load at once, without checking strides or addresses (`align`)."""


def align(tensor: Tensor) -> Tensor:
    """The tensor, or a copy if its rows do not start at multiples of 16 bytes.

    For a misaligned tensor cuDNN returns wrong numbers on SM90 and SM100 and faults on SM80 and SM89. From 1.32 the
    frontend refuses misaligned strides (sdpa_support_surface.h, `validate_sdpa_operand_stride_alignment`), but not
    misaligned addresses.
    """
    numbers, strides = _LOAD_BYTES // tensor.element_size(), tensor.stride()
    aligned = tensor.data_ptr() % _LOAD_BYTES == 0
    if not aligned or any(stride % numbers and tensor.shape[axis] > 1 for axis, stride in enumerate(strides[:-1])):
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor


def aligned_views(call: Call, tensors: Tensors) -> tuple[Tensor, ...]:
    """q, k, v as [B, S, H, D], or as [T, H, D] if documents are packed, with aligned rows (`align`)."""
    problem = call.problem
    tokens = tuple(align(layout.canonical(t, problem.layout)) for t in (tensors.q, tensors.k, tensors.v))
    return tokens if packed_documents(call) is None else tuple(t[0] for t in tokens)


def clean_views(call: Call, tensors: Tensors) -> tuple[Tensor, ...]:
    """`aligned_views` with 0 where no pair reads them; see `clean_tensors`."""
    if packed_documents(call) is None:
        return aligned_views(call, tensors)
    return tuple(t[0] for t in clean_tensors(call, tensors, call.normal_form(tensors.q)))


def clean_tensors(call: Call, tensors: Tensors, form: NormalForm) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as [B, S, H, D], with 0 where no pair reads them, and aligned rows: for kernels that multiply what they
    mask by 0.

    Copies, unless every token is known to be in use. Pairs that ranges do not express are evaluated once per mask.
    """
    problem = call.problem
    q, k, v = (align(layout.canonical(t, problem.layout)) for t in (tensors.q, tensors.k, tensors.v))
    if form.exact and _all_in_use(call):
        return q, k, v
    unused = ~_used_keys(form, problem.kv_heads)
    return clear_rows(q, form), k.masked_fill(unused, 0.0), v.masked_fill(unused, 0.0)


def _used_keys(form: NormalForm, kv_heads: int) -> Tensor:
    """Keys to which at least one row attends, bool [B|1, Sk, N|1, 1]; O(S) if the mask is ranges."""
    if not form.exact:
        used_BHS = form.keys_by_head
        if used_BHS.shape[1] > 1:
            used_BHS = used_BHS.unflatten(1, (kv_heads, -1)).any(2)
        return used_BHS.transpose(1, 2).unsqueeze(-1)
    steps = torch.zeros(form.ranges.shape[0], form.kv_len + 1, dtype=torch.int32, device=form.ranges.device)
    for column in range(0, form.ranges.shape[-1], 2):
        start, stop = form.ranges[..., column].long(), form.ranges[..., column + 1].long()
        real = (stop > start).int()
        steps.scatter_add_(1, start, real).scatter_add_(1, stop, -real)
    return (steps.cumsum(1)[:, :-1] > 0)[..., None, None]


def _all_in_use(call: Call) -> bool:
    """Whether every row is known to have a key, and every key a row, under a mask of ranges."""
    problem = call.problem
    kinds, q_len, kv_len = problem.mask.kinds, problem.q_len, problem.kv_len
    if "prefix" in kinds:
        return False
    if kinds & MAY_HOLD_GARBAGE:
        return _nothing_to_clear(call)
    if not kinds or q_len == kv_len:
        return True
    return kinds == {"causal"} and (q_len < kv_len) == (problem.align == "bottom_right")


def _nothing_to_clear(call: Call) -> bool:
    """Whether every token is in a document with as many queries as keys; known only if the lengths are on the CPU.

    Otherwise a document may have queries and no keys; its rows may hold garbage and share a tile with other documents.
    """
    problem = call.problem
    packed = packed_documents(call)
    if packed is None or problem.mask.kinds & (MAY_HOLD_GARBAGE - {"documents"}):
        return False
    cu_q, cu_kv = packed.cu_seqlens_q, packed.cu_seqlens_kv
    if cu_q.device.type != "cpu" or cu_kv.device.type != "cpu":
        return False
    same = cu_q is cu_kv or torch.equal(cu_q, cu_kv)
    return same and int(cu_q[-1]) == problem.q_len == problem.kv_len

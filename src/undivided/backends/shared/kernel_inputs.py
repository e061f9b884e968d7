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


def clean_views(call: Call, tensors: Tensors, *, own_tokens: bool = False) -> tuple[Tensor, ...]:
    """`aligned_views` with 0 where no pair reads them, for kernels of causal masks, windows and documents. Most keys
    before a window are left out, if the call has no gradients and no bias: for a few queries a copy would cost more
    than the attention. own_tokens: as in `needs_clearing`.
    """
    if not needs_clearing(call, own_tokens=own_tokens):
        return aligned_views(call, tensors)
    form = call.normal_form(tensors.q)
    if packed_documents(call) is not None:
        return tuple(t[0] for t in clean_tensors(call, tensors, form))
    first = 0 if tensors.bias is not None or "backward" in call.problem.features else _first_key(call)
    unused = ~_used_keys(form, call.problem.kv_heads)[:, first:]
    q, k, v = aligned_views(call, tensors)
    return clear_rows(q, form), *(t[:, first:].masked_fill(unused, 0.0) for t in (k, v))


def _first_key(call: Call) -> int:
    """The key from which on a kernel may read the keys of a dense call with the same mask: a multiple of 64, because
    some versions of cuDNN need lengths that are, with at least two keys after it."""
    problem, left = call.problem, call.mask.band[0]
    if left is None or problem.align != "bottom_right" or not call.mask.is_band:
        return 0
    first = min(problem.kv_len - problem.q_len - left, problem.kv_len - 2)
    return max(0, first) // 64 * 64


def clean_gradient(call: Call, tensors: Tensors, grad_BSHD: Tensor, *, own_tokens: bool = False) -> Tensor:
    """The gradient of the output with 0 in rows without keys, if `clean_views` clears these rows of q."""
    if not needs_clearing(call, own_tokens=own_tokens):
        return grad_BSHD
    return clear_rows(grad_BSHD, call.normal_form(tensors.q))


def needs_clearing(call: Call, *, own_tokens: bool = False) -> bool:
    """Whether a kernel that multiplies what it masks by 0 may load keys that no row sees, or rows without keys.

    own_tokens: the kernel loads no token outside of its document, so that documents with as many queries as keys need
    no copies. In others a row before the first key matters to the backward alone: it adds the row to gradients of keys.
    """
    documents = packed_documents(call)
    if documents is None or not own_tokens:
        return bool(call.problem.mask.kinds) and not _all_in_use(call)
    if documents.cu_seqlens_q is documents.cu_seqlens_kv:
        return False
    problem = call.problem
    if "window" in problem.mask.kinds:
        return True
    return "causal" in problem.mask.kinds and (problem.align == "top_left" or "backward" in problem.features)


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
    return kinds <= {"causal", "window"} and _band_is_in_use(call)


def _band_is_in_use(call: Call) -> bool:
    """Whether each row has a key and each key a row under a causal mask or a window: by the first and the last row."""
    problem, (left, right) = call.problem, call.mask.band
    shift = problem.kv_len - problem.q_len if problem.align == "bottom_right" else 0
    last = problem.q_len - 1 + shift
    keys = (left is None or shift <= left) and (right is None or last + right >= problem.kv_len - 1)
    rows = (left is None or last - left < problem.kv_len) and (right is None or shift + right >= 0)
    return keys and rows


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

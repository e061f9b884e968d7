"""The band of a mask and packed documents in the convention of flash-attn, which PyTorch's operators follow."""

from __future__ import annotations

from typing import Any

from undivided.backends.shared.documents import as_offsets, packed_documents
from undivided.request.call import Call
from undivided.request.request import Tensors


def flash_attn_band(call: Call) -> tuple[bool, int, int]:
    """(causal, left, right) in the convention of flash-attn: -1 is unbounded, causal is the window (-1, 0)."""
    left, right = call.mask.band
    return (left is None and right == 0), -1 if left is None else left, -1 if right is None else right


def packing_arguments(call: Call, tensors: Tensors) -> dict[str, Any]:
    """Cumulative and longest lengths of packed documents, as flash-attn names them; empty for dense sequences."""
    problem = call.problem
    packed = packed_documents(call)
    if packed is None:
        return {}
    max_q, max_k = problem.longest_lengths
    cu_q, cu_k = as_offsets(packed.cu_seqlens_q, tensors.q), as_offsets(packed.cu_seqlens_kv, tensors.q)
    return {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": max_q, "max_seqlen_k": max_k}

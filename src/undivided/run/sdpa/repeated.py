"""Calls of `scaled_dot_product_attention` like an earlier one, which run what that one has prepared.

For a few tokens, the views, checks and look-ups of a call take longer than its kernel. What is kept depends on sizes,
strides and dtypes only, never on which tensors these are. Some boolean masks are the exception (`_reads_mask`): each
has its own calls, because they read only the keys that it allows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from undivided._bounded import Bounded
from undivided.arguments.layout import from_heads_first, heads_first
from undivided.request.call import Call
from undivided.request.request import Tensors
from undivided.run.replay import (
    SCALAR_TYPES,
    PreparedCall,
    RecordedCall,
    bias_key,
    is_untransformed,
    needs_gradients,
    prepared_call,
    prepared_call_with_mask,
    tensors_key,
)
from undivided.run.sdpa.masks import KeptCalls, kept_calls
from undivided.selection import switches
from undivided.selection.decision import Decision
from undivided.selection.policy import current_policy

_PROBABILITIES = (float, int)
_SMALL_PROBLEM = 1 << 16
"""Up to so many scores of all heads, to find the keys that any boolean mask allows takes longer than to compute all."""


def call_key(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: object,
    dropout_p: object,
    is_causal: object,
    scale: object,
    enable_gqa: object,
) -> tuple[object, ...] | None:
    """The key under which later calls find the prepared call: everything the call depends on except the addresses
    of its tensors.

    None if the call must be prepared: it has dropout or arguments that only checks understand, or runs under a mode, a
    transform or autocast.
    """
    if (
        torch.compiler.is_compiling()
        or not (type(query) is type(key) is type(value) is Tensor and query.is_cpu)
        or type(dropout_p) not in _PROBABILITIES
        or dropout_p != 0
        or not (type(is_causal) is type(enable_gqa) is bool and type(scale) in SCALAR_TYPES)
        or not is_untransformed(query, key, value)
    ):
        return None
    mask_key: object = None
    if attn_mask is not None and (mask_key := _mask_key(attn_mask, query, key, value)) is None:
        return None
    return (
        tensors_key(query, key, value),
        mask_key,
        is_causal,
        scale,
        enable_gqa,
        torch.is_grad_enabled() and (query.requires_grad, key.requires_grad, value.requires_grad),
        current_policy(switches=switches.read()),
    )


def _mask_key(attn_mask: object, query: Tensor, key: Tensor, value: Tensor) -> object:
    """The part of `call_key` that an attn_mask has; `torch.bool` if calls are kept for each mask."""
    mask_key = bias_key(attn_mask)
    if mask_key is None or not isinstance(attn_mask, Tensor) or attn_mask.dim() > 4:
        return None
    return mask_key if attn_mask.dtype is not torch.bool or _reads_mask(attn_mask, query, key, value) else torch.bool


def _reads_mask(attn_mask: Tensor, query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether calls with boolean masks are kept for all masks of a shape, which each call reads.

    The native kernel finds the keys that a mask allows, in masks that have a byte for each key, one after another.
    """
    if query.dim() != 4 or key.dim() != 4 or needs_gradients(query, key, value):
        return False
    (batch, heads, q_len, _), kv_len = query.shape, key.shape[2]
    if attn_mask.dim() and attn_mask.shape[-1] == kv_len and attn_mask.stride(-1) == 1:
        return True
    return batch * heads * q_len * kv_len <= _SMALL_PROBLEM


def run(
    call_key: tuple[object, ...], query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool
) -> Tensor | None:
    """The result of an earlier call with this key for other tensors; None if there was none, or memory is missing."""
    kept = _calls.get(call_key) if call_key[1] is not torch.bool else None
    bias = attn_mask
    if kept is None and attn_mask is not None and attn_mask.dtype is torch.bool:
        calls, bias = kept_calls(attn_mask, is_causal), None
        kept = None if calls is None else calls.get(call_key)
    if kept is None:
        return None
    prepared, layout = kept
    try:
        if layout != "bhsd":
            query = from_heads_first(query, layout)
        if isinstance(prepared, RecordedCall):  # a kernel gets the addresses of the others, and knows their strides
            if layout != "bhsd":
                key, value = from_heads_first(key, layout), from_heads_first(value, layout)
            if bias is not None and bias.dim() < 4:
                bias = bias[(None,) * (4 - bias.dim())]
    except RuntimeError:  # there is no view of memory that is missing
        return None
    out = prepared.run(query, key, value, bias)
    return out if out is None or layout == "bhsd" else heads_first(out, layout)


def keep_and_run(
    call_key: tuple[object, ...],
    attn_mask: Tensor | None,
    calls: KeptCalls | None,
    decision: Decision,
    call: Call,
    tensors: Tensors,
) -> Tensor | None:
    """The result of a call with tensors of four axes, which is kept for later ones with its key.

    attn_mask: as the caller passed it.
    calls: those of a boolean attn_mask, or None.

    Returns:
        None if the backend prepares each call anew.
    """
    q, k, v, bias, *_ = tensors
    prepared: PreparedCall | RecordedCall | None = None
    if attn_mask is not None and calls is not None and call_key[1] is not torch.bool:
        mask = attn_mask[(None,) * (4 - attn_mask.dim())]
        prepared = prepared_call_with_mask(decision, call, tensors, mask)
        if prepared is not None:
            bias, calls = mask, None
    if prepared is None:
        records = needs_gradients(q, k, v, bias)
        prepared = RecordedCall(decision, call, tensors) if records else prepared_call(decision, call, tensors)
    if prepared is None:
        return None
    (_calls if calls is None else calls)[call_key] = prepared, call.problem.layout
    return prepared.run(q, k, v, bias)


_calls: KeptCalls = Bounded(1024)

"""Calls of `scaled_dot_product_attention` like an earlier one, which run what that one has prepared.

For a few tokens, the views, checks and look-ups of a call take longer than its kernel. What is kept depends on sizes,
strides and dtypes only, never on which tensors these are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from undivided._bounded import Bounded
from undivided.arguments.layout import Layout, from_heads_first, heads_first
from undivided.request.call import Call
from undivided.request.request import Tensors
from undivided.run.replay import NUMBERS, PreparedCall, RecordedCall, is_untransformed, needs_gradients, prepared_call
from undivided.selection import switches
from undivided.selection.decision import Decision
from undivided.selection.policy import current_policy

_PROBABILITIES = (float, int)


def kind(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: object, is_causal: object, scale: object, enable_gqa: object
) -> object:
    """All that a call without attn_mask on the CPU depends on, but where its tensors lie; None if it must be prepared.

    That is: with dropout, a mode, a transform or autocast, or with arguments that only checks understand.
    """
    if (
        torch.compiler.is_compiling()
        or not (type(query) is type(key) is type(value) is Tensor and query.is_cpu)
        or type(dropout_p) not in _PROBABILITIES
        or dropout_p != 0
        or not (type(is_causal) is type(enable_gqa) is bool and type(scale) in NUMBERS)
        or not is_untransformed(query, key, value)
    ):
        return None
    return (
        query.shape,
        key.shape,
        value.shape,
        query.dtype,
        key.dtype,
        value.dtype,
        (key.is_cpu and value.is_cpu) or (key.device, value.device),
        (query.is_contiguous() and key.is_contiguous() and value.is_contiguous())
        or (query.stride(), key.stride(), value.stride()),
        is_causal,
        scale,
        enable_gqa,
        torch.is_grad_enabled() and (query.requires_grad, key.requires_grad, value.requires_grad),
        current_policy(switches=switches.read()),
    )


def run(kind: object, query: Tensor, key: Tensor, value: Tensor) -> Tensor | None:
    """The result of an earlier call of this kind for other tensors; None if there was none, or memory is missing."""
    kept = _calls.get(kind)
    if kept is None:
        return None
    prepared, layout = kept
    if layout != "bhsd":
        query = from_heads_first(query, layout)
    if isinstance(prepared, RecordedCall):
        if layout != "bhsd":
            key, value = from_heads_first(key, layout), from_heads_first(value, layout)
        out = prepared.run(query, key, value)
    else:  # a kernel, which gets the addresses of key and value, and knows their strides
        out = prepared.run(query, key, value, None, None, None)
    return out if out is None or layout == "bhsd" else heads_first(out, layout)


def keep(kind: object, decision: Decision, call: Call, tensors: Tensors) -> None:
    """Keep a call with tensors of four axes for later ones of its kind, if its backend runs calls again."""
    records = needs_gradients(*tensors[:3])
    prepared = RecordedCall(decision, call, tensors) if records else prepared_call(decision, call, tensors)
    if prepared is not None:
        _calls[kind] = prepared, call.problem.layout


_calls: Bounded[object, tuple[PreparedCall | RecordedCall, Layout]] = Bounded(1024)

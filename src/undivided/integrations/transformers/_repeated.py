"""Layers that share a mask: the attention that the first of them prepares runs in the others too, and in later steps.

For a few tokens, checks and selection take longer than the kernel. Nothing here is found by the identity of a tensor:
what is kept depends on sizes, strides and dtypes only, and on the numbers that `ModelMask.keys` has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from undivided._bounded import Bounded
from undivided.integrations.transformers._active import active_batch
from undivided.integrations.transformers._latent import has_latents
from undivided.integrations.transformers._model_mask import ModelMask
from undivided.integrations.transformers.cache._states import CachedStates
from undivided.request.request import Request
from undivided.run.replay import SCALAR_TYPES, PreparedCall, may_replay, sinks_key
from undivided.selection.decision import length_class
from undivided.selection.policy import Policy, current_policy


def repeated(
    module: nn.Module,
    query: Tensor,
    key: Tensor | CachedStates,
    value: Tensor | CachedStates,
    mask: ModelMask,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor | None:
    """The output ``[B, Sq, H, D]`` of a layer without other arguments; None if it must be prepared by itself.

    That is: with gradients, under a mode or autocast, with latents or over ranks, or if its mask is not a range of keys
    per query.
    """
    if torch.compiler.is_compiling() or mask.context is not None or active_batch() is not None or has_latents(module):
        return None
    if not {type(scale), type(softcap)} <= SCALAR_TYPES or (sinks_part := sinks_key(sinks)) is None:
        return None
    k_scale = v_scale = None
    if isinstance(key, CachedStates) and isinstance(value, CachedStates):
        k, v, k_scale, v_scale = key.quantized, value.quantized, key.scale, value.scale
    elif type(key) is type(value) is Tensor and key.dim() == value.dim() == 4:
        k, v = key, value
    else:
        return None
    if type(query) is not Tensor or query.dim() != 4 or not may_replay(query, k, v):
        return None
    q, policy = query.transpose(1, 2), current_policy()
    call_key = (
        *_memory_key(q),
        *_memory_key(k),
        *_memory_key(v),
        *_memory_key(k_scale),
        *_memory_key(v_scale),
        scale,
        softcap,
        sinks_part,
        policy,
    )
    try:
        prepared = mask.prepared[call_key]
    except KeyError:
        if mask.shape[2:] != (query.shape[2], key.shape[2]):
            return None
        if k_scale is None:
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        options = {"scale": scale, "softcap": softcap, "sinks": sinks, "k_scale": k_scale, "v_scale": v_scale}
        prepared = mask.prepared[call_key] = _prepare(mask, q, k, v, options, policy)
    # k and v may have another order of axes than when they were prepared: a replay reads where they begin
    return None if prepared is None else prepared.run(q, k, v, None, sinks, None, k_scale, v_scale)


def _memory_key(tensor: Tensor | None) -> tuple[object, ...]:
    """Shape, strides, dtype and device: everything about the tensor except its address."""
    return () if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


_steps: Bounded[object, PreparedCall] = Bounded(1024)
"""Calls of one query per sequence, by everything that they depend on except the addresses of tensors and the exact
number of keys."""


def _prepare(
    mask: ModelMask, q: Tensor, k: Tensor, v: Tensor, options: Mapping[str, Any], policy: Policy
) -> PreparedCall | None:
    """The call of a layer, prepared: for one query per sequence that of an earlier step, with the keys of this one."""
    key = None
    if mask.keys is not None and len(mask.keys) == q.shape[0] and options["k_scale"] is None:
        sizes_without_length = k.shape[0], k.shape[2:], v.shape[0], v.shape[2:], k.shape[1] - v.shape[1]
        strides_and_types = k.stride(3), k.dtype, k.device, v.stride(3), v.dtype, v.device
        hides = None if mask.sees_all_keys else any(start for start, _ in mask.keys)
        sinks_part = sinks_key(options["sinks"])
        rules = hides, length_class(k.shape[1]), options["scale"], options["softcap"], sinks_part, policy
        key = *_memory_key(q), *sizes_without_length, *strides_and_types, *rules
        if (earlier := _steps.get(key)) is not None:
            prepared = earlier.with_keys(None if hides is None else mask.keys, k, v)
            if prepared is not None:
                return prepared
    prepared = PreparedCall.prepare(Request.from_keywords(q, k, v, layout="bshd", mask=mask.mask, **options), policy)
    if key is not None and prepared is not None:
        _steps[key] = prepared
    return prepared

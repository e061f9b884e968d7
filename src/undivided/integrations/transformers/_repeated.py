"""Layers that share a mask: the attention that the first of them prepares runs in the others too.

For a few tokens, checks and selection take longer than the kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from undivided.integrations.transformers._active import active_batch
from undivided.integrations.transformers._cached_states import CachedStates
from undivided.integrations.transformers._latent import has_latents
from undivided.integrations.transformers._model_mask import ModelMask
from undivided.request.request import Request
from undivided.run.replay import NUMBERS, Prepared, may_replay
from undivided.selection.policy import current_policy


def repeated(
    module: nn.Module,
    query: Tensor,
    key: Tensor | CachedStates,
    value: Tensor | CachedStates,
    mask: ModelMask,
    scale: float | None,
    softcap: float | None,
) -> Tensor | None:
    """The output ``[B, Sq, H, D]`` of a layer without other arguments; None if it must be prepared by itself.

    That is: with gradients, under a mode or autocast, with latents or over ranks, or if its mask is not a range of keys
    per query.
    """
    if torch.compiler.is_compiling() or mask.context is not None or active_batch() is not None or has_latents(module):
        return None
    if not {type(scale), type(softcap)} <= NUMBERS:
        return None
    k_scale = v_scale = None
    if isinstance(key, CachedStates) and isinstance(value, CachedStates):
        k, v, k_scale, v_scale = key.quantized, value.quantized, key.scale, value.scale
    elif type(key) is type(value) is Tensor and key.dim() == value.dim() == 4:
        k, v = key.transpose(1, 2), value.transpose(1, 2)
    else:
        return None
    if type(query) is not Tensor or query.dim() != 4 or not may_replay(query, k, v):
        return None
    q, policy = query.transpose(1, 2), current_policy()
    places = [(t.shape, t.stride(), t.dtype, t.device) for t in (q, k, v, k_scale, v_scale) if t is not None]
    kind = (*places, scale, softcap, policy)
    try:
        prepared = mask.prepared[kind]
    except KeyError:
        if mask.shape[2:] != (q.shape[1], k.shape[1]):
            return None
        request = Request.from_keywords(
            q, k, v, layout="bshd", mask=mask.mask, scale=scale, softcap=softcap, k_scale=k_scale, v_scale=v_scale
        )
        prepared = mask.prepared[kind] = Prepared.of(request, policy)
    return None if prepared is None else prepared.run(q, k, v, None, k_scale, v_scale)

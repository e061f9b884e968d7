"""The output of a layer, and its attention weights if they are needed: no kernel returns those.

The weights are the attention over an identity matrix as values. Sinks of single tokens are applied here too, because
they scale the output and the weights by one factor.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from undivided.functional import attention as attend
from undivided.integrations.transformers.cache._states import CachedStates
from undivided.run.autograd import cast_under_autocast
from undivided.selection.policy import current_policy


def collects_weights(module: nn.Module) -> bool:
    """Whether attention weights are collected from the layers, also without ``output_attentions``."""
    capturing = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(capturing, "_active_collector", None)
    if collector is None:
        return False
    if not torch.compiler.is_compiling():
        collected = collector.get()
    elif getattr(collector, "compiling", False):
        collected = collector.global_var
    else:  # `get` breaks the graph; what collects has hooks
        collected = collector.get() if module._forward_hooks else None
    return any("attentions" in name for name in collected or ())


def output_and_weights(
    query: Tensor,
    key: Tensor | CachedStates,
    value: Tensor | CachedStates,
    sinks: Tensor | None,
    options: dict[str, Any],
    needs_weights: bool,
) -> tuple[Tensor, Tensor | None]:
    """The output ``[B, Sq, H, D]``, and the weights ``[B, H, Sq, Sk]`` if they are needed."""
    q = query.transpose(1, 2)
    k, v, scales = _keys_and_values(key, value)
    out, share = _with_token_sinks(q, k, v, sinks, options | scales)
    if not needs_weights:
        return out, None
    weights = _weights(q, key, options)
    return out, weights if share is None else weights * share


def _keys_and_values(
    key: Tensor | CachedStates, value: Tensor | CachedStates
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(k, v) as [B, Sk, N, D], and the scales of quantised ones as options of `undivided.attention`."""
    if isinstance(key, CachedStates) and isinstance(value, CachedStates):
        return key.quantized, value.quantized, {"k_scale": key.scale, "v_scale": value.scale}
    return key.transpose(1, 2), value.transpose(1, 2), {}


def _with_token_sinks(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, options: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """The output, and the fraction of the weight that single-token sinks leave to the keys, ``[B, H, Sq, 1]``."""
    if sinks is None:
        out: Tensor = attend(q, k, v, **options)
        return out, None
    out, lse = attend(q, k, v, return_lse=True, **options)
    share = torch.sigmoid(lse[..., None] - sinks.float()).to(out.dtype)
    return out * share.transpose(1, 2), share


def _weights(q: Tensor, key: Tensor | CachedStates, options: dict[str, Any]) -> Tensor:
    """The attention weights ``[B, H, Sq, Sk]``: the attention over an identity matrix as values."""
    k: Tensor = key.transpose(1, 2)
    batch, kv_len, kv_heads, _ = k.shape
    q, k, _ = cast_under_autocast(q, k, k)
    identity = torch.eye(kv_len, dtype=q.dtype, device=q.device)[None, :, None, :]
    backend = None if current_policy().batch_invariant else "reference"  # which does not promise the order of its sums
    weights: Tensor = attend(q, k, identity.expand(batch, kv_len, kv_heads, kv_len), backend=backend, **options)
    return weights.transpose(1, 2)

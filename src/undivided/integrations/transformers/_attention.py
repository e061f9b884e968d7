"""The attention of a layer, as transformers calls it: query, key, value ``[B, H, S, D]``, a mask, and keywords."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from undivided import masks
from undivided._autograd import autocast
from undivided.errors import InputError
from undivided.functional import attention as attend
from undivided.integrations.transformers._masks import ModelMask, packed_mask
from undivided.integrations.transformers._patterns import Pattern
from undivided.masks import Mask

REFUSED = ("head_mask", "indices", "block_indices", "sinks", "cache")
"""Keywords of some models that change the result and that we have nothing for: factors of heads, keys chosen by index, sinks
of single tokens, the cache of continuous batching."""


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: ModelMask | Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    output_attentions: bool | None = False,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function that is registered: `undivided.attention` under the names of transformers.

    Args:
        module: the layer; its ``is_causal`` counts where no mask is given.
        query: ``[B, H, Sq, D]``.
        key, value: ``[B, N, Sk, D]``, N dividing H, never expanded.
        attention_mask: what `model_mask` made; or a tensor ``[B|1, H|1, Sq|1, Sk]``: bool, True = attend, or numbers to add.
        dropout: probability; the layer gives 0 in evaluation.
        scaling: of the scores; None: 1/sqrt(D).
        is_causal: replaces the layer's.
        softcap: ``c * tanh(score / c)``.
        s_aux: sinks, ``[H]``.
        position_bias: added to the scores, ``[B|1, H, Sq, Sk]``.
        cu_seq_lens_q, cu_seq_lens_k: cumulative lengths of documents packed into a batch of one.
        max_length_q, max_length_k: the longest of them.
        output_attentions: also return the weights, computed by the reference.
        others: not needed here (positions, windows: the mask has them).

    Returns:
        The output ``[B, Sq, H, D]``, and the weights ``[B, H, Sq, Sk]`` or None.

    Raises:
        InputError: an argument does not fit, or is one that changes the result and is not supported.
    """
    for name in REFUSED:
        if others.get(name) is not None:
            hint = "attn_implementation='eager' computes this layer"
            raise InputError(name, "be None", type(others[name]).__name__, hint=hint)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    mask, bias = _mask_and_bias(attention_mask, query, key, causal)
    if cu_seq_lens_q is not None:
        cu_kv = cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k
        documents = (cu_seq_lens_q, cu_kv, max_length_q, max_length_k)
        if isinstance(attention_mask, ModelMask):
            mask = attention_mask.within(*documents)
        elif attention_mask is None:
            mask = packed_mask(Pattern(right=0 if causal else None), *documents)
        else:
            mask = packed_mask(Pattern(), *documents) & (mask or masks.FULL)
    if position_bias is not None:
        bias = position_bias if bias is None else position_bias + bias
    options: dict[str, Any] = {
        "layout": "bshd", "mask": mask, "bias": bias, "scale": scaling, "softcap": softcap, "sinks": s_aux,
        "dropout_p": dropout,
    }  # fmt: skip
    if dropout and output_attentions:  # the same entries drop out in both
        options["dropout_seed"] = torch.empty((), dtype=torch.int64, device=query.device).random_()
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    out: Tensor = attend(q, k, v, **options)
    return out, _weights(q, k, options) if output_attentions else None


def _mask_and_bias(
    given: ModelMask | Tensor | None, query: Tensor, key: Tensor, causal: bool
) -> tuple[Mask | None, Tensor | None]:
    """What a layer was given, as a mask or as numbers to add. Nothing means what it means to PyTorch's function."""
    q_len, kv_len = query.shape[2], key.shape[2]
    if isinstance(given, ModelMask):
        if given.shape[2:] != (q_len, kv_len):
            raise InputError(
                "attention_mask", f"be for {q_len} queries and {kv_len} keys, as this layer has",
                f"one for {given.shape[2]} and {given.shape[3]}",
            )  # fmt: skip
        return given.mask, None
    if given is None:
        return masks.causal(align="top_left") if causal and q_len > 1 else None, None
    given = given[..., :kv_len]  # masks made for a whole static cache
    return (masks.dense(given), None) if given.dtype == torch.bool else (None, given)


def _weights(q: Tensor, k: Tensor, options: dict[str, Any]) -> Tensor:
    """The attention weights ``[B, H, Sq, Sk]``: what attention makes of an identity matrix as its values."""
    batch, kv_len, kv_heads, _ = k.shape
    q, k, _ = autocast(q, k, k)
    identity = torch.eye(kv_len, dtype=q.dtype, device=q.device)[None, :, None, :]
    weights: Tensor = attend(
        q, k, identity.expand(batch, kv_len, kv_heads, kv_len), backend="reference", **options
    )
    return weights.transpose(1, 2)

"""The order of rows in the weights of the projections. It is TransformerEngine's, so that its checkpoints load.

    three weights            query [h * d, hidden]    key [g * d, hidden]    value [g * d_v, hidden]
    one, not interleaved     query, key, value, concatenated
    one, interleaved         for each key/value head: its h / g query heads, its key, its value

Cross attention has the same order without the queries, which have a weight of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from undivided.nn.arguments.formats import Heads
from undivided.nn.blocks.initial_weights import Init
from undivided.nn.blocks.linear import Linear
from undivided.nn.blocks.normalization import Norm


def projections(
    heads: Heads,
    size: int,
    norm: Norm | None,
    init: Init,
    bias: bool,
    device: torch.device | str | None,
    dtype: torch.dtype,
    *,
    is_cross: bool,
    fused: bool,
) -> dict[str, Linear]:
    """The projections by name: `layernorm_qkv` or `qkv`; of cross-attention `layernorm_query` or `query_layer`, and
    `key_value`.

    Args:
        heads: of the layer.
        size: features of hidden states.
        norm: normalisation of hidden_states; None if they are not normalised.
        init, bias, device, dtype: as in `Linear`.
        is_cross: whether keys and values are maps of another tensor.
        fused: whether the maps of one tensor have one weight.
    """

    def make(features: dict[str, int], norm: Norm | None) -> Linear:
        return Linear(size, features, init, bias, device, dtype, norm)

    if not is_cross:
        return {"qkv" if norm is None else "layernorm_qkv": make(qkv_features(heads, fused), norm)}
    features = {"" if fused or norm is None else "query": heads.q * heads.qk_dim}
    return {
        "query_layer" if norm is None else "layernorm_query": make(features, norm),
        "key_value": make(kv_features(heads, fused), None),
    }


def qkv_features(heads: Heads, fused: bool) -> dict[str, int]:
    """Output features by map: "query", "key" and "value", or one map of all if `fused`."""
    features = {"query": heads.q * heads.qk_dim, **kv_features(heads, False)}
    return {"": sum(features.values())} if fused else features


def kv_features(heads: Heads, fused: bool) -> dict[str, int]:
    """Output features by map: "key" and "value", or one map of both if `fused`."""
    features = {"key": heads.kv * heads.qk_dim, "value": heads.kv * heads.v_dim}
    return {"": sum(features.values())} if fused else features


def split_qkv(outputs: Sequence[Tensor], heads: Heads, interleaved: bool) -> tuple[Tensor, Tensor, Tensor]:
    """q [.., h, d], k [.., g, d] and v [.., g, d_v] from the outputs of the maps [.., features]."""
    group = heads.q // heads.kv
    if len(outputs) == 1 and interleaved:
        by_kv_head = outputs[0].unflatten(-1, (heads.kv, -1))
        q, k, v = by_kv_head.split((group * heads.qk_dim, heads.qk_dim, heads.v_dim), -1)
        return q.unflatten(-1, (group, heads.qk_dim)).flatten(-3, -2), k, v
    q, k, v = outputs[0].split(tuple(qkv_features(heads, False).values()), -1) if len(outputs) == 1 else outputs
    return split_q(q, heads), *split_kv((k, v), heads, False)


def split_kv(outputs: Sequence[Tensor], heads: Heads, interleaved: bool) -> tuple[Tensor, Tensor]:
    """k [.., g, d] and v [.., g, d_v] from the outputs of the maps [.., features]."""
    if len(outputs) == 1 and interleaved:
        k, v = outputs[0].unflatten(-1, (heads.kv, -1)).split((heads.qk_dim, heads.v_dim), -1)
        return k, v
    k, v = outputs[0].split(tuple(kv_features(heads, False).values()), -1) if len(outputs) == 1 else outputs
    return k.unflatten(-1, (heads.kv, heads.qk_dim)), v.unflatten(-1, (heads.kv, heads.v_dim))


def split_q(q: Tensor, heads: Heads) -> Tensor:
    """q as [.., h, d], from [.., h * d]."""
    q_by_head: Tensor = q.unflatten(-1, (heads.q, heads.qk_dim))
    return q_by_head

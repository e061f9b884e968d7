"""The order of rows in the weights of the projections. It is TransformerEngine's, so that its checkpoints load.

    three weights            query [h * d, hidden]    key [g * d, hidden]    value [g * d_v, hidden]
    one, not interleaved     query, key, value, concatenated
    one, interleaved         for each key/value head: its h / g query heads, its key, its value

Cross attention has the same order without the queries, which have a weight of their own.
"""

from __future__ import annotations

from torch import Tensor

from undivided.nn.arguments.formats import Heads


def qkv_parts(heads: Heads, fused: bool) -> dict[str, int]:
    """Features of each part of the query, key and value projection."""
    parts = {"query": heads.q * heads.qk_dim, **kv_parts(heads, False)}
    return {"": sum(parts.values())} if fused else parts


def kv_parts(heads: Heads, fused: bool) -> dict[str, int]:
    """Features of each part of the key and value projection."""
    parts = {"key": heads.kv * heads.qk_dim, "value": heads.kv * heads.v_dim}
    return {"": sum(parts.values())} if fused else parts


def split_qkv(parts: tuple[Tensor, ...], heads: Heads, interleaved: bool) -> tuple[Tensor, Tensor, Tensor]:
    """q [.., h, d], k [.., g, d] and v [.., g, d_v] from the parts [.., features]."""
    group = heads.q // heads.kv
    if len(parts) == 1 and interleaved:
        by_kv_head = parts[0].unflatten(-1, (heads.kv, -1))
        q, k, v = by_kv_head.split((group * heads.qk_dim, heads.qk_dim, heads.v_dim), -1)
        return q.unflatten(-1, (group, heads.qk_dim)).flatten(-3, -2), k, v
    q, k, v = parts[0].split(tuple(qkv_parts(heads, False).values()), -1) if len(parts) == 1 else parts
    return split_q(q, heads), *split_kv((k, v), heads, False)


def split_kv(parts: tuple[Tensor, ...], heads: Heads, interleaved: bool) -> tuple[Tensor, Tensor]:
    """k [.., g, d] and v [.., g, d_v] from the parts [.., features]."""
    if len(parts) == 1 and interleaved:
        k, v = parts[0].unflatten(-1, (heads.kv, -1)).split((heads.qk_dim, heads.v_dim), -1)
        return k, v
    k, v = parts[0].split(tuple(kv_parts(heads, False).values()), -1) if len(parts) == 1 else parts
    return k.unflatten(-1, (heads.kv, heads.qk_dim)), v.unflatten(-1, (heads.kv, heads.v_dim))


def split_q(q: Tensor, heads: Heads) -> Tensor:
    """q as [.., h, d], from [.., h * d]."""
    q_by_head: Tensor = q.unflatten(-1, (heads.q, heads.qk_dim))
    return q_by_head

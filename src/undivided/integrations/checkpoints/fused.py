"""Queries, keys and values in one weight, and in a weight each: the rows in TransformerEngine's orders."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from undivided.errors import InputError
from undivided.nn import MultiheadAttention
from undivided.nn.arguments.formats import Heads
from undivided.nn.blocks.projections import split_kv, split_qkv


class Projection(NamedTuple):
    """Maps that have one weight, or a weight each.

    Attributes:
        name: of the maps in the model, with a point at the end.
        maps: "query", "key" and "value", or some of them.
        layer: the attention that has it.
    """

    name: str
    maps: tuple[str, ...]
    layer: MultiheadAttention

    def split(self, weight: Tensor, interleaved: bool) -> list[Tensor]:
        """The weight or bias of each map, from that of all."""
        if len(self.maps) == 1:
            return [weight]
        split = split_kv if len(self.maps) == 2 else split_qkv
        parts = split((weight.movedim(0, -1),), self.layer.heads, interleaved)  # which split the last axis
        return [part.flatten(-2).movedim(-1, 0) for part in parts]

    def join(self, weights: list[Tensor], interleaved: bool) -> Tensor:
        """The weight or bias of all maps, from that of each."""
        if interleaved and len(weights) > 1:
            by_head = [weight.unflatten(0, (self.layer.heads.kv, -1)) for weight in weights]
            return torch.cat(by_head, 1).flatten(0, 1)
        return torch.cat(weights)

    @property
    def rows(self) -> int:
        """Rows of all maps together."""
        heads: Heads = self.layer.heads
        sizes = {"query": heads.q * heads.qk_dim, "key": heads.kv * heads.qk_dim, "value": heads.kv * heads.v_dim}
        return sum(sizes[name] for name in self.maps)


def projections(model: torch.nn.Module) -> Iterator[Projection]:
    """The maps of a model that may have one weight or several."""
    for name, layer in model.named_modules():
        if not isinstance(layer, MultiheadAttention):
            continue
        prefix = f"{name}." if name else ""
        if layer.attention_type == "self":
            yield Projection(
                f"{prefix}{'layernorm_qkv' if layer.input_layernorm else 'qkv'}.", ("query", "key", "value"), layer
            )
            continue
        if layer.input_layernorm:
            yield Projection(f"{prefix}layernorm_query.", ("query",), layer)
        yield Projection(f"{prefix}key_value.", ("key", "value"), layer)


def arrange(
    state: dict[str, Tensor], projection: Projection, *, source_interleaved: bool | None, fused: bool, interleaved: bool
) -> dict[str, Tensor]:
    """The entries of a map in one arrangement; it takes those of the other one out of the state.

    Args:
        state: of the model; entries are removed.
        projection: the map.
        source_interleaved: whether one weight in the state is interleaved; None if that is unknown.
        fused, interleaved: the arrangement of the result: one weight, and its order.
    """
    result: dict[str, Tensor] = {}
    for kind in ("weight", "bias"):
        one, several = f"{projection.name}{kind}", [f"{projection.name}{name}_{kind}" for name in projection.maps]
        if one in state:
            if source_interleaved is None and len(projection.maps) > 1:
                hint = "True is TransformerEngine's default: for each key head its queries, its key and its value"
                raise InputError(
                    "qkv_weight_interleaved", f"be True or False, because state has {one!r}", None, hint=hint
                )
            weight = state.pop(one)
            if weight.shape[0] != projection.rows:
                raise InputError(f"state[{one!r}]", f"have {projection.rows} rows", list(weight.shape))
            weights = projection.split(weight, bool(source_interleaved))
        elif all(name in state for name in several):
            weights = [state.pop(name) for name in several]
        else:
            continue
        result |= {one: projection.join(weights, interleaved)} if fused else dict(zip(several, weights, strict=True))
    return result

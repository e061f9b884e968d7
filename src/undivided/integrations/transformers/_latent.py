"""Multi-head latent attention (DeepSeek's MLA) over the latents themselves, without a key and value per head.

A latent c of a token gives every head h its key W_h c and its value U_h c. Both products can leave the sum over the
tokens (Sk of them):

    q . (W_h c) = (W_h^T q) . c                sum of p U_h c = U_h (sum of p c)

so the queries are multiplied by W_h^T, the results by U_h, and attention has one key head: the latent beside its
rotated part, whose first columns are the value too. Each latent is read once for all heads.

Source: DeepSeek-AI 2024 (arXiv:2405.04434), section 2.1.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from undivided.arguments.checks import check_type
from undivided.arguments.signature import checked_call
from undivided.errors import InputError

NEEDED = ("expand_kv", "kv_b_proj", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
"""What a layer of transformers with latent attention has."""


@checked_call
def use_latents(model: nn.Module) -> int:
    """Let the latent attention layers of a model attend to their latents, without a key and value per head.

    DeepSeek V2 and V3, GLM 4 MoE Lite, Kimi Linear, MiniCPM 3 and other models whose layers expand latents with
    ``expand_kv``. Results stay the same up to rounding. Steps of many new tokens, for which the expansion costs less,
    still expand. Weights, parameter names and caches do not change; it holds while ``attn_implementation`` is
    "undivided".

    Args:
        model: a model of transformers; its layers are changed in place.

    Returns:
        The number of layers.

    Raises:
        InputError: the model has no such layer, or a projection has a bias, an adapter or hooks, or is quantized.

    >>> import transformers
    >>> from undivided.integrations.transformers import register, use_latents
    >>> register()
    >>> config = transformers.DeepseekV3Config(
    ...     vocab_size=50, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
    ...     num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, n_group=1, topk_group=1,
    ...     num_experts_per_tok=2, kv_lora_rank=32, q_lora_rank=None, qk_nope_head_dim=16, qk_rope_head_dim=8,
    ...     v_head_dim=16, attn_implementation="undivided")
    >>> use_latents(transformers.DeepseekV3ForCausalLM(config))
    2
    """
    check_type("model", model, nn.Module, "a torch.nn.Module")
    layers = [module for module in model.modules() if all(hasattr(module, name) for name in NEEDED)]
    if not layers:
        hint = f"a layer with {', '.join(NEEDED)}"
        raise InputError("model", "have layers with latent attention", type(model).__name__, hint=hint)
    for layer in layers:
        _checked_weight(layer)
    for layer in layers:
        # not a method: it could not be pickled under this name
        layer.expand_kv = functools.partial(_latents, layer)  # type: ignore[assignment]
    return len(layers)


def _checked_weight(layer: nn.Module) -> Tensor:
    """The projection of a layer's latents, ``[H, plain + value, latent]``."""
    projection = cast(Any, layer.kv_b_proj)
    weight = getattr(projection, "weight", None)
    sizes = _sizes(layer)
    if not isinstance(weight, Tensor) or not weight.is_floating_point() or weight.shape[-1] != sizes.latent:
        raise InputError("kv_b_proj", f"have a floating-point weight [.., {sizes.latent}]", type(projection).__name__)
    if getattr(projection, "bias", None) is not None:
        raise InputError("kv_b_proj", "have no bias", "one")
    if type(projection).forward is not nn.Linear.forward or projection._forward_hooks or projection._forward_pre_hooks:
        hint = "merge an adapter into the weight first, such as with merge_and_unload()"
        raise InputError(
            "kv_b_proj", "multiply by its weight alone, as nn.Linear", type(projection).__name__, hint=hint
        )
    return weight.view(-1, sizes.plain + sizes.value, sizes.latent)


class _Sizes(NamedTuple):
    """The sizes of a latent, of the plain and the rotated part of a head's query, and of its value."""

    latent: int
    plain: int
    rotated: int
    value: int


def _sizes(layer: Any) -> _Sizes:
    return _Sizes(layer.kv_lora_rank, layer.qk_nope_head_dim, layer.qk_rope_head_dim, layer.v_head_dim)


def _latents(layer: nn.Module, latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    """In place of a layer's ``expand_kv``: ``[B, 1, Sk, latent + rotated]``, and its first columns as values."""
    if cast(Any, layer).config._attn_implementation != "undivided":
        return _expand_heads(layer, latents, rotated)
    keys = torch.cat((latents, rotated), dim=-1)
    return keys, keys[..., : latents.shape[-1]]


def _expand_heads(layer: nn.Module, latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of every head, ``[B, H, Sk, D]``, as the layer's own class computes them."""
    key, value = cast(Any, type(layer)).expand_kv(layer, latents, rotated)
    return key, value


def has_latents(layer: nn.Module) -> bool:
    """Whether `use_latents` changed this layer."""
    return "expand_kv" in vars(layer)


def pays_off(layer: nn.Module, q_len: int) -> bool:
    """Whether fewer operations are needed per key without the expansion, for this number of queries."""
    latent, plain, rotated, value = _sizes(layer)
    return q_len * (2 * latent + rotated) < q_len * (plain + rotated + value) + latent * (plain + value)


def expand(layer: nn.Module, key: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of every head from what `_latents` returned."""
    latent = _sizes(layer).latent
    return _expand_heads(layer, key[..., :latent], key[..., latent:])


def absorb_queries(layer: nn.Module, query: Tensor) -> Tensor:
    """Queries for latents, ``[B, H, Sq, latent + rotated]``, from those for keys."""
    plain = _sizes(layer).plain
    weight = _checked_weight(layer)[:, :plain].to(query.dtype)
    return torch.cat((query[..., :plain] @ weight, query[..., plain:]), dim=-1)


def expand_output(layer: nn.Module, out: Tensor) -> Tensor:
    """Results of every head, ``[B, Sq, H, value]``, from sums of latents."""
    plain = _sizes(layer).plain
    weight = _checked_weight(layer)[:, plain:].to(out.dtype)
    return (out.transpose(1, 2) @ weight.transpose(1, 2)).transpose(1, 2)

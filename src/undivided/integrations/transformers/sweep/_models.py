"""Tiny models of every architecture, built from the fields of its configuration: nothing is downloaded.

A field whose value exceeds the size for its name in `SIZES` gets that size. If the sizes do not fit together, the next
of `VARIANTS` is tried. `ADJUSTED` has further fields of single architectures.
"""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any, NamedTuple

import torch
from torch import nn

from undivided.integrations.transformers.sweep._known import ADJUSTED

LAYERS = r"(num_)?hidden_layers|.*(num|n)_.*layers?|.*_layers|n_layers?|.*depths?|num_blocks|.*num_(conv_)?blocks"
KV_HEADS = r".*(key_value|kv)_heads|.*num_.*kv_head|num_query_groups|.*num_key_value"
"""The patterns of the sizes that a `Variant` chooses."""

SIZES: tuple[tuple[str, int], ...] = (
    (r".*vocab_size|vocab_size.*", 99),
    (LAYERS, 2),
    (KV_HEADS, 2),
    (r".*(num|n)_.*heads?|.*_heads|n_heads?|encoder_attention_heads|decoder_attention_heads", 4),
    (r".*head_dim|.*head_size|d_kv|attention_key_size|.*dim_head", 8),
    (r".*intermediate.*size|.*ffn_dim|.*ffn_hidden_size|d_ff|.*mlp_dim|n_inner|.*feedforward.*|ffn_.*size", 48),
    (r".*max_.*position.*|n_positions|max_source_positions|max_target_positions|seq_length|max_seq_len", 64),
    (r".*(num|n)_.*experts|.*num_local_experts|num_routed_experts", 4),
    (r"n_group|topk_group|num_expert_groups?", 1),
    (r".*experts_per_tok.*|.*top_k.*|moe_topk|num_selected_experts", 2),
    (r".*image_size|.*img_size|.*input_size", 32),
    (r".*patch_size", 8),
    (r".*num_mel_bins|feature_size|num_freq.*|n_mels", 16),
    (r".*sliding_window|.*local_attention|attention_chunk_size|attention_window", 6),
    (r".*hidden_sizes?|d_model|.*embed_dim|n_embd|dim|.*embedding_size|.*hidden_dim|.*projection_dim|.*model_dim", 32),
    (r".*_dim|.*_size|.*_rank|.*channels|.*width", 32),
    (r"num_queries|num_latents|.*num_query_tokens|num_codebooks|.*_length", 16),
)
"""The largest value of a field, by the first pattern that its name matches."""

MAX_WEIGHTS = 8_000_000


class Variant(NamedTuple):
    """A choice of sizes; ``mrope`` are the sections of multimodal rotary positions."""

    kv_heads: int = 2
    layers: int = 2
    mrope: tuple[int, ...] | None = None
    random_weights: bool = True


VARIANTS = (
    Variant(),
    Variant(kv_heads=4),
    Variant(mrope=(2, 1, 1)),
    Variant(mrope=(1, 1, 0)),
    Variant(kv_heads=4, mrope=(2, 1, 1)),
    Variant(layers=4),
    Variant(kv_heads=4, layers=4),
    Variant(layers=8),
    Variant(random_weights=False),
    Variant(kv_heads=4, random_weights=False),
)


class Unbuildable(Exception):
    """A tiny model of this architecture cannot be built; the message says why."""


def tiny_config(config_class: Any, variant: Variant, adjusted: dict[str, Any] | None = None, inside: Any = None) -> Any:
    """A configuration of the class with small sizes.

    Args:
        config_class: a subclass of transformers' ``PreTrainedConfig``.
        variant: the choice of sizes.
        adjusted: values for fields; a dict for a sub-configuration's fields. A value of None leaves the default.
        inside: the default value of this configuration in a larger one; its other fields are kept.
    """
    adjusted = {**ADJUSTED.get(getattr(config_class, "model_type", ""), {}), **(adjusted or {})}
    default = config_class()
    fields = {} if inside is None else _chosen_outputs(inside)
    for name, value in vars(default if inside is None else inside).items():
        if name in adjusted or name.startswith("_"):
            continue
        is_inner = _is_config(value)
        small = tiny_config(type(value), variant, None, value) if is_inner else _small(name, value, variant)
        if small is not value or (inside is not None and _is_own(name, value, default)):
            fields[name] = small
    for name, value in adjusted.items():
        inner = getattr(default, name, None)
        if isinstance(value, dict) and _is_config(inner):
            fields[name] = tiny_config(type(inner), variant, value, inner)
        elif value is not None:
            fields[name] = value
    accepted = inspect.signature(config_class.__init__).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in accepted.values()):
        fields = {name: value for name, value in fields.items() if name in accepted or name == "out_indices"}
    return config_class(**fields)


def _is_own(name: str, value: Any, default: Any) -> bool:
    """Whether a larger configuration chose this value; lists with an entry for each layer follow from the sizes."""
    return not re.fullmatch(r".*layer_types|.*per_layer.*|.*pattern", name) and value != vars(default).get(name, value)


def _chosen_outputs(backbone: Any) -> dict[str, Any]:
    """The stages that a larger model reads, if the configuration is of a backbone with several."""
    stages, chosen = getattr(backbone, "stage_names", None), getattr(backbone, "out_indices", None)
    return {"out_indices": list(chosen)} if stages and chosen and len(stages) <= 5 else {}


def _is_config(value: object) -> bool:
    return hasattr(value, "model_type") and hasattr(value, "to_dict")


def _small(name: str, value: Any, variant: Variant) -> Any:
    """A smaller value for the field, or the value itself."""
    if name == "head_dim" and value is None:
        return 8
    if isinstance(value, bool):
        return value
    if re.fullmatch(r".*token_(id|index)|.*_token", name) and isinstance(value, int):
        return value if value < 10 else 10 + sum(map(ord, name)) % 80
    if isinstance(value, dict) and name in ("rope_parameters", "rope_scaling"):
        return _small_rope(value, variant)
    for pattern, limit in SIZES:
        if re.fullmatch(pattern, name):
            limit = {KV_HEADS: variant.kv_heads, LAYERS: variant.layers}.get(pattern, limit)
            if isinstance(value, int):
                return min(value, limit)
            if isinstance(value, list | tuple) and value and all(type(one) is int for one in value):
                small = type(value)(min(entry, limit) for entry in value)
                return value if small == value else small
            break
    return value


def _small_rope(value: dict[str, Any], variant: Variant) -> dict[str, Any]:
    """Rotary positions whose sections fit a head of 8."""
    if variant.mrope is None and "mrope_section" not in value:
        return value
    if any(isinstance(one, dict) for one in value.values()):  # one for each kind of layer
        return {key: _small_rope(one, variant) if isinstance(one, dict) else one for key, one in value.items()}
    return {**value, "mrope_section": list(variant.mrope or (2, 1, 1))}


def model_class(model_type: str) -> Any:
    """The class that AutoModel builds; if there is none, that of another task, or the first class of its module with
    this configuration."""
    import transformers
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[model_type]
    tasks = [name for name in vars(modeling_auto) if re.fullmatch("MODEL_FOR_.*_MAPPING_NAMES", name)]
    for task in ("MODEL_MAPPING_NAMES", *tasks):
        classes = getattr(modeling_auto, task).get(model_type)
        if classes is not None:
            return getattr(transformers, classes if isinstance(classes, str) else classes[0])
    name = config_class.__module__.replace(".configuration_", ".modeling_")
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise Unbuildable(f"there is no module {name.rpartition('.')[2]}") from error
    for one in vars(module).values():
        own = inspect.isclass(one) and one.__module__ == name and not one.__name__.endswith("PreTrainedModel")
        if own and getattr(one, "config_class", None) is config_class:
            return one
    raise Unbuildable("it has no model class of its own")


def build(model_type: str, implementation: str, variant: Variant = VARIANTS[0]) -> nn.Module:
    """The tiny model with an attention implementation, in evaluation mode, always with the same weights."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    network_class = model_class(model_type)
    with torch.device("meta"):
        config = tiny_config(CONFIG_MAPPING[model_type], variant)
        weights = sum(p.numel() for p in network_class(config).parameters())
    if weights > MAX_WEIGHTS:
        raise Unbuildable(f"its smallest form has {weights:,} weights")
    config = tiny_config(CONFIG_MAPPING[model_type], variant)
    config._attn_implementation = implementation
    torch.manual_seed(0)
    network: nn.Module = network_class(config).eval()
    if variant.random_weights:
        randomize(network)
    return network


def randomize(network: nn.Module) -> None:
    """Set random weights large enough for attention to matter: with the default ones every softmax is nearly
    uniform."""
    generator = torch.Generator().manual_seed(0)
    for label, weight in network.named_parameters():
        if not weight.is_floating_point():
            continue
        if weight.dim() > 1:
            std = 1.0 if "embed" in label else weight[0].numel() ** -0.5
            nn.init.normal_(weight, std=std, generator=generator)
        elif label.endswith("bias"):
            nn.init.normal_(weight, std=0.1, generator=generator)

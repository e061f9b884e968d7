"""`from_hugging_face`, `to_hugging_face` and `from_transformer_engine`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from undivided.arguments.checks import check_type, listed
from undivided.arguments.signature import checked_call
from undivided.errors import InputError
from undivided.integrations.checkpoints.check import check_result, checked_layers, checked_names, checked_state
from undivided.integrations.checkpoints.fused import arrange, projections
from undivided.integrations.checkpoints.table import pairs

LAYERS = "model.layers"
_COMPUTED = re.compile(r"rotary_emb\.inv_freq$")
"""Buffers in old checkpoints of transformers that a model computes."""


@checked_call
def from_hugging_face(
    state: Mapping[str, Tensor], model: torch.nn.Module, names: Mapping[str, str] | None = None, layers: str = LAYERS
) -> dict[str, Tensor]:
    """The state dict of a model of undivided's layers, from that of a decoder of Hugging Face Transformers.

    The layers of the model are those of the decoder in their order. Only names and the order of rows change: the
    numbers of the layers (epsilon, base of the rotary embedding, head size, activation) are arguments of the model.

    Args:
        state: the whole state dict there, for example of ``safetensors.torch.load_file``. Moments of Adam by the names
            of their parameters convert in the same way.
        model: what the result is for, with whole parameters; the meta device suffices. Biases that `state` lacks
            are 0.
        names: names of the model outside of its layers, and what they are called there, such as
            ``{"embedding.weight": "model.embed_tokens.weight"}``. A tied weight is given twice.
        layers: the name of the layers there.

    Returns:
        A state dict for ``model.load_state_dict``, or for `set_model_state_dict` of PyTorch with full_state_dict=True.
        Where possible its tensors are those of `state`.

    Raises:
        InputError: names or sizes are not those of the model, as for architectures with a norm after a block or with
            experts; the message lists them.

    >>> import torch, transformers, undivided
    >>> config = transformers.LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
    ...                                   num_attention_heads=4, num_key_value_heads=2)
    >>> there = transformers.LlamaForCausalLM(config).model.layers[0]
    >>> layer = undivided.TransformerLayer(32, 48, 4, num_gqa_groups=2, activation="swiglu", bias=False,
    ...                                    normalization="RMSNorm", attn_input_format="bshd")
    >>> state = {f"model.layers.0.{name}": value for name, value in there.state_dict().items()}
    >>> layer.load_state_dict(from_hugging_face(state, layer))
    <All keys matched successfully>
    """
    checked_layers(model)
    check_type("layers", layers, str, "the name of the layers")
    names = checked_names(names)
    entries = {name: value for name, value in checked_state(state).items() if not _COMPUTED.search(name)}
    result = _outer_state(entries, model, names)
    # with the sizes of the biases that the model has and the entries may lack
    separate = _separate(model, {name: value.to("meta") for name, value in model.state_dict().items()})
    for here, there in _name_pairs(model, layers):
        if all(name in entries for name in there):
            parts = [entries.pop(name) for name in there]
            result[here] = parts[0] if len(parts) == 1 else torch.cat(parts)
        elif _is_bias_of_map(here) and here in separate and (weight := result.get(f"{here[:-4]}weight")) is not None:
            result[here] = weight.new_zeros(separate[here].shape)
    if unknown := sorted(entries.keys() - set(names.values())):
        hint = f"give names outside of {layers!r} in names; a model with other blocks has no layers here"
        must = "have only the names of undivided.integrations.checkpoints.NAMES"
        raise InputError("state", must, f"{len(unknown)} unknown: {listed(unknown)}", hint=hint)
    result = _arrange_for(model, result, None)
    hint = f"the layers of the model are {layers}.0 and so on; a tied weight is given twice in names"
    check_result(result, model.state_dict(), "model", hint)
    return result


@checked_call
def to_hugging_face(
    state: Mapping[str, Tensor],
    model: torch.nn.Module,
    names: Mapping[str, str] | None = None,
    layers: str = LAYERS,
    like: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """The inverse of `from_hugging_face`: a state dict with the names of Hugging Face Transformers.

    Args:
        state: a whole state dict of the model. On a mesh: ``get_model_state_dict`` of PyTorch with
            ``StateDictOptions(full_state_dict=True)``.
        model: a model with these parameters; its options decide how `state` is read.
        names, layers: as for `from_hugging_face`.
        like: a state dict of the model there. Names and sizes are compared with it, and biases that it lacks are left
            out if they are 0.

    Returns:
        A state dict for ``load_state_dict`` of the model there, or for ``safetensors.torch.save_file``.

    Raises:
        InputError: names or sizes differ from those of the model or of `like`, or a bias that `like` lacks is not 0.

    >>> import undivided
    >>> layer = undivided.TransformerLayer(32, 48, 4, num_gqa_groups=2, activation="swiglu", bias=False,
    ...                                    normalization="RMSNorm", attn_input_format="bshd")
    >>> sorted(to_hugging_face(layer.state_dict(), layer))[-2:]
    ['model.layers.0.self_attn.q_proj.weight', 'model.layers.0.self_attn.v_proj.weight']
    """
    checked_layers(model)
    check_type("layers", layers, str, "the name of the layers")
    like = None if like is None else checked_state(like, "like")
    entries = checked_state(state)
    check_result(entries, model.state_dict(), "model", None)
    entries = _separate(model, entries)
    buffers = dict(model.named_buffers())
    result: dict[str, Tensor] = {}
    for here, name in checked_names(names).items():
        if here not in entries:
            raise InputError("names", "name parameters of model", repr(here))
        result[name] = entries.pop(here)
    for here, there in _name_pairs(model, layers):
        if here in entries:
            parts = entries.pop(here).chunk(len(there))
            if like is None or there[0] in like or not _is_zero_bias(here, parts):
                result |= {name: part.contiguous() for name, part in zip(there, parts, strict=True)}
    if unknown := sorted(entries.keys() - buffers.keys()):
        hint = "give names outside of the layers in names"
        raise InputError("names", "name all parameters outside of the layers", listed(unknown), hint=hint)
    if like is not None:
        check_result(result, like, "like", "a bias that is not 0 has no place in a model without it")
    return result


@checked_call
def from_transformer_engine(
    state: Mapping[str, Tensor], model: torch.nn.Module, qkv_weight_interleaved: bool | None = None
) -> dict[str, Tensor]:
    """The state dict for a model whose layers have other values of fuse_qkv_params or qkv_weight_interleaved.

    The names of TransformerEngine are those of undivided. A state dict of layers with the same options loads as it is
    (there with strict=False, as it has no `_extra_state`); this converts queries, keys and values between one weight
    and a weight each.

    Args:
        state: a whole state dict of the same layers there, or here.
        model: what the result is for, with whole parameters; the meta device suffices. For TransformerEngine, a model
            of undivided with its options.
        qkv_weight_interleaved: of the layers that `state` is from, if they have fuse_qkv_params.

    Returns:
        A state dict for ``model.load_state_dict``; scales of FP8 (`_extra_state`) are left out.

    Raises:
        InputError: names or sizes are not those of the model, or the order of a fused weight is unknown.

    >>> import undivided
    >>> sizes = dict(hidden_size=64, ffn_hidden_size=128, num_attention_heads=4, attn_input_format="bshd")
    >>> fused = undivided.TransformerLayer(**sizes, fuse_qkv_params=True)
    >>> layer = undivided.TransformerLayer(**sizes)
    >>> layer.load_state_dict(from_transformer_engine(fused.state_dict(), layer, qkv_weight_interleaved=True))
    <All keys matched successfully>
    """
    entries = checked_state(state)
    if qkv_weight_interleaved is not None and not isinstance(qkv_weight_interleaved, bool):
        raise InputError("qkv_weight_interleaved", "be True, False or None", repr(qkv_weight_interleaved))
    if not isinstance(model, torch.nn.Module):
        raise InputError("model", "be a torch.nn.Module", type(model).__name__)
    result = _arrange_for(model, entries, qkv_weight_interleaved)
    check_result(result, model.state_dict(), "model", "build the model of the checkpoint, with its biases and norms")
    return result


def _arrange_for(
    model: torch.nn.Module, state: dict[str, Tensor], source_interleaved: bool | None
) -> dict[str, Tensor]:
    """A state dict with the queries, keys and values in one weight or a weight each, as the model has them.

    source_interleaved: whether one weight in the state is interleaved; None if that is unknown.
    """
    for projection in projections(model):
        layer = projection.layer
        state |= arrange(
            state,
            projection,
            source_interleaved=source_interleaved,
            fused=layer.fuse_qkv_params,
            interleaved=layer.qkv_weight_interleaved,
        )
    return state


def _separate(model: torch.nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state dict of the model with a weight each for queries, keys and values."""
    for projection in projections(model):
        source_interleaved = projection.layer.qkv_weight_interleaved
        state |= arrange(state, projection, source_interleaved=source_interleaved, fused=False, interleaved=False)
    return state


def _name_pairs(model: torch.nn.Module, layers: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(name in the model, names there) of every parameter that its layers may have, weights before biases."""
    for number, (name, layer) in enumerate(checked_layers(model).items()):
        prefix = f"{name}." if name else ""
        for here, there in pairs(layer.layernorm_mlp.activation.gated):
            yield f"{prefix}{here}", tuple(f"{layers}.{number}.{part}" for part in there)


def _is_bias_of_map(name: str) -> bool:
    """Whether a parameter is the bias of a linear map, without which the map has a bias of 0."""
    return name.endswith("bias") and not name.endswith(("layer_norm_bias", "_norm.bias"))


def _is_zero_bias(name: str, parts: Sequence[Tensor]) -> bool:
    """Whether a parameter is the bias of a linear map, and 0."""
    return _is_bias_of_map(name) and not any(part.any() for part in parts)


def _outer_state(entries: Mapping[str, Tensor], model: torch.nn.Module, names: Mapping[str, str]) -> dict[str, Tensor]:
    """The entries of a model outside of its layers; buffers are its own."""
    result = {name: value for name, value in model.state_dict().items() if name in dict(model.named_buffers())}
    for here, there in names.items():
        if there not in entries:
            raise InputError("names", f"name entries of state for {here!r}", repr(there))
        result[here] = entries[there]
    return result

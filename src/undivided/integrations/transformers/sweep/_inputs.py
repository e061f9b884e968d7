"""Candidate inputs for a model, from its signature; the first candidate that eager accepts is used."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

BATCH, LENGTH = 3, 11
CASES = ("none", "right", "left", "packed", "weights")
"""No padding, padding on a side, documents by restarting position ids, and the attention weights."""

Inputs = dict[str, Any]
Signature = Mapping[str, inspect.Parameter]


def real_tokens(case: str, length: int = LENGTH) -> Tensor | None:
    """Which tokens are real, int64 ``[BATCH, length]``: padding of 0, 4 and 1 tokens on a side; None without
    padding."""
    if case not in ("right", "left"):
        return None
    real = torch.ones(BATCH, length, dtype=torch.int64)
    for row, missing in enumerate((0, 4, 1)):
        if case == "left":
            real[row, :missing] = 0
        else:
            real[row, length - missing :] = 0
    return real


def candidates(network: nn.Module, case: str) -> Iterator[Inputs]:
    """The inputs to try in turn, the simplest first."""
    parameters = inspect.signature(network.forward).parameters
    more: Inputs = {"output_attentions": True} if case == "weights" else {}
    text = _text(network, parameters, case)
    if text:
        yield {**text, **more}
    for other in (*_sequences(network, parameters, case), *_images(network, parameters), *_sounds(network, parameters)):
        decoder = _decoder(network, parameters)
        if text:
            yield {**text, **other, **more}
        yield {**other, **decoder, **more}


def _text(network: Any, parameters: Signature, case: str) -> Inputs:
    if "input_ids" not in parameters:
        return {}
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 10, (BATCH, LENGTH), generator=generator)
    real = real_tokens(case)
    ids = _like_a_tokenizer(network.config, ids, real)
    inputs: Inputs = {"input_ids": ids, **_decoder(network, parameters)}
    if real is not None and "attention_mask" in parameters:
        inputs["attention_mask"] = real
    if case == "packed" and "position_ids" in parameters:
        documents = ((4, 7), (1, 10), (6, 5))
        inputs["position_ids"] = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in documents])
    if "use_cache" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        inputs["use_cache"] = False
    if "bbox" in parameters:
        corner = torch.randint(0, 20, (BATCH, LENGTH, 2), generator=generator)
        inputs["bbox"] = torch.cat((corner, corner + 5), -1)
    return inputs


def _like_a_tokenizer(config: Any, ids: Tensor, real: Tensor | None) -> Tensor:
    """The ids as a tokenizer returns them: padding ids in the padding, and an end of text, which CLIP looks for."""
    text = getattr(config, "text_config", config)
    pad, end = getattr(text, "pad_token_id", None), getattr(text, "eos_token_id", None)
    last = (torch.ones_like(ids) if real is None else real).cumsum(1).argmax(1)
    if isinstance(end, int) and 0 <= end < 99:
        ids[torch.arange(BATCH), last] = 98 if end == 2 else end  # with 2, CLIP looks for the largest id
    if real is not None and isinstance(pad, int) and 0 <= pad < 99 and pad != end:
        ids = ids.masked_fill(real == 0, pad)
    return ids


def _decoder(network: Any, parameters: Signature) -> Inputs:
    if "decoder_input_ids" not in parameters:
        return {}
    generator = torch.Generator().manual_seed(3)
    return {"decoder_input_ids": torch.randint(3, 10, (BATCH, 7), generator=generator), "use_cache": False}


def _sequences(network: Any, parameters: Signature, case: str) -> Iterator[Inputs]:
    """Hidden states, for inner models."""
    width = _field(network.config, 32, "hidden_size", "d_model")
    for name in ("inputs_embeds", "hidden_states"):
        if name in parameters and "grid_thw" not in parameters:
            inputs: Inputs = {name: _noise(BATCH, LENGTH, width)}
            real = real_tokens(case)
            if real is not None and "attention_mask" in parameters:
                inputs["attention_mask"] = real
            if "encoder_hidden_states" in parameters:
                inputs["encoder_hidden_states"] = _noise(BATCH, 6, width)
            yield inputs


def _images(network: Any, parameters: Signature) -> Iterator[Inputs]:
    config = network.config
    patch = _field(getattr(config, "vision_config", config), 8, "patch_size", "spatial_patch_size")
    channels = _field(getattr(config, "vision_config", config), 3, "in_channels", "in_chans", "num_channels")
    for grid in ("grid_thw", "image_grid_thw"):
        if grid in parameters:
            frames = _field(config, 1, "temporal_patch_size")
            name = next(name for name in parameters if name != grid)
            patches = _noise(2 * 16, channels * frames * patch * patch)
            yield {name: patches, grid: torch.tensor([[1, 4, 4]] * 2)}
    if "spatial_shapes" in parameters:
        shapes = torch.tensor([[4, 4], [4, 2], [3, 3]])
        real = torch.arange(16) < shapes.prod(1, keepdim=True)
        pixels = {"pixel_values": _noise(BATCH, 16, channels * patch * patch), "spatial_shapes": shapes}
        for name in ("pixel_attention_mask", "attention_mask"):
            yield {**pixels, name: real.long()}
    if "pixel_position_ids" in parameters:
        positions = torch.cartesian_prod(torch.arange(4), torch.arange(4)).expand(BATCH, -1, -1).clone()
        positions[1, 12:] = -1
        yield {"pixel_values": torch.rand(BATCH, 16, channels * patch * patch), "pixel_position_ids": positions}
    if "pixel_values" in parameters:
        for depth, size in dict.fromkeys(_image_sizes(config)):
            yield {"pixel_values": _noise(BATCH, depth, *size)}
            yield {"pixel_values": _noise(BATCH, 4, depth, *size)}
            yield {"pixel_values": _noise(BATCH, 2, depth, *size)}
    if "pixel_values_videos" in parameters:
        yield {"pixel_values_videos": _noise(BATCH, 4, 3, 32, 32)}


def _sounds(network: Any, parameters: Signature) -> Iterator[Inputs]:
    bins = _field(network.config, 16, "num_mel_bins", "input_feat_per_channel")
    for name in ("input_features", "input_values"):
        if name not in parameters:
            continue
        for width in dict.fromkeys((bins, 16, 32, 80, 128)):
            for shape in ((BATCH, width, 40), (BATCH, 40, width), (BATCH, width, 128), (BATCH, 1, 40, width)):
                inputs: Inputs = {name: _noise(*shape)}
                yield inputs
                if "input_features_mask" in parameters:
                    time = max(shape[1:], key=lambda size: size != width)
                    yield {**inputs, "input_features_mask": torch.ones(BATCH, time, dtype=torch.bool)}
        yield {name: _noise(BATCH, 3200)}
        yield {name: _noise(BATCH, 1, 3200)}
        yield {name: _noise(BATCH, LENGTH, _field(network.config, 32, "hidden_size"))}


def _noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def _field(config: Any, default: int, *names: str) -> int:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    return default


def _image_sizes(config: Any) -> Iterator[tuple[int, tuple[int, int]]]:
    """Channels and (height, width) of images, from a configuration and its sub-configurations."""
    inner = [getattr(config, name, None) for name in (*config.sub_configs, "vision_config", "backbone_config")]
    for one in (config, *(value for value in inner if value is not None)):
        channels, size = _field(one, 3, "num_channels"), getattr(one, "image_size", None)
        if isinstance(size, int):
            yield channels, (size, size)
        elif isinstance(size, list | tuple) and len(size) == 2:
            yield channels, (size[0], size[1])
    yield 3, (32, 32)
    yield 3, (64, 64)
    yield 1, (64, 64)

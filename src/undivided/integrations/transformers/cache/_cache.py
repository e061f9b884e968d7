"""`Cache`: a cache for models of Hugging Face Transformers, contiguous and optionally quantised."""

from __future__ import annotations

import functools
from typing import Any

from transformers import cache_utils

from undivided.arguments.checks import as_integer, checked_flag
from undivided.arguments.signature import checked_call
from undivided.cache._storage import Memory, check_quantize
from undivided.errors import InputError
from undivided.integrations.transformers.cache._layers import FullLayer, SlidingLayer


@checked_call
class Cache(cache_utils.DynamicCache):  # type: ignore[misc]
    """A stand-in for `transformers.DynamicCache` whose keys and values may be quantised.

    New tokens are written in place, so that a step does not copy the cached ones. With ``quantize``, they are stored as
    8-bit or 4-bit values and scales, and ``attn_implementation="undivided"`` reads them in place; every other
    implementation gets dequantised tensors. Beam search, ``crop``, assisted generation, ``batch_select_indices`` and
    ``copy.deepcopy`` work as with a `DynamicCache`. The heads of a token are adjacent in memory, so a model that calls
    ``.view`` on its cached keys (GPT-NeoX-Japanese) needs a `DynamicCache`.

    Args:
        config: the configuration of the model. Layers with a sliding window then keep the tokens of their window only.
            None: every layer keeps all tokens.
        quantize: "int8", "fp8_e4m3", "fp8_e5m2" or "int4" (head sizes that are multiples of 32); None stores the
            model's dtype.
        max_len: tokens per sequence to make room for at the start. The memory grows beyond it, by half, when it is
            full.
        offloading: must be False, as models pass it that build a cache of the class that they got (T5Gemma).

    Raises:
        InputError: the format is unknown, or the model has layers whose keys and values it cannot quantise. A model
            that requires gradients of its keys is refused when it runs: use ``torch.no_grad()``.

    Source: the interface of `transformers.DynamicCache`.

    >>> import inspect, torch, transformers
    >>> from undivided.integrations.transformers import Cache, register
    >>> register()
    >>> config = transformers.LlamaConfig(
    ...     vocab_size=50, hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
    ...     eos_token_id=None, pad_token_id=0, attn_implementation="undivided")
    >>> model = transformers.LlamaForCausalLM(config)
    >>> cache = Cache(quantize="int8", max_len=64)
    >>> name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"  # before 5.24
    >>> model.generate(torch.tensor([[3, 1, 4, 1, 5]]), max_new_tokens=8, **{name: cache}).shape
    torch.Size([1, 13])
    >>> print(cache.memory)
    19.4 KiB (values 17.2 KiB, scales 2.2 KiB; 0.56 x its size in bfloat16)
    """

    layers: Any
    layer_class_to_replicate: Any

    def __init__(
        self, config: Any = None, *, quantize: str | None = None, max_len: int | None = None, offloading: bool = False
    ) -> None:
        check_quantize(quantize)
        if checked_flag("offloading", offloading):
            raise InputError("offloading", "be False", offloading, hint="DynamicCache(config, offloading=True)")
        room = 0 if max_len is None else as_integer("max_len", max_len, 1)
        if config is not None and not hasattr(config, "get_text_config"):
            raise InputError("config", "be the configuration of a model, or None", type(config).__name__)
        super().__init__(config=config)
        self.quantize = quantize
        if self.layer_class_to_replicate is not None:
            self.layer_class_to_replicate = functools.partial(FullLayer, quantize, room)
        self.layers = [_replacement_layer(layer, quantize, room) for layer in self.layers]

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last tokens of every layer, or of none if one refuses.

        Args:
            tokens_to_remove: at most 0; ``-tokens_to_remove`` tokens are dropped.

        Raises:
            InputError: tokens_to_remove is above 0, or a layer with a window has lost the tokens before them.
        """
        for layer in self.layers:
            if isinstance(layer, SlidingLayer):
                layer.check_crop()
        super().crop(tokens_to_remove)

    @property
    def memory(self) -> Memory:
        """The bytes of keys, values and scales of all layers, and those of the same cache in bfloat16."""
        storages = [getattr(layer, "storage", None) for layer in self.layers]
        sizes = [storage.memory for storage in storages if storage is not None]
        return Memory(*(sum(each) for each in zip((0, 0, 0), *sizes, strict=True)))

    def __repr__(self) -> str:
        tokens = max((layer.get_seq_length() for layer in self.layers if hasattr(layer, "get_seq_length")), default=0)
        return f"Cache(quantize={self.quantize!r}, layers={len(self.layers)}, {tokens=}, memory={self.memory})"


def _replacement_layer(layer: Any, quantize: str | None, max_len: int) -> Any:
    """The layer that replaces one of transformers; layers that store something else stay, if nothing is quantised."""
    if type(layer) is cache_utils.DynamicLayer:
        return FullLayer(quantize, max_len)
    if type(layer) is cache_utils.DynamicSlidingWindowLayer:
        return SlidingLayer(layer.sliding_window, quantize, max_len)
    if quantize is not None and isinstance(layer, cache_utils.CacheLayerMixin):
        must = "be None for a model with such layers; only full and sliding-window attention can be quantised"
        raise InputError("quantize", must, f"{quantize!r} with {type(layer).__name__}", hint="Cache(config=config)")
    return layer

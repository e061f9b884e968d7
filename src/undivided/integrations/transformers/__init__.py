"""Hugging Face Transformers on Undivided: ``register()``, then ``attn_implementation="undivided"``.

A model calls two functions by that name: one for the mask, once per kind of layer and forward pass, and one for the
attention, in every layer. Ours passes a `Mask` from the first to the second, so that causal masks, windows, chunks,
padding, packed documents and cached lengths keep their structure, and no S x S tensor is created.

The mask, in the order of its construction:

    _patterns.py     the pattern of a mask function of transformers, read from its closure
    _masks.py        `model_mask`, the registered function: the pattern as a `Mask`, for the sizes and offsets of a call
    _model_mask.py   `ModelMask`: the `Mask` in place of a tensor; it becomes dense if a model computes with it

The attention:

    _attention.py            `attention`, the registered function
    _arguments.py            its arguments, and their checks
    _positions.py            a warning of positions whose documents the mask does not have
    _repeated.py             layers that share a mask run what the first of them prepared
    _latent.py               latent attention (MLA) over the latents themselves
    _weights.py              the output with attention weights
    _continuous_batching.py  the same over the paged cache of continuous batching

The rest:

    cache/           `Cache`, which stores keys and values in place, quantised on request
    parallel/        `parallelize`, which spreads a model and its sequences over ranks
    _active.py       what `parallelize` tells the masks and the attention
    _tensor_like.py  the base of what stands in place of a tensor: `ModelMask`, and quantised keys and values
    _names.py        names that differ between versions of transformers
    speed.py, sweep/  programs: the time of a whole model, and the results of all models of transformers
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

from undivided.arguments.signature import checked_call
from undivided.errors import InputError
from undivided.integrations.transformers import _continuous_batching
from undivided.integrations.transformers._attention import attention
from undivided.integrations.transformers._latent import use_latents
from undivided.integrations.transformers._masks import model_mask
from undivided.integrations.transformers._model_mask import ModelMask
from undivided.integrations.transformers._patterns import learn
from undivided.integrations.transformers.parallel import parallelize, shard_batch

if TYPE_CHECKING:
    from undivided.integrations.transformers.cache._cache import Cache

__all__ = ["Cache", "ModelMask", "attention", "model_mask", "parallelize", "register", "shard_batch", "use_latents"]

NAME = "undivided"
MISSING = "undivided.integrations.transformers needs the transformers library: pip install 'undivided[transformers]'"


@checked_call
def register() -> None:
    """Register ``attn_implementation="undivided"`` with Hugging Face Transformers. Repeated calls change nothing.

    All models whose attention uses the interface of that library can then be built or loaded with this name;
    ``model.set_attn_implementation("undivided")`` switches an existing model.

    Raises:
        ImportError: transformers is not installed.
        InputError: transformers is too old (tested with 5.23 and 5.24).

    Source: "Attention interface" in the documentation of Hugging Face Transformers.

    >>> import torch, transformers, undivided.integrations.transformers
    >>> undivided.integrations.transformers.register()
    >>> config = transformers.LlamaConfig(
    ...     vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    ...     num_key_value_heads=2, attn_implementation="undivided")
    >>> model = transformers.LlamaForCausalLM(config)
    >>> model(torch.tensor([[3, 1, 4, 1, 5]])).logits.shape
    torch.Size([1, 5, 50])
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface, __version__, masking_utils
    except ImportError as error:
        raise ImportError(MISSING) from error
    parameters = set(inspect.signature(masking_utils.sdpa_mask).parameters)
    if not {"q_length", "q_offset", "kv_length", "kv_offset", "mask_function"} <= parameters:
        raise InputError(
            "transformers",
            "build masks from lengths and offsets (version 5)",
            __version__,
            hint="pip install -U transformers",
        )
    learn(masking_utils)
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, _mask_of_model)
    _continuous_batching.accept(NAME)


@torch.compiler.disable(reason="masks are read from closures")  # type: ignore[untyped-decorator]
def _uncompiled_mask(*arguments: Any, **options: Any) -> ModelMask:
    """`model_mask`, outside of a graph, with its `Mask`: its layers are in graphs, which cannot build one."""
    mask = model_mask(*arguments, **options)
    assert mask.mask is not None
    return mask


def _mask_of_model(*arguments: Any, **options: Any) -> ModelMask:
    """`model_mask`; a compiler leaves its graph once for each kind of mask, because it cannot read closures."""
    make = _uncompiled_mask if torch.compiler.is_compiling() else model_mask
    found: ModelMask = make(*arguments, **options)
    return found


if not TYPE_CHECKING:  # or type checkers would accept every name

    def __getattr__(name: str) -> object:
        """`Cache`, which is imported at first use because its base class is part of transformers."""
        if name != "Cache":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            from undivided.integrations.transformers.cache._cache import Cache
        except ImportError as error:
            raise ImportError(MISSING) from error
        globals()[name] = Cache
        return Cache

"""Hugging Face Transformers on Undivided: ``register()``, then ``attn_implementation="undivided"``.

A model asks two functions by that name: one for a mask, once for each kind of layer and forward pass, and one for the
attention, in every layer. Ours hands a `Mask` from the first to the second, so that causal masks, windows, chunks,
padding, packed documents and cached lengths stay what they are, and no S x S tensor is made.

    _patterns.py    what a mask function of transformers says, read from its closure
    _masks.py       that, for the sizes and offsets of a call, as a Mask
    _model_mask.py  the Mask in the place of a tensor; dense as soon as a model computes with it
    _attention.py   the attention of a layer
"""

from __future__ import annotations

import inspect

import torch

from undivided.errors import InputError
from undivided.integrations.transformers._attention import attention
from undivided.integrations.transformers._masks import model_mask
from undivided.integrations.transformers._model_mask import ModelMask
from undivided.integrations.transformers._patterns import learn

__all__ = ["ModelMask", "attention", "model_mask", "register"]

NAME = "undivided"


def register() -> None:
    """Make ``attn_implementation="undivided"`` known to Hugging Face Transformers. Calling it again changes nothing.

    Every model whose attention goes through the library's interface can then be built, loaded or switched with that
    name; ``model.set_attn_implementation("undivided")`` switches one that is there.

    Raises:
        ImportError: transformers is not installed.
        InputError: it is older than the interface that is used here (5.23 is what this was tested with).

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
        raise ImportError(
            "undivided.integrations.transformers needs the transformers library: pip install 'undivided[transformers]'"
        ) from error
    asked = set(inspect.signature(masking_utils.sdpa_mask).parameters)
    if not {"q_length", "q_offset", "kv_length", "kv_offset", "mask_function"} <= asked:
        raise InputError(
            "transformers",
            "build masks from lengths and offsets (version 5)",
            __version__,
            hint="pip install -U transformers",
        )
    learn(masking_utils)
    AttentionInterface.register(NAME, attention)
    # a compiler cannot look into closures: it leaves its graph once for each kind of mask, and finds a Mask when it
    # comes back
    made_outside = torch.compiler.disable(model_mask, reason="masks are read from closures")
    AttentionMaskInterface.register(NAME, made_outside)

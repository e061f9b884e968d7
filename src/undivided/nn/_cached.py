"""Attention over the cache of `InferenceParams`: the mask, and the checks of other arguments.

New tokens are the last ones of their sequences, so causal masks and windows are aligned bottom-right, as in
TransformerEngine, and the mask type of the training works unchanged. The lengths come from the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from undivided.arguments.tensors import readable
from undivided.cache import InferenceParams
from undivided.errors import InputError
from undivided.masks import Mask
from undivided.nn.arguments import sequences
from undivided.nn.arguments.formats import Inputs
from undivided.nn.arguments.mask_types import MaskType, Window, band
from undivided.nn.arguments.sequences import SequenceArguments


def checked_params(params: object) -> InferenceParams | None:
    """The cache or None; InputError for another type."""
    if params is not None and not isinstance(params, InferenceParams):
        raise InputError("inference_params", "be an undivided.InferenceParams", type(params).__name__)
    return params


def with_cached_keys(inputs: Inputs, params: InferenceParams) -> Inputs:
    """The inputs with the number of keys of the longest cached sequence."""
    return inputs._replace(cached=max(params.sequences.values(), default=0))


def mask(
    arguments: SequenceArguments,
    kind: MaskType,
    inputs: Inputs,
    window: Window | None,
    bottom_right: bool | None,
    params: InferenceParams,
) -> Mask:
    """The mask of the new tokens and the cached keys."""
    _check_offsets(arguments, inputs, params)
    if kind.bottom_right is None and bottom_right is False:
        hint = "new tokens are the last of their sequences"
        raise InputError("bottom_right_diagonal", "not be False with inference_params", False, hint=hint)
    diagonal = band(kind._replace(bottom_right=True), window, None)
    if kind.name == "arbitrary":
        return diagonal & sequences.arbitrary_mask(arguments.attention_mask, inputs)
    if arguments.attention_mask is not None:
        hint = "inference_params.pre_step sets the number of real tokens; for other masks, attn_mask_type='arbitrary'"
        raise InputError("attention_mask", "be None with inference_params", "a tensor", hint=hint)
    return diagonal


def _check_offsets(arguments: SequenceArguments, inputs: Inputs, params: InferenceParams) -> None:
    """Raise InputError for offsets that differ from the lengths of the cache."""
    for name, offsets in arguments.offsets.items():
        sequences.check_offsets(name, offsets)
        known = [params.cu_seqlens_q] if "_q" in name else [params.cu_seqlens_q, params.cu_seqlens_kv]
        if readable(offsets) and not any(_same_offsets(offsets, step_offsets) for step_offsets in known):
            raise InputError(
                name,
                "be those of inference_params, or None",
                offsets.tolist()[:8],
                hint=f"pre_step received {params.cu_seqlens_q.diff().tolist()[: params.batch_size]} new tokens",
            )


def _same_offsets(offsets: Tensor, step_offsets: Tensor) -> bool:
    """Whether offsets agree; a batch that is not full repeats its last offset."""
    a, b = offsets.long(), step_offsets.cpu().long()
    longest = max(a.shape[0], b.shape[0])
    a, b = (torch.cat((t, t[-1:].expand(longest - t.shape[0]))) for t in (a, b))
    return torch.equal(a, b)

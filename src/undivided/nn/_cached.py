"""Attention to what `InferenceParams` keeps: what may be given beside it, and the mask.

New tokens are the last ones of their sequences, so that causal and windows are aligned bottom-right, as
TransformerEngine has it; a mask type for training serves here as it is. The lengths are the cache's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from undivided.cache import InferenceParams
from undivided.errors import InputError
from undivided.masks import Mask
from undivided.nn.arguments import sequences
from undivided.nn.arguments.formats import Inputs
from undivided.nn.arguments.mask_types import MaskType, Window, band
from undivided.nn.arguments.sequences import Given, is_readable


def checked(params: object) -> InferenceParams | None:
    """The cache, or None."""
    if params is not None and not isinstance(params, InferenceParams):
        raise InputError("inference_params", "be an undivided.InferenceParams", type(params).__name__)
    return params


def with_cached_keys(inputs: Inputs, params: InferenceParams) -> Inputs:
    """Inputs that count the cached keys as well: those of the longest sequence."""
    return inputs._replace(cached=max(params.sequences.values(), default=0))


def mask(
    given: Given,
    kind: MaskType,
    inputs: Inputs,
    window: Window | None,
    bottom_right: bool | None,
    params: InferenceParams,
) -> Mask:
    """Which of the cached keys a new token sees."""
    _check_offsets(given, inputs, params)
    if kind.bottom_right is None and bottom_right is False:
        hint = "new tokens are the last of their sequences"
        raise InputError("bottom_right_diagonal", "not be False with inference_params", False, hint=hint)
    diagonal = band(kind._replace(bottom_right=True), window, None)
    if kind.name == "arbitrary":
        return diagonal & sequences.arbitrary(given.attention_mask, inputs)
    if given.attention_mask is not None:
        hint = "inference_params.pre_step says how many tokens are real; or attn_mask_type='arbitrary'"
        raise InputError("attention_mask", "be None with inference_params", "a tensor", hint=hint)
    return diagonal


def _check_offsets(given: Given, inputs: Inputs, params: InferenceParams) -> None:
    """The cache knows all lengths. Offsets that say the same are welcome, others are an error."""
    for name, offsets in given.offsets.items():
        sequences.check_offsets(name, offsets)
        known = [params.cu_seqlens_q] if "_q" in name else [params.cu_seqlens_q, params.cu_seqlens_kv]
        if is_readable(offsets) and not any(_agree(offsets, of_step) for of_step in known):
            raise InputError(
                name,
                "be those of inference_params, or None",
                offsets.tolist()[:8],
                hint=f"pre_step was told of "
                f"{list(params.cu_seqlens_q.diff().tolist()[: params.batch_size])} new tokens",
            )


def _agree(offsets: Tensor, of_step: Tensor) -> bool:
    """Both go on with their last value where the batch is not full."""
    a, b = offsets.long(), of_step.cpu().long()
    longest = max(a.shape[0], b.shape[0])
    a, b = (torch.cat((t, t[-1:].expand(longest - t.shape[0]))) for t in (a, b))
    return torch.equal(a, b)

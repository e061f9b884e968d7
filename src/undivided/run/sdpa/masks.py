"""The attn_mask of `scaled_dot_product_attention` as a mask or a bias.

Legend: leading axes [...], H heads, L queries, S keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from undivided import masks
from undivided._bounded import Bounded
from undivided.arguments.checks import check_device, check_tensor
from undivided.arguments.layout import Layout
from undivided.arguments.shapes import broadcast_hint, broadcasts
from undivided.arguments.tensors import dtype_name, is_autocast, is_dtensor, readable, snapshot
from undivided.errors import InputError
from undivided.masks import Mask
from undivided.masks._kept import TensorMasks
from undivided.run.replay import PreparedCall, RecordedCall
from undivided.selection import switches as _sdp_switches

CAUSAL = masks.causal("top_left")


KeptCalls = Bounded[object, tuple[PreparedCall | RecordedCall, Layout]]


class MaskOrBias(NamedTuple):
    """attn_mask and is_causal as arguments of `undivided.attention`; a tensor as a view with four axes, each of full
    size or 1.

    mask: causal, or a boolean attn_mask as `masks.dense`, or both combined.
    bias: any other attn_mask.
    calls: where calls with a mask of attn_mask are kept, as long as that tensor lives unchanged.
    """

    mask: Mask | None
    bias: Tensor | None = None
    calls: KeptCalls | None = None


def mask_or_bias(attn_mask: Tensor, query: Tensor, shape: Sequence[int], kv_len: int, is_causal: bool) -> MaskOrBias:
    """The attn_mask of a call, checked.

    Args:
        attn_mask, query, is_causal: of the call.
        shape: of its result.
        kv_len: number of keys.
    """
    if not isinstance(attn_mask, Tensor):
        raise InputError("attn_mask", "be a torch.Tensor or None", type(attn_mask).__name__)
    if type(attn_mask).__name__ == "CausalBias":
        if is_causal:
            raise InputError(
                "attn_mask", "not be combined with is_causal=True, because it is a causal mask itself", "both"
            )
        return MaskOrBias(_causal_bias(attn_mask, query.shape[-2], kv_len))
    scores = (*shape[:-1], kv_len)
    _check_tensor_mask(attn_mask, query, scores, is_causal)
    folded = _folded_mask(attn_mask, scores[:-3])
    causal = CAUSAL if is_causal else None
    if attn_mask.dtype != torch.bool:
        return MaskOrBias(causal, _as_bias(folded, query))
    # torch.func sees plain operations only, and masks are of plain tensors
    if is_dtensor(attn_mask) or torch._C._functorch.peek_interpreter_stack() is not None:
        return MaskOrBias(causal, torch.zeros_like(folded, dtype=query.dtype).masked_fill(~folded, -torch.inf))

    def build() -> MaskOrBias:
        # the backward has the values of this call, as PyTorch's, whatever is written to attn_mask in the meantime
        tensor = snapshot(folded) if readable(folded) else folded.detach()
        return MaskOrBias(masks.dense(tensor) & CAUSAL if is_causal else masks.dense(tensor), None, Bounded(16))

    if max(len(scores), attn_mask.dim()) > 4:  # perhaps a copy, which does not change with it
        return build()
    return _recent.get(is_causal, (attn_mask,), build)


def kept_calls(attn_mask: Tensor, is_causal: bool) -> KeptCalls | None:
    """The calls with a boolean attn_mask, or None if there was none since it was last changed."""
    found = _recent.find(is_causal, (attn_mask,))
    return None if found is None else found.calls


_recent: TensorMasks[MaskOrBias] = TensorMasks(16)
"""Masks that other layers pass too."""


def _check_tensor_mask(mask: Tensor, query: Tensor, scores: Sequence[int], is_causal: bool) -> None:
    """InputError unless the mask fits scores of this shape, or if PyTorch's switches leave no kernel for it."""
    if not is_dtensor(mask):
        check_tensor("attn_mask", mask)
    check_device("attn_mask", mask, query.device, "query")
    if not broadcasts(mask.shape, scores):
        hint = broadcast_hint(mask.shape, scores, "attn_mask{}") if len(scores) == 4 else None
        must = f"broadcast to [..., queries, keys] = {list(scores)}"
        raise InputError("attn_mask", must, list(mask.shape), hint)
    if is_causal and "f" in _sdp_switches.read().partition(":")[0]:
        raise InputError(
            "attn_mask",
            "be None if is_causal=True and flash kernels are switched off",
            "both",
            hint="allow SDPBackend.FLASH_ATTENTION as well, or include the causal part in attn_mask",
        )


def _folded_mask(mask: Tensor, batch: Sequence[int]) -> Tensor:
    """[B|1, H|1, L|1, S|1]: several leading axes are merged, as a view unless only some of them are broadcast."""
    rank = max(len(batch), 1) + 3
    if mask.dim() < rank:
        mask = mask[(None,) * (rank - mask.dim())]
    if rank == 4:
        return mask
    leading = mask.shape[:-3]
    if all(size == 1 for size in leading):
        return mask.flatten(0, -4)
    return mask.expand(*batch, *mask.shape[-3:]).flatten(0, -4)


def _as_bias(mask: Tensor, query: Tensor) -> Tensor:
    """A mask that is added, in a dtype that PyTorch accepts; under autocast it is cast like query."""
    if is_autocast(query.device) and mask.is_floating_point() and mask.dtype != torch.float64:
        mask = mask.to(query.dtype)
    if mask.dtype not in (torch.float32, query.dtype):
        dtypes = dict.fromkeys(("bool", "float32", dtype_name(query.dtype)))
        hint = "attn_mask.bool(), if its ones mean attend" if not mask.is_floating_point() else None
        raise InputError("attn_mask", f"be {' or '.join(dtypes)}", str(mask.dtype), hint=hint)
    return mask


def _causal_bias(bias: Any, q_len: int, kv_len: int) -> Mask:
    """``torch.nn.attention.bias.causal_upper_left`` or ``causal_lower_right`` as a mask with structure, never dense."""
    if (bias.seq_len_q, bias.seq_len_kv) != (q_len, kv_len):
        got = f"a causal bias for {bias.seq_len_q} queries and {bias.seq_len_kv} keys"
        raise InputError("attn_mask", f"be for {q_len} queries and {kv_len} keys", got)
    return masks.causal("top_left" if bias.variant.name == "UPPER_LEFT" else "bottom_right")

"""Additions to the scores: a bias, or ALiBi with TransformerEngine's slopes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from undivided.arguments.checks import check_tensor, checked_choice
from undivided.arguments.shapes import broadcast_hint, broadcasts
from undivided.errors import InputError
from undivided.nn.arguments.formats import QKV
from undivided.request.slopes import usual_slopes

BIAS_TYPES = ("no_bias", "pre_scale_bias", "post_scale_bias", "alibi")


class ScoreTerms(NamedTuple):
    """`bias` and `alibi_slopes` of `undivided.attention`."""

    bias: Tensor | None
    alibi_slopes: Tensor | None


def score_terms(
    bias_type: object, bias: Tensor | None, slopes: Tensor | None, inputs: QKV, scale: float, softcap: float | None
) -> ScoreTerms:
    """The terms for a bias type: post_scale_bias unchanged, pre_scale_bias times the scale, alibi as slopes."""
    kind = checked_choice("core_attention_bias_type", bias_type, BIAS_TYPES)
    must = f"be None with core_attention_bias_type={kind!r}"
    if slopes is not None and kind != "alibi":
        raise InputError("alibi_slopes", must, "a tensor", hint="set core_attention_bias_type='alibi' to use them")
    if bias is not None and kind in ("no_bias", "alibi"):
        hint = "core_attention_bias_type='post_scale_bias' adds it to the scaled scores" if kind == "no_bias" else None
        raise InputError("core_attention_bias", must, "a tensor", hint=hint)
    if kind == "no_bias":
        return ScoreTerms(None, None)
    if kind == "alibi":
        return ScoreTerms(None, _slopes(slopes, inputs))
    bias = _checked_bias(bias, kind, inputs)
    if kind == "post_scale_bias":
        return ScoreTerms(bias, None)
    if softcap is not None:
        hint = "post_scale_bias is added after softcap"
        raise InputError("core_attention_bias_type", "not be 'pre_scale_bias' with softcap", repr(kind), hint=hint)
    wide = torch.promote_types(bias.dtype, torch.float32)  # in half precision the product would be rounded
    return ScoreTerms(bias.to(wide) * scale, None)


def _checked_bias(bias: object, kind: str, inputs: QKV) -> Tensor:
    sizes = (inputs.batch(), inputs.q.shape[-2], inputs.q_len(), inputs.kv_len())
    if not isinstance(bias, Tensor):
        must = f"be given with core_attention_bias_type={kind!r}"
        raise InputError("core_attention_bias", must, None if bias is None else type(bias).__name__)
    check_tensor("core_attention_bias", bias)
    if not bias.is_floating_point():
        hint = "pass a boolean mask as attention_mask (True = masked out)" if bias.dtype == torch.bool else None
        raise InputError("core_attention_bias", "be a floating-point tensor", bias.dtype, hint=hint)
    if bias.dim() != 4 or not broadcasts(bias.shape, sizes):
        hint = inputs.other_format_hint(bias.shape[0]) if bias.dim() == 4 else "bias[None], if bias is [h, sq, skv]"
        if inputs.packed() and inputs.cached is None and bias.dim() == 4:
            hint = "in thd a bias is over the packed tokens: bias[:, :, at[:, None], at] by positions in a sequence"
        hint = hint or broadcast_hint(bias.shape, sizes, "core_attention_bias{}")
        must = f"be broadcastable to [b, h, sq, skv] = {list(sizes)}"
        raise InputError("core_attention_bias", must, list(bias.shape), hint)
    return bias


def _slopes(slopes: object, inputs: QKV) -> Tensor:
    if slopes is None:
        return usual_slopes(inputs.q.shape[-2], inputs.q.device)
    if not isinstance(slopes, Tensor) or slopes.dtype != torch.float32:
        got = slopes.dtype if isinstance(slopes, Tensor) else type(slopes).__name__
        hint = "alibi_slopes.float()" if isinstance(slopes, Tensor) else None
        raise InputError("alibi_slopes", "be a float32 tensor [h] or [b, h]", got, hint)
    return slopes

"""Hints for keywords of other libraries, misspelt keywords, and values of a wrong kind."""

from __future__ import annotations

from collections.abc import Iterable

from undivided import masks
from undivided.errors import nearest_name

_CAUSAL = 'mask=masks.causal(); with "top_left" (PyTorch) or "bottom_right" (flash-attn) if the lengths differ'
_DENSE = "mask=masks.dense(tensor) for booleans (True = attend), bias=tensor for numbers that are added to the scores"
_PACKED = 'layout="thd" and mask=masks.documents(cu_seqlens_q, cu_seqlens_k)'
_WINDOW = "mask=masks.window(left, right)"

_KEYWORD_HINTS = {
    "query": "q=",
    "key": "k=",
    "value": "v=",
    "query_layer": "q=",
    "key_layer": "k=",
    "value_layer": "v=",
    "is_causal": _CAUSAL,
    "causal": _CAUSAL,
    "attn_mask": _DENSE,
    "attention_mask": _DENSE,
    "key_padding_mask": "mask=masks.lengths(lengths)",
    "seqlens_k": "mask=masks.lengths(lengths)",
    "cu_seqlens": _PACKED,
    "cu_seqlens_q": _PACKED,
    "cu_seqlens_k": _PACKED,
    "cu_seqlens_kv": _PACKED,
    "max_seqlen_q": _PACKED,
    "max_seqlen_k": _PACKED,
    "max_seqlen_kv": _PACKED,
    "window_size": _WINDOW,
    "sliding_window": _WINDOW,
    "softmax_scale": "scale=",
    "sm_scale": "scale=",
    "scaling": "scale=",
    "dropout": "dropout_p=",
    "p": "dropout_p=",
    "attention_dropout": "dropout_p=",
    "training": "dropout_p=p if self.training else 0.0",
    "enable_gqa": "leave it out: fewer key heads than query heads need no flag",
    "logit_cap": "softcap=",
    "logits_soft_cap": "softcap=",
    "need_weights": "no backend returns weights; v = identity gives them: docs/troubleshooting.md#hf-output-attentions",
    "return_attn_probs": "return_lse=True gives the log-sum-exp; no backend computes the probabilities",
    "return_softmax_lse": "return_lse=True",
    "attn_bias": "bias=tensor for numbers that are added to the scores, mask= for a structured mask",
    "score_mod": "bias=, alibi_slopes= or softcap=",
    "mask_mod": "mask=masks.predicate(mask_mod)",
    "block_mask": "mask=masks.predicate(block_mask.mask_mod)",
    "s_aux": "sinks=",
    "softmax_offset": "sinks=",
    "q_descale": "leave it out: queries are not quantised",
    "k_descale": "k_scale=, fp32, one per token and head",
    "v_descale": "v_scale=, fp32, one per token and head",
    "block_table": "pages=",
    "block_tables": "pages=",
    "qkv_format": "layout=",
    "qkv_layout": "layout=",
    "tensor_format": "layout=",
    "input_layout": "layout=",
}
"""Hints for keywords of PyTorch's SDPA and FlexAttention, flash-attn, TransformerEngine, xFormers and Hugging Face."""


def keyword_hint(unknown: Iterable[str], known: Iterable[str]) -> str | None:
    """A hint for the first of these keywords; None if it is not similar to any known one.

    >>> keyword_hint(["softmax_scale"], ["scale"]), keyword_hint(["softcapp"], ["scale", "softcap"])
    ('scale=', 'softcap=')
    """
    near = nearest_name(min(unknown, default=""), [*known, *_KEYWORD_HINTS])
    return None if near is None else _KEYWORD_HINTS.get(near, f"{near}=")


def tensor_hint(argument: str, value: object) -> str | None:
    """A hint for a number or flag in place of a tensor; None if there is none."""
    if argument == "sinks" and isinstance(value, int) and not isinstance(value, bool):
        keys = f"mask=masks.window(left, 0) | masks.sinks({value})"
        return f"{keys} keeps the first {value} keys in a window; sinks= is one logit per head"
    if argument == "alibi_slopes" and isinstance(value, bool):
        return "undivided.alibi_slopes(heads) are the usual slopes" if value else "None, for no slopes"
    return None


def mask_hint(mask: object) -> str | None:
    """A hint for a wrong mask argument; None if there is none."""
    name = mask if isinstance(mask, str) else getattr(mask, "__name__", "")
    if name in _constructors() and (isinstance(mask, str) or getattr(masks, name) is mask):
        call = f"mask=masks.{name}({'' if name == 'causal' else '...'})"
        return f"a mask is built by a call: {call}" if isinstance(mask, str) else f"add the parentheses: {call}"
    if isinstance(mask, str):
        return "a mask is built by a call, such as mask=masks.causal() or mask=masks.window(256, 0)"
    if callable(mask) and not isinstance(mask, type):
        return "masks.predicate(fn), for fn(b, h, q_idx, kv_idx)"
    return "mask=masks.causal(), or None for every pair" if isinstance(mask, bool) else None


def _constructors() -> frozenset[str]:
    return frozenset(name for name in masks.__all__ if name.islower() and name != "describe")

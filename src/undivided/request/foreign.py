"""Hints for keywords of other libraries, misspelt keywords, and values of a wrong kind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from undivided import masks
from undivided.errors import nearest_name

_CAUSAL = 'mask=masks.causal(); with "top_left" (PyTorch) or "bottom_right" (flash-attn) if the lengths differ'
_DENSE = "mask=masks.dense(tensor) for booleans (True = attend), bias=tensor for numbers that are added to the scores"
_PACKED = 'layout="thd" and mask=masks.documents(cu_seqlens_q, cu_seqlens_k)'
_WINDOW = "mask=masks.window(left, right)"
_CACHED = 'mask=masks.lengths(cache_seqlens) & masks.causal("bottom_right"); KVCache and PagedKVCache count for you'
_LENGTHS = "mask=masks.lengths(lengths)"
_SINKS = "sinks="
_SPLITS = "leave it out: kernels choose how to split work"

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
    "key_padding_mask": _LENGTHS,
    "head_mask": "leave it out: not supported; multiply the output of a head instead",
    "seqlens_k": _LENGTHS,
    "seqused_k": _LENGTHS,
    "kv_lens": _LENGTHS,
    "seqused_q": "mask=masks.lengths(kv, q), or masks.documents(cu_seqlens_q, cu_seqlens_k, padded_q=, padded_kv=)",
    "cache_seqlens": _CACHED,
    "cache_leftpad": "mask=masks.lengths(cache_seqlens - leftpad, kv_start=leftpad)",
    "cache_batch_idx": "leave it out: index the keys, k[cache_batch_idx]; InferenceParams takes any of its sequences",
    "cu_seqlens": _PACKED,
    "cu_seqlens_q": _PACKED,
    "cu_seqlens_k": _PACKED,
    "cu_seqlens_kv": _PACKED,
    "max_seqlen_q": _PACKED,
    "max_seqlen_k": _PACKED,
    "max_seqlen_kv": _PACKED,
    "window_size": _WINDOW,
    "window": _WINDOW,
    "sliding_window": _WINDOW,
    "attention_chunk": "mask=masks.chunks(size)",
    "gather_kv_indices": "mask=masks.blocks(1, 1, indices)",
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
    "softmax_lse": "return_lse=True",
    "attn_bias": "bias=tensor for numbers that are added to the scores, mask= for a structured mask",
    "score_mod": "bias=, alibi_slopes= or softcap=",
    "mask_mod": "mask=masks.predicate(mask_mod)",
    "block_mask": "mask=masks.predicate(block_mask.mask_mod)",
    "s_aux": _SINKS,
    "softmax_offset": _SINKS,
    "softmax_type": _SINKS,
    "learnable_sink": _SINKS,
    "alibi": "alibi_slopes=undivided.alibi_slopes(heads)",
    "seed": "dropout_seed=",
    "op": "backend=",
    "num_splits": _SPLITS,
    "pack_gqa": _SPLITS,
    "output_dtype": "leave it out: the output has the dtype of q",
    "qv": "leave it out: torch.cat((q, qv), -1) and torch.cat((k, v), -1) are q and k",
    "rotary_cos": "leave it out: undivided.apply_rotary_pos_emb before the call",
    "rotary_sin": "leave it out: undivided.apply_rotary_pos_emb before the call",
    "rotary_interleaved": "leave it out: undivided.apply_rotary_pos_emb(interleaved=) before the call",
    "q_descale": "leave it out: queries are not quantised",
    "k_descale": "k_scale=, fp32, one per token and head",
    "v_descale": "v_scale=, fp32, one per token and head",
    "block_table": "pages=",
    "block_tables": "pages=",
    "page_table": "pages=",
    "qkv_format": "layout=",
    "qkv_layout": "layout=",
    "tensor_format": "layout=",
    "input_layout": "layout=",
}
"""Hints for keywords of PyTorch's SDPA and FlexAttention, flash-attn, TransformerEngine, xFormers and Hugging Face."""

_OWN_LENGTHS = "leave it out: the cache counts its tokens, cache.lengths"
_OWN_QUERIES = "leave it out: append(lengths=) or pre_step received the new tokens of each sequence"
_OWN_PAGES = "leave it out: the cache keeps its block table"
_OWN_CAUSAL = "leave it out: a cache is causal by default; mask=masks.window(None, None) shows every key"
_OWN_DROPOUT = "leave it out: attention over a cache has no dropout"

CACHE_HINTS = {
    **_KEYWORD_HINTS,
    **dict.fromkeys(("causal", "is_causal"), _OWN_CAUSAL),
    **dict.fromkeys(("cache_seqlens", "seqused_k", "seqlens_k", "kv_lens", "key_padding_mask"), _OWN_LENGTHS),
    **dict.fromkeys(("seqused_q", "cu_seqlens", "cu_seqlens_q", "max_seqlen_q"), _OWN_QUERIES),
    **dict.fromkeys(("cu_seqlens_k", "cu_seqlens_kv", "max_seqlen_k", "max_seqlen_kv"), _OWN_LENGTHS),
    **dict.fromkeys(("block_table", "block_tables", "page_table", "pages"), _OWN_PAGES),
    **dict.fromkeys(
        ("dropout", "p", "attention_dropout", "training", "dropout_p", "dropout_seed", "seed"), _OWN_DROPOUT
    ),
    "cache_leftpad": "leave it out: a sequence begins at its first token",
    "k_descale": "leave it out: the cache keeps its scales",
    "v_descale": "leave it out: the cache keeps its scales",
}
"""The same for `attend` of the caches."""


def keyword_hint(unknown: Iterable[str], known: Iterable[str], hints: Mapping[str, str] = _KEYWORD_HINTS) -> str | None:
    """A hint for the first of these keywords; None if it is not similar to any known one.

    Args:
        unknown: the keywords.
        known: the arguments of the function.
        hints: by keywords of other libraries.

    >>> keyword_hint(["softmax_scale"], ["scale"]), keyword_hint(["softcapp"], ["scale", "softcap"])
    ('scale=', 'softcap=')
    """
    name, names = min(unknown, default=""), [*known, *hints]
    if name not in names:  # names that are merely alike mean something else: "op" is not "p"
        name = nearest_name(name, names, _LEAST_SIMILARITY) or "" if len(name) >= _SHORTEST_SIMILAR else ""
    return hints.get(name, f"{name}=") if name else None


_SHORTEST_SIMILAR, _LEAST_SIMILARITY = 4, 0.75
"""What a misspelt keyword has at least: letters, and similarity to the one that was meant."""


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

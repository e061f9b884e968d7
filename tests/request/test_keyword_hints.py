"""Keywords of other libraries, and misspelt ones: the hint is what the pages on these libraries say, or nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import undivided
from undivided import InputError, masks
from undivided.request.foreign import keyword_hint

Q, K = torch.zeros(1, 4, 4, 16), torch.zeros(1, 4, 2, 16)
UNTYPED: Any = undivided
"""For calls that type checkers refuse."""


def attention(**options: Any) -> object:
    return undivided.attention(Q, Q, Q, layout="bshd", **options)


def attend(**options: Any) -> object:
    cache: Any = undivided.KVCache(1, 16, 2, 16, dtype=torch.float32)
    cache.append(K, K)
    return cache.attend(Q, **options)


def paged_attend(**options: Any) -> object:
    cache: Any = undivided.PagedKVCache(4, 4, 2, 16, batch=1, dtype=torch.float32)
    cache.append(K, K)
    return cache.attend(Q, **options)


def attend_of_layers(**options: Any) -> object:
    params = undivided.InferenceParams(1, 16, 2, 16, torch.float32)
    params.pre_step({"a": 4})
    return params.attend(1, Q, K, K, **options)


def rotate(**options: Any) -> object:
    return UNTYPED.apply_rotary_pos_emb(Q, undivided.RotaryPositionEmbedding(16)(4), "bshd", **options)


def dot_product_attention(**options: Any) -> object:
    layer: Any = undivided.DotProductAttention(4, 16, qkv_format="bshd")
    return layer(Q, Q, Q, **options)


def new_layer(**options: Any) -> object:
    return UNTYPED.TransformerLayer(64, 96, 4, attn_input_format="bshd", **options)


HINTS: list[tuple[Callable[..., object], dict[str, str]]] = [
    (
        attention,
        {
            "softmax_scale": "scale=",
            "softmax_type": "sinks=",
            "learnable_sink": "sinks=",
            "s_aux": "sinks=",
            "op": "backend=",
            "attention_chunk": "mask=masks.chunks(size)",
            "cache_seqlens": 'mask=masks.lengths(cache_seqlens) & masks.causal("bottom_right")',
            "cache_leftpad": "mask=masks.lengths(cache_seqlens - leftpad, kv_start=leftpad)",
            "head_mask": "leave it out: not supported",
            "page_table": "pages=",
            "window_size": "mask=masks.window(left, right)",
            "causal": "mask=masks.causal()",
            "is_causal": "mask=masks.causal()",
            "seqused_q": "mask=masks.lengths(kv, q)",
            "rotary_interleaved": "leave it out: undivided.apply_rotary_pos_emb(interleaved=)",
            "num_splits": "leave it out: kernels choose",
            "qv": "leave it out: torch.cat((q, qv), -1)",
            "gather_kv_indices": "mask=masks.blocks(1, 1, indices)",
            "output_dtype": "leave it out: the output has the dtype of q",
        },
    ),
    *(
        (
            call,
            {
                "softmax_scale": "scale=",
                "sm_scale": "scale=",
                "logits_soft_cap": "softcap=",
                "return_softmax_lse": "return_lse=True",
                "s_aux": "sinks=",
                "attn_mask": "mask=masks.dense(tensor)",
                "window_size": "mask=masks.window(left, right)",
                "is_causal": "leave it out: a cache is causal by default",
                "cache_seqlens": "leave it out: the cache counts its tokens",
                "block_table": "leave it out: the cache keeps its block table",
                "training": "leave it out: attention over a cache has no dropout",
                "num_splits": "leave it out: kernels choose",
                "cu_seqlens_q": "leave it out: append(lengths=) or pre_step",
            },
        )
        for call in (attend, paged_attend, attend_of_layers)
    ),
    (rotate, {"position_ids": "index the rows: freqs[positions]", "seqlen_offsets": "start_positions="}),
    (
        dot_product_attention,
        {
            "causal": "attn_mask_type='causal'",
            "softmax_scale": "an argument of the constructor: softmax_scale=",
            "sinks": "an argument of the constructor: softmax_type='learnable'",
            "layout": "qkv_format=",
        },
    ),
    (
        new_layer,
        {
            "num_kv_heads": "num_gqa_groups=",
            "num_key_value_heads": "num_gqa_groups=",
            "rms_norm_eps": "layernorm_epsilon=",
            "head_dim": "kv_channels=",
            "intermediate_size": "ffn_hidden_size=",
            "causal": "self_attn_mask_type='causal'",
        },
    ),
    (UNTYPED.RotaryPositionEmbedding, {"rope_theta": "rotary_base=", "head_dim": "dim=", "rope_scaling": "scaling="}),
    (UNTYPED.masks.documents, {"max_seqlen_q": "max_q=", "max_seqlen_k": "max_kv=", "cu_seqlens_k": "cu_seqlens_kv="}),
    (UNTYPED.masks.lengths, {"seqlens": "kv=", "cache_seqlens": "kv="}),
    (UNTYPED.masks.window, {"window_size": "left= and right=, as masks.window(*window_size)"}),
    (
        UNTYPED.PagedKVCache,
        {"block_size": "page_size=", "num_blocks": "num_pages=", "num_kv_heads": "kv_heads=", "batch_size": "batch="},
    ),
    (UNTYPED.KVCache, {"max_seq_len": "max_len=", "head_size": "head_dim="}),
    (
        UNTYPED.InferenceParams,
        {"num_kv_heads": "num_heads_kv=", "num_blocks": "total_num_pages=", "head_dim": "head_dim_k="},
    ),
]


@pytest.mark.parametrize(
    ("call", "keyword", "hint"),
    [
        pytest.param(call, keyword, hint, id=f"{call.__name__}-{keyword}")
        for call, hints in HINTS
        for keyword, hint in hints.items()
    ],
)
def test_a_keyword_of_another_library_leads_to_ours(call: Callable[..., object], keyword: str, hint: str) -> None:
    with pytest.raises(InputError, match=f"must be called with its own arguments, got '{keyword}'") as caught:
        call(**{keyword: 1})
    assert str(caught.value).partition("\n  HINT: ")[2].startswith(hint)


KNOWN = ("scale", "softcap", "mask", "sinks", "layout")


@pytest.mark.parametrize(
    ("keyword", "hint"),
    [
        ("softcapp", "softcap="),
        ("sclae", "scale="),
        ("Scale", "scale="),
        ("cu_seqlen_q", 'layout="thd" and mask=masks.documents(cu_seqlens_q, cu_seqlens_k)'),
        ("masc", "mask="),
        ("msk", None),  # too short for a guess
        ("mascaras", None),
        ("softmax_types_of_heads", None),
        ("", None),
    ],
)
def test_a_misspelt_keyword_has_a_hint_if_at_most_two_letters_differ(keyword: str, hint: str | None) -> None:
    """Hints for names that are merely alike led to wrong mathematics: softmax_type to scale=."""
    assert keyword_hint([keyword] if keyword else [], KNOWN) == hint


def test_hints_that_name_masks_name_existing_ones() -> None:
    for call, hints in HINTS:
        for hint in hints.values():
            if "masks." in hint:
                assert hasattr(masks, hint.partition("masks.")[2].partition("(")[0]), (call, hint)

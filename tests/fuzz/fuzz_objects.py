"""Calls of `fuzz_inputs` that build an object and then call its methods: caches, layers, rotary embeddings."""

from __future__ import annotations

import random
from typing import Any

import torch
from fuzz_arguments import Call, offsets, options, qkv, sizes, some
from fuzz_values import FLOATS, tensor

import undivided


def cache(rng: random.Random) -> Call:
    s = sizes(rng)
    s = s._replace(q_len=max(s.q_len, 1), dtype=rng.choice(FLOATS))
    common = {
        "kv_heads": s.kv_heads,
        "head_dim": s.dim,
        "batch": s.batch,
        "value_dim": s.v_dim,
        "dtype": s.dtype,
        "layout": s.layout,
    }
    paged = rng.random() < 0.5
    arguments = common | ({"num_pages": 16, "page_size": 4} if paged else {"max_len": 40})
    new = {"k": s.of(s.q_len, s.kv_heads, s.dim), "v": s.of(s.q_len, s.kv_heads, s.v_dim)}
    counts: Any = [s.q_len] if s.layout == "thd" else None
    more = {
        name: value
        for name, value in options(rng, s).items()
        if name in ("scale", "softcap", "sinks", "alibi_slopes", "return_lse")
    }
    then = (
        Call(lambda c, **a: c.append(**a), {**new, "lengths": counts}),
        Call(
            lambda c, **a: c.attend(**a),
            {"q": s.of(s.q_len, s.heads, s.dim), "mask": None, "q_lengths": counts, **more},
        ),
        Call(lambda c, **a: c.truncate(**a), {"lengths": [1] * s.batch}),
        Call(lambda c, **a: c.fork(**a), {"src": 0, "dst": 0}),
        Call(lambda c, **a: c.free(**a), {"i": 0}),
        Call(repr, {}),
        Call(lambda c: c.lengths_tensor, {}),
    )
    return Call(undivided.PagedKVCache if paged else undivided.KVCache, arguments, then)


def inference_params(rng: random.Random) -> Call:
    s = sizes(rng)._replace(layout="bshd", q_len=3)
    k, v = s.of(3, s.kv_heads, s.dim), s.of(3, s.kv_heads, s.v_dim)
    arguments = {
        "max_batch_size": s.batch,
        "max_sequence_length": 16,
        "num_heads_kv": s.kv_heads,
        "head_dim_k": s.dim,
        "dtype": s.dtype,
        "head_dim_v": s.v_dim,
        "is_paged": False,
        "total_num_pages": None,
        "page_size": None,
        "qkv_format": "bshd",
    }
    step = {"step_dict": dict.fromkeys(range(s.batch), 3)}
    then = (
        Call(lambda p, **a: p.pre_step(**a), step),
        Call(lambda p, **a: p.attend(**a), {"layer_number": 1, "q": s.of(3, s.heads, s.dim), "new_k": k, "new_v": v}),
        Call(lambda p, **a: p.allocate_memory(**a), {"layer_number": 2}),
        Call(lambda p, **a: p.pre_step(**a), step),
        Call(lambda p, **a: p.step(**a), {"layer_number": 1, "new_k": k, "new_v": v, "qkv_format": "bshd"}),
        Call(lambda p: p.reset(), {}),
    )
    return Call(undivided.InferenceParams, arguments, then)


def dot_product(rng: random.Random) -> Call:
    s = sizes(rng)._replace(layout="bshd")
    arguments = {
        "num_attention_heads": s.heads,
        "kv_channels": (s.dim, s.v_dim),
        "num_gqa_groups": s.kv_heads,
        "qkv_format": "bshd",
        "attn_mask_type": rng.choice(("causal", "no_mask", "padding", "arbitrary")),
        "softmax_scale": None,
        "window_size": None,
        "softcap": None,
        "attention_dropout": 0.0,
    }
    found = dict(zip(("query_layer", "key_layer", "value_layer"), qkv(s).values(), strict=True))
    found |= some(
        rng,
        {
            "attention_mask": lambda: tensor([s.batch, 1, 1, s.q_len], torch.bool),
            "cu_seqlens_q": lambda: offsets(rng, s.q_len),
            "cu_seqlens_kv": lambda: offsets(rng, s.kv_len),
            "alibi_slopes": lambda: tensor([s.heads], torch.float32),
            "window_size": lambda: (2, 0),
            "qkv_format": lambda: rng.choice(("bshd", "sbhd", "thd")),
            "max_seqlen_q": lambda: 3,
        },
        0.15,
    )
    return Call(undivided.DotProductAttention, arguments, (Call(lambda layer, **a: layer(**a), found), Call(repr, {})))


def layer(rng: random.Random) -> Call:
    hidden = {"hidden_states": tensor([2, 3, 16], torch.float32)}
    hidden |= some(
        rng,
        {
            "attention_mask": lambda: tensor([2, 1, 1, 3], torch.bool),
            "rotary_pos_emb": lambda: undivided.RotaryPositionEmbedding(8)(3),
            "window_size": lambda: (1, 0),
            "cu_seqlens_q": lambda: offsets(rng, 3),
        },
        0.2,
    )
    run = Call(lambda module, **a: module(**a), hidden)
    if rng.random() < 0.5:
        arguments = {
            "hidden_size": 16,
            "num_attention_heads": 2,
            "attention_dropout": 0.0,
            "qkv_format": "bshd",
            "attn_mask_type": "causal",
            "num_gqa_groups": None,
            "layernorm_epsilon": 1e-5,
            "params_dtype": torch.float32,
            "softmax_type": "vanilla",
        }
        return Call(undivided.MultiheadAttention, arguments, (run,))
    arguments = {
        "hidden_size": 16,
        "ffn_hidden_size": 32,
        "num_attention_heads": 2,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "attn_input_format": "bshd",
        "self_attn_mask_type": "causal",
        "activation": "gelu",
        "normalization": "LayerNorm",
    }
    return Call(undivided.TransformerLayer, arguments, (run,))


def rotary(rng: random.Random) -> Call:
    if rng.random() < 0.5:
        arguments: dict[str, Any] = {
            "dim": 8,
            "rotary_percent": 1.0,
            "rotary_base": 10000.0,
            "interleaved": False,
            "seq_len_interpolation_factor": None,
            "scaling": rng.choice((None, {"rope_type": "linear", "factor": 2.0}, {"rope_type": "yarn", "factor": 2.0})),
        }
        return Call(
            undivided.RotaryPositionEmbedding,
            arguments,
            (Call(lambda rope, **a: rope(**a), {"max_seq_len": 4, "offset": 0}), Call(repr, {})),
        )
    arguments = {
        "t": tensor([2, 3, 2, 8], rng.choice(FLOATS)),
        "freqs": undivided.RotaryPositionEmbedding(8)(5),
        "tensor_format": "bshd",
        "interleaved": False,
        "start_positions": rng.choice((None, torch.tensor([0, 2]))),
        "cu_seqlens": None,
    }
    return Call(undivided.apply_rotary_pos_emb, arguments)

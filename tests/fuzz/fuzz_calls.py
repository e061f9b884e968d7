"""The public calls of `fuzz_inputs`, each with valid arguments, which the fuzz then damages."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from fuzz_values import FLOATS, LENGTHS, tensor
from torch import Tensor

import undivided
from undivided import masks

LAYOUTS = ("bshd", "sbhd", "bhsd", "thd")


class Sizes(NamedTuple):
    batch: int
    q_len: int
    kv_len: int
    heads: int
    kv_heads: int
    dim: int
    v_dim: int
    dtype: torch.dtype
    layout: str

    def of(self, length: int, heads: int, dim: int) -> Tensor:
        axes = {"b": self.batch, "s": length, "h": heads, "d": dim, "t": length}
        return tensor([axes[letter] for letter in self.layout], self.dtype)


def sizes(rng: random.Random) -> Sizes:
    q_len, kv_len = rng.choice(LENGTHS), rng.choice(LENGTHS)
    if rng.random() < 0.6:
        kv_len = q_len
    kv_heads, dim = rng.choice((1, 2)), rng.choice((1, 8, 16, 17))
    v_dim = dim if rng.random() < 0.8 else rng.choice((1, 8, 24))
    layout = rng.choice(LAYOUTS)
    batch = 1 if layout == "thd" else rng.choice((1, 2, 3))
    heads = kv_heads * rng.choice((1, 1, 2))
    return Sizes(batch, q_len, kv_len, heads, kv_heads, dim, v_dim, rng.choice(FLOATS), layout)


class Call(NamedTuple):
    """A function and its arguments by name. `then` is called with the result, for example a method of a new object."""

    function: Callable[..., Any]
    arguments: dict[str, Any]
    then: tuple[Call, ...] = ()


def some(rng: random.Random, options: dict[str, Callable[[], Any]], often: float = 0.25) -> dict[str, Any]:
    return {name: make() for name, make in options.items() if rng.random() < often}


def ints(rng: random.Random, count: int, most: int) -> Tensor:
    return torch.tensor([rng.randint(0, most) for _ in range(count)], dtype=rng.choice((torch.int32, torch.int64)))


def offsets(rng: random.Random, total: int) -> Tensor:
    cuts = sorted(rng.randint(0, total) for _ in range(rng.randrange(3)))
    return torch.tensor([0, *cuts, total], dtype=torch.int32)


def qkv(s: Sizes) -> dict[str, Any]:
    return {
        "q": s.of(s.q_len, s.heads, s.dim),
        "k": s.of(s.kv_len, s.kv_heads, s.dim),
        "v": s.of(s.kv_len, s.kv_heads, s.v_dim),
    }


def mask_for(rng: random.Random, s: Sizes) -> Any:
    align: Any = None if s.q_len == s.kv_len else rng.choice(("top_left", "bottom_right"))
    made = [
        lambda: masks.causal(align),
        lambda: masks.window(rng.choice((None, 0, 3)), rng.choice((None, 0, 2)), align),
        lambda: masks.causal(align) | masks.prefix(2),
        lambda: masks.chunks(3, align),
        lambda: masks.prefix(ints(rng, s.batch, 3)),
        lambda: masks.dense(torch.ones(s.q_len, s.kv_len, dtype=torch.bool)),
        lambda: masks.document_ids(ints(rng, s.q_len, 2), ints(rng, s.kv_len, 2)),
        lambda: masks.predicate(lambda b, h, q, k: q >= k),
        lambda: masks.lengths(ints(rng, s.batch, s.kv_len), ints(rng, s.batch, s.q_len)),
    ]
    if s.layout == "thd":
        of_q = offsets(rng, s.q_len)
        of_kv = of_q if s.q_len == s.kv_len else torch.tensor([0] * (len(of_q) - 1) + [s.kv_len])
        documents = masks.documents(of_q, of_kv)
        return documents & masks.causal("bottom_right") if rng.random() < 0.5 else documents
    return rng.choice(made)() if rng.random() < 0.7 else None


def options(rng: random.Random, s: Sizes) -> dict[str, Any]:
    batch = 1 if s.layout == "thd" else s.batch
    found = some(
        rng,
        {
            "bias": lambda: tensor(
                [batch, s.heads, s.q_len, s.kv_len][rng.choice((0, 1, 2)) :]
                if s.layout != "thd"
                else [s.heads, s.q_len, s.kv_len],
                s.dtype,
            ),
            "scale": lambda: rng.choice((0.3, 1.0, 0.0, -1.0)),
            "softcap": lambda: 5.0,
            "sinks": lambda: tensor([s.heads], s.dtype),
            "alibi_slopes": lambda: tensor([s.heads], torch.float32),
            "backend": lambda: rng.choice(("reference", "native", "flash")),
            "deterministic": lambda: True,
            "return_lse": lambda: True,
        },
        0.15,
    )
    if rng.random() < 0.1:
        found |= {"dropout_p": 0.5, "dropout_seed": rng.choice((3, torch.tensor(3)))}
    return found


def attention(rng: random.Random) -> Call:
    s = sizes(rng)
    arguments = {**qkv(s), "layout": s.layout, "mask": mask_for(rng, s), **options(rng, s)}
    if rng.random() < 0.1 and s.layout != "thd":
        pools = [tensor([4, 4, s.kv_heads, dim], s.dtype) for dim in (s.dim, s.v_dim)]
        table = torch.tensor([[0, 3]] * s.batch, dtype=torch.int32)
        arguments |= {"k": pools[0], "v": pools[1], "pages": table, "mask": masks.lengths(ints(rng, s.batch, 8))}
    return Call(undivided.attention, arguments)


def explain(rng: random.Random) -> Call:
    call = attention(rng)
    machine = some(rng, {"machine": lambda: undivided.Machine.named("h100")})
    return Call(undivided.explain, {**call.arguments, **machine}, (Call(str, {}), Call(repr, {})))


def verify(rng: random.Random) -> Call:
    s = sizes(rng)
    return Call(
        undivided.verify,
        {**qkv(s), "layout": s.layout, "mask": mask_for(rng, s), "backends": ["reference"]},
        (Call(str, {}),),
    )


def sdpa(rng: random.Random) -> Call:
    s = sizes(rng)._replace(layout="bhsd")
    found = dict(zip(("query", "key", "value"), qkv(s).values(), strict=True))
    found |= some(
        rng,
        {
            "attn_mask": lambda: tensor([s.q_len, s.kv_len], rng.choice((torch.bool, s.dtype))),
            "is_causal": lambda: True,
            "scale": lambda: 0.5,
            "dropout_p": lambda: 0.1,
        },
    )
    found["enable_gqa"] = s.heads != s.kv_heads
    return Call(undivided.scaled_dot_product_attention, found)


def replaced(rng: random.Random) -> Call:
    def call(**arguments: Any) -> Any:
        with undivided.replace_sdpa():
            return torch.nn.functional.scaled_dot_product_attention(**arguments)

    return Call(call, sdpa(rng).arguments)


def merge(rng: random.Random) -> Call:
    s = sizes(rng)._replace(layout=rng.choice(("bshd", "bhsd")))
    out, lse = s.of(s.q_len, s.heads, s.v_dim), tensor([s.batch, s.heads, s.q_len], torch.float32)
    return Call(
        undivided.merge,
        {
            "outs": [out, out],
            "lses": [lse, lse],
            "layout": s.layout,
            **some(rng, {"sinks": lambda: tensor([s.heads], s.dtype)}),
        },
    )


def build_mask(rng: random.Random) -> Call:
    n, m = rng.choice(LENGTHS), rng.choice(LENGTHS)
    align: Any = rng.choice((None, "top_left", "bottom_right"))
    function, arguments = rng.choice(
        (
            (masks.causal, {"align": align}),
            (masks.window, {"left": 3, "right": 0, "align": align}),
            (
                masks.lengths,
                {"kv": ints(rng, 2, m), "q": ints(rng, 2, n), "kv_start": ints(rng, 2, 1), "q_start": ints(rng, 2, 1)},
            ),
            (
                masks.documents,
                {
                    "cu_seqlens_q": offsets(rng, n),
                    "cu_seqlens_kv": None,
                    "padded_q": None,
                    "padded_kv": None,
                    "max_q": None,
                    "max_kv": None,
                },
            ),
            (masks.document_ids, {"ids_q": ints(rng, n, 3), "ids_kv": ints(rng, m, 3)}),
            (masks.prefix, {"n": rng.choice((2, [1, 2]))}),
            (masks.chunks, {"size": 3, "align": align, "offset": rng.choice((None, 1, [0, 1]))}),
            (masks.dense, {"tensor": tensor([n, m], torch.bool)}),
            (masks.predicate, {"fn": lambda b, h, q, k: q >= k}),
        )
    )
    sized = {"q_len": n, "kv_len": m}
    then = (
        Call(lambda mask, **a: mask.to_dense(**a), {"batch": 2, "heads": 1, **sized}),
        Call(lambda mask, **a: mask.intervals(**a), {**sized, "batch": 2}),
        Call(lambda mask, **a: mask.draw(**a), {**sized, "batch": 1}),
        Call(str, {}),
        Call(repr, {}),
        Call(lambda mask: masks.describe(mask.structure), {}),
        Call(lambda mask, other: mask & other, {"other": masks.causal(align)}),
        Call(lambda mask, other: mask | other, {"other": masks.prefix(1)}),
    )
    return Call(function, arguments, then)


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


def small_things(rng: random.Random) -> Call:
    q = torch.zeros(1, 2, 1, 8)
    blocks = functools.partial(undivided.explain, q, q, q, layout="bshd")

    def listed(names: Any) -> list[Any]:
        return list(names) if isinstance(names, list | tuple | set) else [names]

    def used(names: Any) -> Any:
        with undivided.use_backends(*listed(names)):
            return blocks()

    def disabled(names: Any) -> Any:
        with undivided.use_backends.disable(*listed(names)):
            return blocks()

    return rng.choice(
        (
            Call(undivided.diagnose, {"problem": "No available kernel. Aborting execution."}, (Call(str, {}),)),
            Call(
                undivided.Machine,
                {
                    "device": "cuda",
                    "compute_capability": (8, 0),
                    "cudnn": "8.9.7",
                    "packages": {},
                    "torch": "2.13.0",
                    "flash_impl": None,
                },
                (Call(str, {}), Call(hash, {})),
            ),
            Call(undivided.Machine.named, {"name": "h100", "cudnn": None, "packages": None}),
            Call(undivided.Machine.this, {"device": "cpu"}),
            Call(used, {"names": ["reference"]}),
            Call(disabled, {"names": ["native"]}),
            Call(undivided.backends, {}, (Call(str, {}),)),
        )
    )


ENTRIES: tuple[tuple[Callable[[random.Random], Call], int], ...] = (
    (attention, 40),
    (sdpa, 15),
    (build_mask, 20),
    (explain, 10),
    (cache, 12),
    (merge, 6),
    (inference_params, 6),
    (dot_product, 8),
    (layer, 3),
    (rotary, 6),
    (small_things, 6),
    (replaced, 3),
    (verify, 1),
)

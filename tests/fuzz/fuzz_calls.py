"""The public calls of `fuzz_inputs`, each with valid arguments, which the fuzz then damages."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import torch
from fuzz_arguments import Call, ints, mask_for, offsets, options, qkv, sizes, some
from fuzz_objects import cache, dot_product, inference_params, layer, rotary
from fuzz_values import LENGTHS, tensor

import undivided
from undivided import masks


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

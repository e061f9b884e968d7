"""Valid arguments that the calls of `fuzz_inputs` share: sizes, tensors, masks and options of one problem."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from fuzz_values import FLOATS, LENGTHS, tensor
from torch import Tensor

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

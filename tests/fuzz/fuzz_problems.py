"""Random problems whose sizes lie at the edges of the kernels' tiles, for fuzz_backends.py."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from undivided import masks
from undivided.cli._mask_words import parse

EDGES = tuple(sorted({1, 2, 3, 5, 7, 9, *(n + d for n in (16, 32, 48, 64, 128, 192, 256, 320) for d in (-1, 0, 1))}))
LONG_EDGES = tuple(n + d for n in (512, 1024, 2048, 4096) for d in (-1, 0, 1))
"""Key lengths of few rows: beyond these, the keys of a sequence are divided into chunks or parts."""
HEAD_SIZES = (1, 8, 16, 17, 31, 32, 40, 63, 64, 65, 80, 96, 127, 128, 129, 192, 256)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PAGE_SIZES = (1, 16, 17, 64, 128)
MAX_PAIRS = 1 << 20
"""Of a problem, so that the oracle takes milliseconds."""
MAX_INTERPRETED_PAIRS = 1 << 14
"""The same, so that Triton's interpreter takes a second."""


@dataclass(frozen=True)
class Spec:
    """A problem in plain values: one query and key length per sequence, a mask as text, and optional inputs by name."""

    seed: int
    dtype: str
    layout: str
    kv_heads: int
    group: int
    dim: int
    v_dim: int
    q_lens: list[int]
    kv_lens: list[int]
    mask: str = ""
    page_size: int = 0
    factor: float = 1.0
    threads: int = 1
    options: dict[str, float] = field(default_factory=dict)

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def pairs(self) -> int:
        if self.layout == "thd":
            return self.heads * sum(self.q_lens) * sum(self.kv_lens)
        return self.heads * len(self.q_lens) * max(self.q_lens) * max(self.kv_lens)


def draw(number: int, max_pairs: int = MAX_PAIRS) -> Spec:
    """The problem of a case."""
    rng = random.Random(number)
    while True:
        spec = _draw(rng, number)
        if spec.pairs <= max_pairs:
            return spec


def _draw(rng: random.Random, number: int) -> Spec:
    layout = rng.choice(("bshd", "sbhd", "bhsd", "thd", "thd"))
    count = rng.choice((1, 2, 3, 5)) if layout == "thd" else rng.choice((1, 1, 2, 3))
    kind = rng.choice(("same", "any", "decode", "long-decode"))
    edges = (*EDGES[-9:], *LONG_EDGES, *LONG_EDGES) if kind == "long-decode" else EDGES
    kv_lens = [rng.choice((0, *edges) if count > 1 else edges) for _ in range(count)]
    q_lens = {
        "same": list(kv_lens),
        "any": [rng.choice(EDGES) for _ in range(count)],
        "decode": [rng.choice((1, 1, 2, 4, 8)) for _ in range(count)],
        "long-decode": [rng.choice((1, 1, 2, 4, 8, 17)) for _ in range(count)],
    }[kind]
    if layout != "thd":
        q_lens, kv_lens = [max(n, 1) for n in q_lens], [max(n, 1) for n in kv_lens]
    dim = rng.choice(HEAD_SIZES)
    return Spec(
        seed=number,
        dtype=rng.choice(tuple(DTYPES)),
        layout=layout,
        kv_heads=rng.choice((1, 1, 2, 3)),
        group=rng.choice((1, 1, 2, 4, 5)),
        dim=dim,
        v_dim=rng.choice((dim, dim, dim, rng.choice(HEAD_SIZES))),
        q_lens=q_lens,
        kv_lens=kv_lens,
        mask=_mask_text(rng),
        page_size=rng.choice(PAGE_SIZES) if rng.random() < 0.25 else 0,
        factor=rng.choice((1.0, 1.0, 1.0, 8.0)),
        threads=rng.choice((1, 2, 3)),
        options={name: make(rng) for name, make in OPTIONS.items() if rng.random() < 0.2},
    )


def _mask_text(rng: random.Random) -> str:
    """A mask without lengths or documents: these follow from the lengths of the problem."""
    align = rng.choice(("'bottom_right'", "'bottom_right'", "'top_left'"))
    left, right = (rng.choice(("None", "0", "1", "15", "16", "31", "63", "64", "100")) for _ in range(2))
    band = rng.choice(("", f"causal({align})", f"causal({align})", f"window({left}, {right}, {align})"))
    if band and rng.random() < 0.2:
        band = f"({band} | {rng.choice(('prefix', 'sinks'))}({rng.choice((1, 4, 16, 33))}))"
    if rng.random() < 0.1:
        chunks = f"chunks({rng.choice((1, 16, 50, 64))}, {align})"
        return f"{band} & {chunks}" if band else chunks
    return band


OPTIONS: dict[str, Callable[[random.Random], float]] = {
    "scale": lambda rng: rng.choice((0.5, 0.1, -0.2)),
    "softcap": lambda rng: rng.choice((1.0, 20.0)),
    "bias": lambda rng: rng.choice((1, 2, 4, 8, 3, 5, 6, 12, 15)),  # bits: which axes of [B, H, Sq, Sk] are not 1
    "alibi": lambda rng: 1,
    "sinks": lambda rng: 1,
    "dropout": lambda rng: rng.choice((0.1, 0.5)),
    "dense": lambda rng: rng.choice((0.1, 0.7)),
    "batch_invariant": lambda rng: rng.choice((1, 2, 5)),  # threads of the calls that must give the same bits
}


def arguments(spec: Spec) -> dict[str, Any]:
    """The arguments of `undivided.verify` for the problem."""
    make = torch.Generator().manual_seed(spec.seed)
    dtype = DTYPES[spec.dtype]
    packed = spec.layout == "thd"
    batch = 1 if packed else len(spec.q_lens)
    q_len, kv_len = (sum(lens) if packed else max(lens) for lens in (spec.q_lens, spec.kv_lens))

    def random_tensor(*shape: int) -> Tensor:
        return torch.randn(shape, generator=make)

    def stored(length: int, heads: int, dim: int) -> Tensor:
        sizes = {"b": batch, "s": length, "h": heads, "d": dim, "t": length}
        return (spec.factor * random_tensor(*(sizes[axis] for axis in spec.layout))).to(dtype)

    found: dict[str, Any] = {"layout": spec.layout, "mask": _mask(spec)}
    found["q"] = stored(q_len, spec.heads, spec.dim)
    if spec.page_size:
        found |= _paged(spec, make)
    else:
        found["k"], found["v"] = stored(kv_len, spec.kv_heads, spec.dim), stored(kv_len, spec.kv_heads, spec.v_dim)
    for name in ("scale", "softcap"):
        if name in spec.options:
            found[name] = spec.options[name]
    if "alibi" in spec.options:
        found["alibi_slopes"] = random_tensor(spec.heads).abs()
    if "sinks" in spec.options:
        found["sinks"] = random_tensor(spec.heads)
    if "dropout" in spec.options:
        found["dropout_p"], found["dropout_seed"] = spec.options["dropout"], spec.seed
    if "batch_invariant" in spec.options:
        found["batch_invariant"] = True
    if spec.page_size:
        return found
    axes = (batch, spec.heads, q_len, kv_len)
    if "bias" in spec.options:
        bits = int(spec.options["bias"])
        shape = [size if bits >> n & 1 else 1 for n, size in enumerate(axes)]
        found["bias"] = random_tensor(*(shape[1:] if packed else shape)).to(dtype)
    if "dense" in spec.options:
        allowed = torch.rand(axes[2:], generator=make) < spec.options["dense"]
        found["mask"] = masks.dense(allowed) if found["mask"] is None else found["mask"] & masks.dense(allowed)
    return found


def _mask(spec: Spec) -> masks.Mask | None:
    band = parse(spec.mask) if spec.mask else None
    if band is None and "alibi" in spec.options:
        band = masks.window(None, None, "bottom_right")
    if spec.layout == "thd":
        cu_q, cu_kv = ([0, *itertools.accumulate(lens)] for lens in (spec.q_lens, spec.kv_lens))
        lengths = masks.documents(cu_q, cu_kv)
    elif spec.page_size or len(set(spec.q_lens)) > 1 or len(set(spec.kv_lens)) > 1:
        lengths = masks.lengths(spec.kv_lens, spec.q_lens)
    else:
        return band
    return lengths if band is None else band & lengths


def _paged(spec: Spec, make: torch.Generator) -> dict[str, Tensor]:
    """Pools of pages in random order, whose rows without a key are NaN, and a block table."""
    rows = max(math.ceil(n / spec.page_size) for n in spec.kv_lens) + 1
    count = len(spec.kv_lens) * rows
    table = torch.randperm(count, generator=make).to(torch.int32).reshape(-1, rows)
    found: dict[str, Tensor] = {"pages": table}
    for name, dim in (("k", spec.dim), ("v", spec.v_dim)):
        pool = torch.full((count, spec.page_size, spec.kv_heads, dim), math.nan, dtype=DTYPES[spec.dtype])
        for sequence, length in enumerate(spec.kv_lens):
            values = (spec.factor * torch.randn(length, spec.kv_heads, dim, generator=make)).to(pool.dtype)
            for start in range(0, length, spec.page_size):
                piece = values[start : start + spec.page_size]
                pool[int(table[sequence, start // spec.page_size]), : len(piece)] = piece
        found[name] = pool
    return found

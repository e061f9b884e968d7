"""What a query does not see cannot reach it: NaN and infinities of any operand, under every mask, on every level.

Random problems against the definition row by row (row_by_row.py), which takes a row's keys before it multiplies. Each
number of the output and of the log-sum-exp must be of the same kind: a NaN, plus or minus infinity, or finite and
close. A gradient must be finite and close where the definition's is, and NaN where only NaN can be; where infinities
meet, rounding and the order of the terms decide between an infinity and a NaN.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import levels
import pytest
import row_by_row
import torch
from torch import Tensor

import undivided
from undivided import masks
from undivided.backends import reference
from undivided.backends.native import evaluated
from undivided.kernels import philox
from undivided.masks import Mask
from undivided.quantization import FORMATS, dequantize, quantize

RUNS = ["reference", *levels.here()]
CLOSE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
VALUES = (math.nan, math.inf, -math.inf)
each_run = pytest.mark.parametrize("run", RUNS)

Sizes = tuple[int, int, int, int, int, int]  # batch, heads, key heads, rows, keys, head size
SIZES: dict[str, Sizes] = {
    "prefill": (2, 4, 2, 70, 150, 32),
    "square": (1, 2, 1, 140, 140, 64),
    "odd head size": (1, 2, 2, 40, 40, 20),
    "small heads": (2, 2, 2, 12, 12, 32),
    "decoding": (2, 4, 2, 3, 300, 64),
    "parts of the keys": (1, 1, 1, 20, 2100, 32),
}


def _parents(rows: int, draw: random.Random) -> list[int]:
    return [draw.randrange(-1, i) if i else -1 for i in range(rows)]


def _cuts(length: int, draw: random.Random, count: int) -> list[int]:
    return [0, *sorted(draw.randrange(length + 1) for _ in range(count)), length]


def _documents(s: Sizes, draw: random.Random) -> Mask:
    count = draw.randrange(1, 6)
    return masks.documents(_cuts(s[3], draw, count), _cuts(s[4], draw, count))


def _dense(s: Sizes, draw: random.Random) -> Mask:
    make = torch.Generator().manual_seed(draw.randrange(10**6))
    shape = (draw.choice([1, s[0]]), draw.choice([1, s[1]]), s[3], s[4])
    return masks.dense(torch.rand(shape, generator=make) < draw.choice([0.1, 0.5, 0.9]))


def _blocks(s: Sizes, draw: random.Random) -> Mask:
    q_block, kv_block = draw.choice([8, 16, 32]), draw.choice([4, 16, 64])
    limit = -(-s[4] // kv_block)
    table = [[draw.randrange(-1, limit) for _ in range(3)] for _ in range(-(-s[3] // q_block))]
    return masks.blocks(q_block, kv_block, torch.tensor(table))


MASKS: dict[str, Callable[[Sizes, random.Random], Mask]] = {
    "causal": lambda s, draw: masks.causal(draw.choice(["top_left", "bottom_right"])),
    "window": lambda s, draw: masks.window(draw.choice([0, 5, 40]), draw.choice([0, 3]), "bottom_right"),
    "window and first keys": lambda s, draw: masks.window(draw.choice([3, 20]), 0, "bottom_right") | masks.sinks(2),
    "prefix": lambda s, draw: masks.causal("bottom_right") | masks.prefix(draw.randrange(1, 9)),
    "chunks": lambda s, draw: masks.chunks(draw.choice([4, 16, 50]), "bottom_right"),
    "lengths": lambda s, draw: masks.lengths(torch.tensor([draw.randrange(s[4] + 1) for _ in range(s[0])])),
    "lengths, causal": lambda s, draw: (
        masks.lengths([draw.randrange(s[3], s[4] + 1)] * s[0]) & masks.causal("bottom_right")
    ),
    "documents, causal": lambda s, draw: _documents(s, draw) & masks.causal("bottom_right"),
    "document ids": lambda s, draw: masks.document_ids(
        torch.tensor([[draw.randrange(4) for _ in range(s[3])]]),
        torch.tensor([[draw.randrange(4) for _ in range(s[4])]]),
    ),
    "tree": lambda s, draw: masks.tree(_parents(s[3], draw)),
    "dense": _dense,
    "predicate": lambda s, draw: masks.predicate(lambda b, h, i, j: (3 * i + 5 * j + h + b) % 7 > 2),
    "predicate, causal": lambda s, draw: (
        masks.predicate(lambda b, h, i, j: (i + j) % 3 != 0) & masks.causal("bottom_right")
    ),
    "blocks": _blocks,
    "bias": lambda s, draw: masks.causal("bottom_right"),
}
ALONE = {"documents, causal", "document ids"}  # masks of one batch element
UNALIGNED = {"lengths", "document ids", "dense", "predicate", "blocks"}  # without the alignment that ALiBi needs


@dataclass
class Problem:
    """Operands in the dtype of the run, and what the call takes besides them."""

    operands: dict[str, Tensor]
    mask: Mask
    dropout: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)
    spoilt: dict[str, list[float]] = field(default_factory=dict)

    def allowed(self) -> Tensor:
        q, k = self.operands["q"], self.operands["k"]
        return self.mask.to_dense(q.shape[0], q.shape[1], q.shape[2], k.shape[2])

    @property
    def only_nan(self) -> bool:
        return all(math.isnan(x) for values in self.spoilt.values() for x in values)


def draw_problem(kind: str, size: str, dtype: torch.dtype, seed: int) -> Problem:
    draw = random.Random(f"{kind} {size} {seed}")
    batch, heads, kv_heads, rows, keys, dim = SIZES[size]
    if kind in ALONE:
        batch = 1
    sizes = (batch, heads, kv_heads, rows, keys, dim)
    make = torch.Generator().manual_seed(draw.randrange(10**6))
    shapes = {"q": (heads, rows), "k": (kv_heads, keys), "v": (kv_heads, keys), "grad_out": (heads, rows)}
    operands = {name: torch.randn(batch, *shape, dim, generator=make).to(dtype) for name, shape in shapes.items()}
    operands["grad_lse"] = torch.randn(batch, heads, rows, generator=make)
    problem = Problem(operands, MASKS[kind](sizes, draw))
    feature = draw.choice(["none", "none", "sinks", "softcap", "alibi", "dropout"])
    if feature == "sinks":
        problem.options["sinks"] = torch.randn(heads, generator=make)
    elif feature == "softcap":
        problem.options["softcap"] = 3.0
    elif feature == "alibi" and kind not in UNALIGNED:
        problem.options["alibi_slopes"] = torch.rand(heads, generator=make) / 8
    elif feature == "dropout":
        problem.dropout, problem.options["dropout_p"], problem.options["dropout_seed"] = 0.3, 0.3, 7
    if kind == "bias":
        bias = torch.randn(1, heads, rows, keys, generator=make)
        bias[torch.rand(bias.shape, generator=make) < 0.3] = -math.inf
        bias[0, draw.randrange(heads), draw.randrange(rows), draw.randrange(keys)] = math.nan
        problem.options["bias"] = bias
    spoil(problem, draw)
    return problem


def spoil(problem: Problem, draw: random.Random) -> None:
    """Places NaN and infinities: in some operands, one number, a token, or all tokens from one on."""
    infinite = draw.random() < 0.4
    for name in draw.sample(["q", "k", "v", "grad_out"], draw.choice([1, 1, 2])):
        tensor = problem.operands[name]
        for _ in range(draw.choice([1, 1, 3])):
            value = draw.choice(VALUES) if infinite else math.nan
            at: list[Any] = [draw.randrange(n) for n in tensor.shape]
            how = draw.choice(["number", "number", "token", "token", "rest"])
            if how != "number":
                at[3] = slice(None)
            if how == "rest":
                at[2] = slice(at[2], None)
            tensor[tuple(at)] = value
            problem.spoilt.setdefault(name, []).append(value)


def expected(problem: Problem) -> dict[str, Tensor]:
    o, options = problem.operands, problem.options
    leaves = {name: o[name].double().requires_grad_() for name in "qkv"}
    bias = options.get("bias")
    if bias is not None:
        leaves["bias"] = bias.double().requires_grad_()
    form = problem.mask.normal_form(o["q"].shape[0], o["q"].shape[1], o["q"].shape[2], o["k"].shape[2], "cpu")
    row, key = form.q_position, form.kv_position
    distance = ((row + form.shift)[:, None, :, None] - key[:, None, None, :]).abs().double()
    factor = None
    if problem.dropout:
        heads = torch.arange(o["q"].shape[1])[None, :, None, None]
        places = form.sequence_number[:, None, :, None], heads, row[:, None, :, None], key[:, None, None, :]
        factor = philox.keep(7, *places, problem.dropout) * philox.survivor_scale(problem.dropout)
        factor = factor.expand(o["q"].shape[0], *factor.shape[1:])
    made = row_by_row.Options(
        softcap=options.get("softcap"),
        bias=leaves.get("bias"),
        slopes=None if "alibi_slopes" not in options else options["alibi_slopes"].double(),
        distance=distance,
        sinks=None if "sinks" not in options else options["sinks"].double(),
        factor=factor,
    )
    out, lse = row_by_row.attend(leaves["q"], leaves["k"], leaves["v"], problem.allowed(), made)
    return _with_gradients(problem, out, lse, leaves)


def found(problem: Problem, backend: str) -> dict[str, Tensor]:
    leaves = {name: problem.operands[name].clone().requires_grad_() for name in "qkv"}
    options = dict(problem.options)
    if "bias" in options:
        leaves["bias"] = options["bias"] = options["bias"].clone().requires_grad_()
    out, lse = undivided.attention(
        *(leaves[name] for name in "qkv"), layout="bhsd", mask=problem.mask, backend=backend, return_lse=True, **options
    )
    return _with_gradients(problem, out, lse, leaves)


def _with_gradients(problem: Problem, out: Tensor, lse: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    grads = [problem.operands["grad_out"].to(out), problem.operands["grad_lse"].to(lse)]
    gradients = torch.autograd.grad([out, lse], list(leaves.values()), grads)
    return {"out": out.detach(), "lse": lse.detach()} | {
        f"d{name}": x for name, x in zip(leaves, gradients, strict=True)
    }


def kinds(x: Tensor) -> Tensor:
    """0 for a finite number, 1 for a NaN, 2 and 3 for infinities."""
    return x.isnan().int() + 2 * x.isposinf().int() + 3 * x.isneginf().int()


def compare(name: str, got: Tensor, want: Tensor, exactly: bool, close: float) -> None:
    got, want = got.double(), want.double()
    same = kinds(got) == kinds(want) if exactly else got.isfinite() == want.isfinite()
    assert same.all(), f"{name}: {int((~same).sum())} numbers are of another kind, first at {(~same).nonzero()[0]}"
    both = want.isfinite()
    size = max(float(want[both].norm()), 0.1 * float(both.sum()) ** 0.5)
    assert float((got[both] - want[both]).norm()) <= close * size, name


@functools.lru_cache(maxsize=len(CLOSE))
def expected_of(kind: str, size: str, dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
    """The right answer of a drawn problem, for all backends and levels."""
    return expected(draw_problem(kind, size, dtype, seed))


def check(problem: Problem, want: dict[str, Tensor], backend: str, dtype: torch.dtype) -> None:
    got = found(problem, backend)
    for name in ("out", "lse"):
        compare(name, got[name], want[name], True, CLOSE[dtype])
    # a row whose every score is -inf counts as a row without keys in the gradients
    some = problem.allowed()
    if "bias" in problem.options:
        some = some & (problem.options["bias"] != -math.inf)
    if (some.any(-1) & (want["lse"] == -math.inf)).any():
        return
    if problem.dropout and "v" in problem.spoilt:  # delta, from the output, has the dropped values
        return
    for name in got.keys() - {"out", "lse"}:
        compare(name, got[name], want[name], problem.only_nan, CLOSE[dtype])


@contextmanager
def running(run: str) -> Iterator[str]:
    """The backend of a run, on its level."""
    with nullcontext() if run == "reference" else levels.running(run, threads=1):
        yield "reference" if run == "reference" else "native"


ON_EVERY_CHANGE = {"causal", "window", "lengths, causal", "dense", "bias"}
"""Masks of the two sizes with many rows, whose right answer takes seconds, that are not slow."""


def _kinds_and_sizes() -> Iterator[Any]:
    for kind in MASKS:
        for size in SIZES:
            slow = size in {"prefill", "square"} and kind not in ON_EVERY_CHANGE
            yield pytest.param(kind, size, id=f"{kind}-{size}", marks=[pytest.mark.slow] * slow)


@each_run
@pytest.mark.parametrize(("kind", "size"), list(_kinds_and_sizes()))
def test_a_row_takes_only_what_it_sees(kind: str, size: str, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A NaN of a hidden key reached the rows that shared a tile with those that see it: 0 times NaN is NaN."""
    monkeypatch.setattr(reference, "SCORES_PER_BLOCK", 1 << 12)  # several blocks
    monkeypatch.setattr(reference, "MAX_ROWS", 32)
    monkeypatch.setattr(evaluated, "MASK_PAIRS", 1 << 13)
    for seed, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16)):
        problem = draw_problem(kind, size, dtype, seed)
        with running(run) as backend:
            try:
                check(problem, expected_of(kind, size, dtype, seed), backend, dtype)
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, {dtype}, {problem.options.keys()}, {problem.spoilt}") from error


CACHES = ["in place", "pages", "int8", "fp8_e5m2", "int4", "batch_invariant", "latents"]
CACHE_MASKS = {
    "causal": masks.causal("bottom_right"),
    "window": masks.window(20, 0, "bottom_right"),
    "window and first keys": masks.window(20, 0, "bottom_right") | masks.sinks(2),
}


@pytest.mark.parametrize("run", levels.here())
@pytest.mark.parametrize("mask", CACHE_MASKS)
@pytest.mark.parametrize("cache", CACHES)
def test_a_row_takes_only_what_it_sees_of_a_cache(cache: str, mask: str, run: str) -> None:
    """Several rows of decoding, a few more, and prefill, over keys that some of them do not see."""
    drawn = zip((3, 1, 7, 20), (math.nan, math.inf) * 2, (torch.bfloat16, *CLOSE), strict=True)
    for rows, value, dtype in drawn:
        make = torch.Generator().manual_seed(rows)
        length, keys, heads, kv_heads, dim = 150, 160, 4, 2, 32 if cache == "latents" else 64
        q = torch.randn(2, heads, rows, dim, generator=make).to(dtype)
        k = torch.randn(2, kv_heads, keys, dim, generator=make).to(dtype)
        v = torch.randn(2, kv_heads, keys, dim, generator=make).to(dtype)
        if cache == "latents":  # values are the first numbers of the keys
            v = k[..., :16]
        options: dict[str, Any] = {"mask": CACHE_MASKS[mask] & masks.lengths([length] * 2, [rows] * 2)}
        for token in (length - 1, length - 2, 3):
            v[0, :, token, ::3] = value
        k[:, :, length:] = math.nan
        keys_and_values = k, v
        if cache in FORMATS:
            (k, options["k_scale"]), (v, options["v_scale"]) = (
                (x.values, x.scale) for x in (quantize(x.nan_to_num(0, 0, 0), cache) for x in (k, v))
            )
            options["v_scale"][0, :, length - 2 :] = value
            keys_and_values = (
                dequantize(k, options["k_scale"], torch.float64),
                dequantize(v, options["v_scale"], torch.float64),
            )
        arguments = [q, k, v]
        options["layout"] = "bhsd"
        if cache == "batch_invariant":
            options["batch_invariant"] = True
        if cache == "pages":
            pools = [x.transpose(1, 2).reshape(-1, 16, kv_heads, x.shape[-1]).contiguous() for x in (k, v)]
            options |= {"layout": "bshd", "pages": torch.arange(2 * keys // 16, dtype=torch.int32).view(2, -1)}
            arguments = [q.transpose(1, 2), *pools]
        with levels.running(run, threads=1):
            out, lse = undivided.attention(*arguments, backend="native", return_lse=True, **options)
        out = out.transpose(1, 2) if cache == "pages" else out
        allowed = options["mask"].to_dense(2, heads, rows, keys)
        want, want_lse = row_by_row.attend(
            q.double(), keys_and_values[0].double(), keys_and_values[1].double(), allowed, row_by_row.Options()
        )
        # an infinite scale may give NaN instead of an infinity
        compare(f"out, {rows} rows, {value}, {dtype}", out, want, cache not in FORMATS, CLOSE[dtype])
        compare(f"lse, {rows} rows, {value}, {dtype}", lse, want_lse, True, CLOSE[dtype])

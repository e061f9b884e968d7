"""A case that several ranks run, gathered again: the tests of context parallelism compare it with one process."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import undivided
from undivided import masks
from undivided.arguments.layout import LAYOUTS
from undivided.context_parallel.exchange.collectives import gather_rows
from undivided.verification.budget import distance
from undivided.verification.cases import Case
from undivided.verification.inputs import Inputs, build

PLACEMENTS = ("zigzag", "contiguous", "balanced")
OFFSETS = torch.tensor([0, 9, 9, 10, 23])

MASKS = {
    "every-pair": None,
    "causal": masks.causal,
    "window": lambda: masks.window(4, 0),
    "window-both-sides": lambda: masks.window(3, 5),
    "window-with-global-keys": lambda: masks.window(3, 0) | masks.prefix(2),
    "prefix-lm": lambda: masks.causal() | masks.prefix(6),
    "chunks": lambda: masks.chunks(6) & masks.causal(),
    "lengths": lambda: masks.lengths(n := torch.tensor([17, 23]), n) & masks.causal(),
    "documents": lambda: masks.documents(OFFSETS) & masks.causal(),
    "documents-padded": lambda: masks.documents(
        cu := torch.tensor([0, 7, 12, 19]), cu, gaps := torch.tensor([0, 9, 15, 23]), gaps
    ),
    "dense": lambda: masks.dense(torch.rand(2, 1, 23, 23, generator=torch.Generator().manual_seed(5)) < 0.3),
    "predicate": lambda: masks.predicate(lambda b, h, i, j: (i - j) % (h + 2) == 0) & masks.causal(),
    "causal-bottom-right-31-keys": lambda: masks.causal(align="bottom_right"),
    "causal-top-left-31-keys": lambda: masks.causal(align="top_left"),
    "window-bottom-right-31-keys": lambda: masks.window(5, 2, align="bottom_right"),
}
HEADS = ((4, 4), (6, 2), (5, 1))


def grid() -> Iterator[tuple[Case, str]]:
    """Every mask with every placement, each in turn with another layout and grouping of heads, all combinations
    used."""
    turns = itertools.cycle(itertools.product(LAYOUTS[:3], HEADS))
    for (name, mask), placement in itertools.product(MASKS.items(), PLACEMENTS):
        layout, (heads, kv_heads) = next(turns)
        packed = name.startswith("documents")
        yield (
            Case(
                f"{name}-{placement}-{'thd' if packed else layout}-{heads}-heads-for-{kv_heads}",
                q_len=23,
                kv_len=31 if "31-keys" in name else 23,
                layout="thd" if packed else layout,
                batch=1 if packed else 2,
                heads=heads,
                kv_heads=kv_heads,
                qk_dim=8,
                v_dim=6,
                mask=mask,
                return_lse=True,
            ),
            placement,
        )


def in_double(case: Case) -> Inputs:
    """Inputs in fp64, with NaN in all memory that must not be read."""
    inputs = build(case, torch.float64, poison=True)
    small = {
        name: t.detach().double().requires_grad_(t.requires_grad)
        for name in ("bias", "sinks", "alibi_slopes")
        if (t := inputs.arguments.get(name)) is not None
    }
    return dataclasses.replace(inputs, arguments={**inputs.arguments, **small})


def alone(inputs: Inputs, **overrides: Any) -> dict[str, Tensor]:
    """out, lse and all gradients of one process."""
    leaves = {name: t.detach().clone().requires_grad_() for name, t in inputs.leaves.items()}
    found = undivided.attention(**{**inputs.arguments, **leaves, **overrides})
    return _with_gradients(found, inputs.grad_out, inputs.grad_lse, leaves)


def bound(inputs: Inputs, cp: undivided.ContextParallel) -> undivided.ContextParallel:
    """The ranks bound to the sizes and the mask of the case."""
    _, q_len, kv_len, *_ = inputs.case.sizes
    return cp.bind(q_len, None if q_len == kv_len else kv_len, inputs.arguments["mask"])


def of_rank(inputs: Inputs, cp: undivided.ContextParallel, **overrides: Any) -> dict[str, Tensor]:
    """The results of `alone`, from one rank; every rank returns the tensors of the whole."""
    cp = bound(inputs, cp) if cp.bound is None else cp
    layout, whole = inputs.case.layout, dict(inputs.arguments)
    bias = whole.get("bias")
    by_row = bias is not None and bias.dim() > 1 and bias.shape[-2] > 1
    local = {name: cp.shard(whole[name], layout, of="q" if name == "q" else "kv").detach() for name in ("q", "k", "v")}
    if by_row and bias is not None:
        local["bias"] = cp.shard(bias, dim=-2)
    leaves = {name: local.get(name, t).detach().clone().requires_grad_() for name, t in inputs.leaves.items()}
    grad_lse = None if inputs.grad_lse is None else cp.shard(inputs.grad_lse, dim=-1)
    found = undivided.attention(**{**whole, **local, **leaves, **overrides}, context_parallel=cp)
    parts = _with_gradients(found, cp.shard(inputs.grad_out, layout), grad_lse, leaves)
    together = {}
    for name, part in parts.items():
        if name in ("out", "dq", "dk", "dv"):
            together[name] = cp.unshard(part, layout, of="kv" if name in ("dk", "dv") else "q")
        elif name == "lse" or (name == "dbias" and by_row):
            together[name] = cp.unshard(part, dim=-1 if name == "lse" else -2)
        else:
            together[name] = torch.stack(everyone(cp, part)).sum(0)
    return together


def everyone(cp: undivided.ContextParallel, tensor: Tensor) -> list[Tensor]:
    """The tensor of every rank."""
    rows = tensor.detach().reshape(1, -1).contiguous()
    assert cp._axes is not None
    return [part.reshape(tensor.shape) for part in gather_rows(cp._axes, rows, [1] * cp.world)]


def differences(found: dict[str, Tensor], right: dict[str, Tensor]) -> list[str]:
    """The tensors that differ by more than a hundred roundings of fp64; two orders of the same sums differ by less."""
    assert found.keys() == right.keys()
    far = {name: distance(found[name], right[name]) for name in right}
    norms = {name: float(t[t.isfinite()].norm()) for name, t in right.items()}
    return [
        f"{name}: {far[name]:.1e} of {norms[name]:.1e}" for name in far if far[name] > 2e-14 * max(norms[name], 1.0)
    ]


def _with_gradients(
    found: Any, grad_out: Tensor, grad_lse: Tensor | None, leaves: dict[str, Tensor]
) -> dict[str, Tensor]:
    out, lse = found if isinstance(found, tuple) else (found, None)
    results = {"out": out.detach()}
    if lse is not None:
        results["lse"] = lse.detach()
    if leaves:
        outputs = [(out, grad_out)] if lse is None or grad_lse is None else [(out, grad_out), (lse, grad_lse)]
        grads = torch.autograd.grad([o for o, _ in outputs], list(leaves.values()), [g for _, g in outputs])
        results |= {f"d{name}": g for name, g in zip(leaves, grads, strict=True)}
    return results

"""A case of the catalogue run by several ranks, put together again: what the tests compare with one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import undivided
from undivided.verification.inputs import Inputs

_AXIS = {"bshd": 1, "sbhd": 0, "bhsd": 2, "thd": 0}


def alone(inputs: Inputs, **overrides: Any) -> dict[str, Tensor]:
    """out, lse and all gradients of one process."""
    leaves = {name: t.detach().clone().requires_grad_() for name, t in inputs.leaves.items()}
    found = undivided.attention(**{**inputs.arguments, **leaves, **overrides})
    return _with_gradients(found, inputs.grad_out, inputs.grad_lse, leaves)


def of_rank(inputs: Inputs, cp: undivided.ContextParallel, **overrides: Any) -> dict[str, Tensor]:
    """The same of the whole, from one rank of `cp`, which is bound: every rank returns it."""
    layout, whole = inputs.case.layout, dict(inputs.arguments)
    bias = whole.get("bias")
    by_row = bias is not None and bias.dim() > 1 and bias.shape[-2] > 1
    local = {name: cp.shard(whole[name], layout, of="q" if name == "q" else "kv") for name in ("q", "k", "v")}
    if by_row:
        local["bias"] = cp.shard(bias, dim=-2)
    leaves = {name: local.get(name, t).detach().clone().requires_grad_() for name, t in inputs.leaves.items()}
    grad_lse = None if inputs.grad_lse is None else cp.shard(inputs.grad_lse, dim=-1)
    arguments = {**whole, **local, **leaves, "dropout_seed": whole.get("dropout_seed"), **overrides}
    found = undivided.attention(**arguments, context_parallel=cp)
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
    from undivided.context_parallel.collectives import gather_rows

    assert cp._axes is not None
    return [part.reshape(tensor.shape) for part in gather_rows(cp._axes, rows, [1] * cp.world)]


def _with_gradients(
    found: Any, grad_out: Tensor, grad_lse: Tensor | None, leaves: dict[str, Tensor]
) -> dict[str, Tensor]:
    out, lse = found if isinstance(found, tuple) else (found, None)
    results = {"out": out.detach()}
    if lse is not None:
        results["lse"] = lse.detach()
    if leaves:
        outputs = [(out, grad_out)] if lse is None else [(out, grad_out), (lse, grad_lse)]
        grads = torch.autograd.grad([o for o, _ in outputs], list(leaves.values()), [g for _, g in outputs])
        results |= {f"d{name}": g for name, g in zip(leaves, grads, strict=True)}
    return results

"""Small problems, and the definition of attention, for the tests of semantics."""

from __future__ import annotations

import math
from collections.abc import Sequence

import brute_force
import torch
from brute_force import Places, Rule, error
from torch import Tensor

import undivided
from undivided import masks

NAN = math.nan


EXACT = 1e-12
"""Of float64 results: hundreds of roundings of 1e-16, and nothing of float32's 1e-7."""


BACKENDS = ("reference", "torch_flash")


TO_LAYOUT = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3), "sbhd": (2, 0, 1, 3)}


FROM_LAYOUT = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3), "sbhd": (1, 2, 0, 3)}


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64).to(dtype)


def qkv(
    batch: int = 2,
    heads: int = 2,
    q_len: int = 5,
    kv_len: int = 5,
    dim: int = 4,
    kv_heads: int | None = None,
    v_dim: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as [B, H, S, D]."""
    kv_heads = kv_heads or heads
    return (
        random(batch, heads, q_len, dim, seed=1),
        random(batch, kv_heads, kv_len, dim, seed=2),
        random(batch, kv_heads, kv_len, v_dim or dim, seed=3),
    )


def in_layout(tensor: Tensor, layout: str) -> Tensor:
    """[B, H, S, D] as a new contiguous tensor of this layout."""
    if layout == "thd":
        return tensor[0].transpose(0, 1).contiguous()
    return tensor.permute(TO_LAYOUT[layout]).contiguous()


def heads_first(tensor: Tensor, layout: str) -> Tensor:
    return tensor.transpose(0, 1).unsqueeze(0) if layout == "thd" else tensor.permute(FROM_LAYOUT[layout])


def assert_defined(
    tensors: tuple[Tensor, Tensor, Tensor],
    mask: masks.Mask | None = None,
    places: Places | None = None,
    rules: Sequence[Rule] = (),
    *,
    layout: str = "bhsd",
    backend: str = "reference",
    align: str = "top_left",
    condition: brute_force.Condition | None = None,
    tolerance: float = EXACT,
    **features: Tensor | float,
) -> None:
    """Assert that output, log-sum-exp and the gradient of every input equal the definition."""
    leaves = {name: t.clone().requires_grad_() for name, t in zip("qkv", tensors, strict=True)}
    named = {"bias": "bias", "alibi_slopes": "slopes", "sinks": "sinks"}
    fixed = {name: value for name, value in features.items() if name not in named}
    for name in named.keys() & features.keys():
        leaf = features[name]
        assert isinstance(leaf, Tensor)
        leaves[name] = leaf.clone().requires_grad_(backend == "reference")
    extras = {named[name]: leaves[name] for name in named.keys() & features.keys()}
    renamed = {"dropout_seed": "seed"}
    want, want_lse = brute_force.attend(
        leaves["q"],
        leaves["k"],
        leaves["v"],
        places,
        rules,
        condition=condition,
        align=align,
        **extras,  # type: ignore[arg-type]
        **{renamed.get(name, name): value for name, value in fixed.items()},  # type: ignore[arg-type]
    )
    with_lse = backend == "reference"  # the flash kernel has no gradient through it
    arguments = {**fixed, **{name: leaves[name] for name in named.keys() & features.keys()}}
    x = [in_layout(leaves[name], layout) for name in "qkv"]
    found = undivided.attention(*x, layout=layout, mask=mask, backend=backend, return_lse=with_lse, **arguments)  # type: ignore[call-overload]
    out, lse = found if with_lse else (found, None)
    out = heads_first(out, layout)
    assert error(out, want) < tolerance, "out"
    cotangent = random(*want.shape, seed=9)
    goal, reached = (want * cotangent).sum(), (out * cotangent).sum()
    if lse is None:
        with torch.no_grad():
            _, alone = undivided.attention(
                *x,
                layout=layout,
                mask=mask,
                backend=backend,
                return_lse=True,
                **arguments,  # type: ignore[call-overload]
            )
        assert error(alone.unsqueeze(0) if layout == "thd" else alone, want_lse) < tolerance, "lse"
    else:
        lse = lse.unsqueeze(0) if layout == "thd" else lse
        assert error(lse, want_lse) < tolerance, "lse"
        some, pull = want_lse > -math.inf, random(*want_lse.shape, seed=8)
        goal = goal + (want_lse[some] * pull[some]).sum()
        reached = reached + (lse[some] * pull[some]).sum()
    wanted = [name for name, leaf in leaves.items() if leaf.requires_grad]
    inputs = [leaves[name] for name in wanted]
    expected = torch.autograd.grad(goal, inputs, allow_unused=True, materialize_grads=True)
    for name, got, grad in zip(wanted, torch.autograd.grad(reached, inputs), expected, strict=True):
        assert error(got, grad) < tolerance * 10, f"gradient of {name}"

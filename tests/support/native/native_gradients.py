"""The native kernel's gradients compared with fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from native_oracle import SIZES
from torch import Tensor

import undivided
from undivided import masks

# Largest relative errors of the norm: fp32 some roundings, 16-bit types one of P and dS and one of the result.
ALLOWED = {torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float16: 1.5e-3}


DTYPES = pytest.mark.parametrize("dtype", ALLOWED, ids=[str(dtype).removeprefix("torch.") for dtype in ALLOWED])


def gradients(
    tensors: dict[str, Tensor],
    backend: str,
    grads: tuple[Tensor, Tensor],
    dtype: torch.dtype | None = None,
    **arguments: Any,
) -> dict[str, Tensor]:
    """The gradient of every tensor that requires one; dtype converts the inputs first."""
    used: dict[str, Any] = {}
    for name, t in tensors.items():
        used[name] = (t if dtype is None else t.to(dtype)).detach().requires_grad_(t.requires_grad)
    out, lse = undivided.attention(**used, backend=backend, return_lse=True, **arguments)
    wanted = {name: t for name, t in used.items() if t.requires_grad}
    returned = [grads[0].to(out), grads[1].to(lse)]
    found = torch.autograd.grad((out, lse), list(wanted.values()), returned)
    return dict(zip(wanted, found, strict=True))


def check(tensors: dict[str, Tensor], grads: tuple[Tensor, Tensor], **arguments: Any) -> None:
    """Against the reference in fp64, from the same rounded inputs."""
    got = gradients(tensors, "native", grads, **arguments)
    want = gradients(tensors, "reference", grads, torch.float64, **arguments)
    largest = max(float(x.norm()) for x in want.values())
    for name, x in got.items():
        assert x.dtype == tensors[name].dtype
        assert x.isfinite().all(), name
        # a difference that cancels (with one key, all of dq) is measured relative to its terms: delta is computed from
        # the rounded output
        error = float((x.double() - want[name]).norm()) / max(float(want[name].norm()), 0.3 * largest, 1e-30)
        allowed = max(ALLOWED[tensors[name].dtype], ALLOWED[tensors["q"].dtype])
        assert error < allowed, f"d{name}: {error:.1e}"


def tensors_of(size: str, dtype: torch.dtype, seed: int = 0) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor]]:
    torch.manual_seed(seed)
    b, h, n, q_len, kv_len, dk, dv = SIZES[size]
    tensors = {
        "q": torch.randn(b, h, q_len, dk),
        "k": torch.randn(b, n, kv_len, dk),
        "v": torch.randn(b, n, kv_len, dv),
    }
    tensors = {name: t.to(dtype).requires_grad_() for name, t in tensors.items()}
    return tensors, (torch.randn(b, h, q_len, dv).to(dtype), torch.randn(b, h, q_len))


def everything(dtype: torch.dtype, bias: tuple[int, ...]) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor]]:
    """Grouped heads with bias, sinks and slopes, all of which require gradients."""
    torch.manual_seed(0)
    tensors = {
        "q": torch.randn(2, 4, 70, 24),
        "k": torch.randn(2, 2, 150, 24),
        "v": torch.randn(2, 2, 150, 40),
        "bias": torch.randn(bias),
        "sinks": torch.randn(4),
        "alibi_slopes": torch.rand(4),
    }
    for name in "qkv":
        tensors[name] = tensors[name].to(dtype)
    tensors["bias"][..., 3:6] = -torch.inf if bias[-1] > 1 else 0.5
    tensors = {name: t.requires_grad_() for name, t in tensors.items()}
    return tensors, (torch.randn(2, 4, 70, 40).to(dtype), torch.randn(2, 4, 70))


def _long_values(dtype: torch.dtype) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor], dict[str, Any]]:
    """Gradients of scores that overflow fp16 with the usual scale, in some rows of one head."""
    tensors = {name: torch.randn(1, 2, 500, 64).to(dtype) for name in "qkv"}
    tensors["v"][:, 1, 300:] *= 4096
    tensors = {name: t.requires_grad_() for name, t in tensors.items()}
    return tensors, (torch.randn(1, 2, 500, 64), torch.randn(1, 2, 500)), {"mask": masks.causal()}


def native(tensors: dict[str, Tensor], grads: list[Tensor], **arguments: Any) -> dict[str, Tensor]:
    """Gradients of all of them."""
    leaves = {name: t.clone().requires_grad_() for name, t in tensors.items()}
    return gradients(leaves, "native", (grads[0], grads[1]), **arguments)

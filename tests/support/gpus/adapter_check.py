"""Adapters compared with the definition of attention: the arguments of a kernel, and the results for the caller."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from calls import call_of
from torch import Tensor

from undivided import masks
from undivided.arguments import layout as _layout
from undivided.backends import reference
from undivided.backends._base import Backend
from undivided.masks import Mask
from undivided.request.call import Call
from undivided.request.request import Tensors
from undivided.request.result import Result
from undivided.verification.cases import Case
from undivided.verification.inputs import Inputs, build

MASKS: dict[str, Callable[[], Mask | None]] = {
    "full": lambda: None,
    "causal": lambda: masks.causal("bottom_right"),
    "window-2-1": lambda: masks.window(2, 1, "bottom_right"),
    "left-only": lambda: masks.window(0, None, "bottom_right"),
    "right-only": lambda: masks.window(None, 1, "bottom_right"),
}


class Recorder:
    """Calls, in order: (name, arguments by name)."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def add(self, name: str, **arguments: Any) -> None:
        self.calls.append((name, arguments))

    def last(self, name: str) -> dict[str, Any]:
        return next(arguments for called, arguments in reversed(self.calls) if called == name)


def tensors(
    q_len: int = 5, kv_len: int = 5, layout: str = "bshd", v_dim: int = 8, heads: int = 4
) -> tuple[Tensor, ...]:
    torch.manual_seed(q_len * 100 + kv_len)
    sizes = [(q_len, heads, 8), (kv_len, 2, 8), (kv_len, 2, v_dim)]
    made = []
    for s, h, d in sizes:
        shape = {"bshd": (2, s, h, d), "bhsd": (2, h, s, d), "sbhd": (s, 2, h, d), "thd": (s, h, d)}[layout]
        made.append(torch.randn(shape, dtype=torch.float64))
    return tuple(made)


def expected(
    call: Call, given: Tensors, grad: Tensor, grad_lse: Tensor | None = None
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """(out in the call's layout, lse [B, H, S], gradients of the inputs) by the definition, from the dense mask."""
    fresh = [None if t is None else t.detach().clone().requires_grad_() for t in given]
    inputs = Tensors._make(fresh)
    allowed = call.mask.to_dense(call.problem.batch, call.problem.heads, call.problem.q_len, call.problem.kv_len)
    q, k, v = inputs.heads_first(call.problem.layout)
    group = call.problem.heads // call.problem.kv_heads
    used = allowed.any(-2)[:, ::group].unsqueeze(-1)
    k, v = (torch.where(used, t, 0.0).repeat_interleave(group, 1) for t in (k, v))
    q = torch.where(allowed.any(-1, keepdim=True), q, 0.0)
    score = call.scale * (q @ k.mT)
    if call.softcap:
        score = call.softcap * torch.tanh(score / call.softcap)
    if inputs.alibi_slopes is not None:
        form = call.normal_form(given.q)
        slopes = inputs.alibi_slopes
        slope = slopes[None, :, None] if slopes.dim() == 1 else slopes[form.q_sequence.long()].transpose(1, 2)
        distance = (form.q_position + form.shift)[:, None, :, None] - form.kv_position[:, None, None]
        score = score - slope[..., None] * distance.abs()
    if inputs.bias is not None:
        allowed = allowed & (inputs.bias != -torch.inf)
        score = score + inputs.bias
    score = score.masked_fill(~allowed, -torch.inf)
    lse = score.logsumexp(-1)
    finite = lse.masked_fill(lse == -torch.inf, 0.0)
    total = finite
    if inputs.sinks is not None:
        total = torch.logaddexp(finite, inputs.sinks[:, None])
    out = torch.exp(score - total.unsqueeze(-1)) @ v
    leaves = [t for t in fresh if t is not None]
    outputs, grads = [out], [_layout.heads_first(grad, call.problem.layout)]
    if grad_lse is not None:
        outputs, grads = [out, finite], [*grads, grad_lse]
    return (
        _layout.from_heads_first(out, call.problem.layout),
        lse,
        list(torch.autograd.grad(outputs, leaves, grads, allow_unused=True)),
    )


def check(
    module: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: str = "bshd",
    grad_lse: bool = False,
    backward: bool = True,
    **more: Any,
) -> None:
    """Forward and backward of an adapter against the definition, in the caller's layout, with strided gradients."""
    for t in (q, k, v, more.get("bias"), more.get("sinks")):
        if t is not None:
            t.requires_grad_(backward)
    call, given = call_of(q, k, v, layout=layout, device="cuda", return_lse=grad_lse, **more)
    given = Tensors._make(None if t is None else t.detach() for t in given)
    shape = (*_layout.canonical(q, layout).shape[:-1], v.shape[-1])  # type: ignore[arg-type]
    # a gradient whose strides are not the output's
    grad = _layout.from_canonical(torch.randn(*shape[:2], shape[3], shape[2], dtype=q.dtype).transpose(2, 3), layout)  # type: ignore[arg-type]
    dlse = torch.randn(shape[0], shape[2], shape[1], dtype=q.dtype) if grad_lse else None
    out, lse, grads = expected(call, given, grad, dlse)
    hidden = ~call.mask.to_dense(shape[0], shape[2], shape[1], call.problem.kv_len).any(-1).transpose(1, 2)
    # rows without keys have no gradient, whatever the output's is
    grad = _layout.from_canonical(_layout.canonical(grad, layout).masked_fill(hidden[..., None], torch.nan), layout)  # type: ignore[arg-type]
    result = module.forward(call, given)
    assert isinstance(result, Result)
    torch.testing.assert_close(result.out, out)
    torch.testing.assert_close(result.lse.to(lse.dtype), lse)
    if not backward:
        return
    found = module.backward(call, given, result, grad, dlse)
    assert len(found) == 6
    pairs = zip([g for g, t in zip(found, given, strict=True) if t is not None], grads, strict=True)
    for have, want in pairs:
        if want is not None and have is not None:
            assert have.shape == want.shape
            torch.testing.assert_close(have, want)


def build_call(case: Case) -> tuple[Call, Tensors, Inputs]:
    """A case of the catalogue in fp64, the precision of the fakes, with NaN in all memory that must not be read."""
    built = build(case, torch.float64, poison=True)
    return *call_of(**built.arguments, device="cuda"), built


def check_against_reference(backend: Backend, case: Case) -> None:
    """Output, log-sum-exp, and gradients where the case has some."""
    call, given, built = build_call(case)
    given = Tensors._make(None if t is None else t.detach() for t in given)
    backends = (reference.BACKEND, backend)
    with torch.no_grad():
        want, have = (each.forward(call, given) for each in backends)
    torch.testing.assert_close(have.out, want.out)
    torch.testing.assert_close(have.lse, want.lse)
    if "backward" in call.problem.features:
        wanted, found = (
            each.backward(call, given, result, built.grad_out, None)
            for each, result in zip(backends, (want, have), strict=True)
        )
        for name, one, other in zip(("q", "k", "v", "bias"), wanted, found, strict=False):
            if one is not None:  # the reference computes only the requested gradients, kernels all or none
                torch.testing.assert_close(other, one, msg=functools.partial("{}: {}".format, name))

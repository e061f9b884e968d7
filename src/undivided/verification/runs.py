"""One problem, run through one backend after another and held against its budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from undivided._arguments import check_tensor
from undivided._layout import Layout
from undivided._normalise import normalise
from undivided._request import Request as AttentionRequest
from undivided._result import lse_dtype
from undivided._selection import Decision
from undivided._tensors import has_dispatch
from undivided.backends._base import Backend
from undivided.errors import InputError
from undivided.functional import attention, explain
from undivided.verification.budget import Budget, budget_for
from undivided.verification.inputs import upstream
from undivided.verification.pieces import NAMES, Upstream
from undivided.verification.report import Row

__all__ = ["Outcome", "Request", "request", "run"]

Leaves = Mapping[str, Tensor | None]
_attention: Callable[..., Tensor | tuple[Tensor, Tensor]] = (
    attention  # called with dictionaries, which no overload names
)
_explain: Callable[..., Decision] = explain


@dataclass(frozen=True, eq=False)
class Request:
    """A caller's problem, ready to be run any number of times.

    tensors: the differentiable arguments by name, detached. wanted: those that need a gradient, as the caller has them.
    rest: every other argument of `attention`.
    """

    tensors: Leaves
    wanted: frozenset[str]
    rest: Mapping[str, Any]
    upstream: Upstream
    budget: Budget
    gradients: bool

    @property
    def return_lse(self) -> bool:
        """Whether the caller wants the lse, and gradients through it."""
        return bool(self.rest.get("return_lse"))


@dataclass(frozen=True)
class Outcome:
    """What became of one backend: rows if it ran, reasons for what it refused (everything, if there are no rows)."""

    rows: tuple[Row, ...]
    reasons: tuple[str, ...] = ()


def request(
    tensors: Leaves,
    layout: Layout,
    rest: Mapping[str, Any],
    gradients: bool = True,
    grads: tuple[Tensor, Tensor | None] | None = None,
) -> Request:
    """Check a problem, and compute its right answer and its budget.

    Args:
        tensors: q, k, v, bias, sinks, alibi_slopes by name; those that require a gradient are wanted.
        layout, rest: the other arguments of `attention`; with dropout the seed must be said.
        gradients: check gradients, also of tensors that require none.
        grads: upstream gradients of out and lse, as the caller gets these; random if None.

    Raises:
        InputError: as `attention`.
    """
    rest = {"layout": layout, **rest}
    detached = {name: _detached(name, tensor) for name, tensor in tensors.items()}
    known: dict[str, Any] = {name: value for name, value in rest.items() if name != "deterministic"}
    call, leaves = normalise(AttentionRequest.of(**detached, **known))
    problem, q = call.problem, leaves.q
    out = torch.empty((*q.shape[:-1], problem.v_dim), dtype=problem.dtype, device=q.device)
    shape = (problem.batch, problem.heads, problem.q_len)
    if grads is None:
        like_lse = out.new_empty(shape, dtype=lse_dtype(problem.dtype))
        grads = upstream(out), upstream(like_lse, seed=1) if rest.get("return_lse") else None
    grad_lse = None if grads[1] is None else grads[1].reshape(shape)
    up = Upstream(grads[0], grad_lse)
    wanted = frozenset(name for name, t in tensors.items() if isinstance(t, Tensor) and t.requires_grad)
    return Request(detached, wanted, rest, up, budget_for(call, leaves, up), gradients)


def _detached(name: str, tensor: Any) -> Any:
    """The tensor without its history; an inference tensor as a normal one. What is no tensor is for `normalise` to
    refuse."""
    if not isinstance(tensor, Tensor):
        return tensor
    check_tensor(name, tensor)
    if has_dispatch(tensor):
        raise InputError(name, "be a plain tensor: verify computes with its values", type(tensor).__name__)
    return tensor.clone() if tensor.is_inference() else tensor.detach()


def run(backend: Backend, asked: Request) -> Outcome:
    """Run one backend: out and the gradients that it computes, and lse.

    A backend that refuses the gradient of every tensor is asked for those the caller wants, then for none.
    """
    refusals: list[str] = []
    reasons: tuple[str, ...] = ()
    for needs in _attempts(asked):
        reasons = _objections(backend, asked, needs)
        if reasons:
            refusals.append(_refusal(needs, reasons))
            continue
        rows = _rows(backend, asked, needs)
        if not asked.return_lse:
            reasons = _objections(backend, asked, (), return_lse=True)
            rows += [] if reasons else _rows(backend, asked, (), only="lse", return_lse=True)
            refusals += [f"lse: {'; '.join(reasons)}"] if reasons else []
        return Outcome(tuple(rows), tuple(refusals))
    return Outcome((), reasons)


def _attempts(asked: Request) -> list[tuple[str, ...]]:
    """Which gradients to ask for, most first."""
    if not asked.gradients:
        return [()]
    paged = asked.rest.get("pages") is not None
    all_of_them = [name for name in NAMES if asked.tensors.get(name) is not None and not (paged and name in ("k", "v"))]
    wanted = asked.wanted or {"q", "k", "v"}
    attempts = [tuple(all_of_them), tuple(name for name in all_of_them if name in wanted), ()]
    return list(dict.fromkeys(attempts))


def _leaves(asked: Request, needs: Sequence[str]) -> dict[str, Tensor | None]:
    """The caller's tensors in their own memory, as leaves of their own."""
    return {name: None if t is None else t.detach().requires_grad_(name in needs) for name, t in asked.tensors.items()}


def _objections(backend: Backend, asked: Request, needs: Sequence[str], **changes: Any) -> tuple[str, ...]:
    """Why the backend does not run this; empty where it does."""
    decision = _explain(**_leaves(asked, needs), backend=backend.name, **{**asked.rest, **changes})
    if decision.chosen is backend:
        return ()
    return decision.reasons.get(backend.name) or ("it was not chosen and gave no reason",)


def _refusal(needs: Sequence[str], reasons: Sequence[str]) -> str:
    what = f"gradients of {', '.join(needs)}" if needs else "output"
    return f"{what}: {'; '.join(reasons)}"


def _rows(backend: Backend, asked: Request, needs: Sequence[str], only: str | None = None, **changes: Any) -> list[Row]:
    """Run with these gradients and judge all that comes back, or one quantity of it."""
    leaves, rest = _leaves(asked, needs), {**asked.rest, **changes}
    names = ["out", *(["lse"] if rest.get("return_lse") else []), *(f"d{name}" for name in needs)]
    try:
        returned = _attention(**leaves, backend=backend.name, **rest)
        outputs = [returned] if isinstance(returned, Tensor) else list(returned)
        found = dict(zip(names, [*outputs, *_gradients(outputs, leaves, needs, asked)], strict=True))
        return [_judged(backend, name, x, asked) for name, x in found.items() if only in (None, name)]
    except Exception as error:  # whatever a kernel raises is a finding
        text = f"raised {type(error).__name__}: {' '.join(str(error).split())}"
        name = only or "out"
        return [Row(backend.name, name, math.inf, asked.budget.allowed[name], text)]


def _gradients(
    outputs: list[Tensor], leaves: Leaves, needs: Sequence[str], asked: Request
) -> tuple[Tensor | None, ...]:
    if not needs:
        return ()
    grads = [asked.upstream.out]
    if len(outputs) == 2 and asked.upstream.lse is not None:
        grads.append(asked.upstream.lse.reshape(outputs[1].shape).to(outputs[1].dtype))
    wanted = [leaf for name in needs if (leaf := leaves[name]) is not None]
    return torch.autograd.grad(outputs, wanted, grads, allow_unused=True)


def _judged(backend: Backend, name: str, value: Tensor | None, asked: Request) -> Row:
    budget = asked.budget
    allowed, note = budget.allowed[name], ""
    if value is None:
        return Row(backend.name, name, math.inf, allowed, "no gradient came back")
    tensor = asked.tensors["q" if name == "out" else name[1:]] if name != "lse" else None
    dtype = lse_dtype(budget.problem.dtype) if tensor is None else tensor.dtype
    if value.dtype != dtype:
        return Row(backend.name, name, math.inf, allowed, f"{value.dtype} where {dtype} is right")
    if name != "lse" and not bool(value.isfinite().all()):
        note = "NaN or infinity"
    return Row(backend.name, name, budget.error(name, value), allowed, note)

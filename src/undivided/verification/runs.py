"""One problem, run on one backend after another and compared with its budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from undivided.arguments.checks import check_tensor
from undivided.arguments.layout import Layout
from undivided.arguments.tensors import has_dispatch
from undivided.backends._base import Backend
from undivided.errors import InputError
from undivided.functional import attention, explain
from undivided.request.normalise import normalise
from undivided.request.request import Request
from undivided.request.result import lse_dtype
from undivided.selection.decision import Decision
from undivided.verification.budget import UNDECIDED, Budget, budget_for
from undivided.verification.inputs import random_gradient
from undivided.verification.pieces import NAMES, Upstream
from undivided.verification.report import Row

__all__ = ["Outcome", "Trial", "build_trial", "run"]

NamedTensors = Mapping[str, Tensor | None]
# called with dictionaries, which no overload names
_attention: Callable[..., Tensor | tuple[Tensor, Tensor]] = attention
_explain: Callable[..., Decision] = explain


@dataclass(frozen=True, eq=False)
class Trial:
    """A problem with its right answer and its budget, to run on any number of backends.

    tensors: the differentiable arguments by name, detached. requires_grad: the names of those that require a gradient.
    rest: all other arguments of `attention`.
    """

    tensors: NamedTensors
    requires_grad: frozenset[str]
    rest: Mapping[str, Any]
    upstream: Upstream
    budget: Budget
    gradients: bool

    @property
    def return_lse(self) -> bool:
        """Whether attention returns the lse, with gradients through it."""
        return bool(self.rest.get("return_lse"))


@dataclass(frozen=True)
class Outcome:
    """The result of one backend: rows if it ran, and reasons for what it refused (everything, if there are no rows)."""

    rows: tuple[Row, ...]
    reasons: tuple[str, ...] = ()


def build_trial(
    tensors: NamedTensors,
    layout: Layout,
    rest: Mapping[str, Any],
    gradients: bool = True,
    grads: tuple[Tensor, Tensor | None] | None = None,
) -> Trial:
    """The trial of a validated problem.

    Args:
        tensors: q, k, v, bias, sinks, alibi_slopes by name.
        layout, rest: the other arguments of `attention`; with dropout, the seed is required.
        gradients: check gradients, also of tensors that do not require one.
        grads: upstream gradients of out and lse in the shapes that `attention` returns; random if None.

    Raises:
        InputError: as for `attention`.
    """
    rest = {"layout": layout, **rest}
    detached = {name: _detach(name, tensor) for name, tensor in tensors.items()}
    options: dict[str, Any] = {
        name: value for name, value in rest.items() if name not in ("deterministic", "batch_invariant")
    }
    call, leaves = normalise(Request.from_keywords(**detached, **options))
    problem, q = call.problem, leaves.q
    out = torch.empty((*q.shape[:-1], problem.v_dim), dtype=problem.dtype, device=q.device)
    shape = (problem.batch, problem.heads, problem.q_len)
    if grads is None:
        like_lse = out.new_empty(shape, dtype=lse_dtype(problem.dtype))
        grads = random_gradient(out), random_gradient(like_lse, seed=1) if rest.get("return_lse") else None
    grad_lse = None if grads[1] is None else grads[1].reshape(shape)
    grad = Upstream(grads[0], grad_lse)
    requires_grad = frozenset(name for name, t in tensors.items() if isinstance(t, Tensor) and t.requires_grad)
    return Trial(detached, requires_grad, rest, grad, budget_for(call, leaves, grad), gradients)


def _detach(name: str, tensor: Any) -> Any:
    """The tensor without its autograd history; a copy if it is an inference tensor. `normalise` refuses other types."""
    if not isinstance(tensor, Tensor):
        return tensor
    check_tensor(name, tensor)
    if has_dispatch(tensor):
        raise InputError(name, "be a plain tensor: verify computes with its values", type(tensor).__name__)
    return tensor.clone() if tensor.is_inference() else tensor.detach()


def run(backend: Backend, trial: Trial) -> Outcome:
    """The outcome of one backend: its out, the gradients that it computes, and its lse.

    A backend that refuses the gradients of all tensors is run with the required ones, and then without gradients. One
    that computes gradients is also run without them, because it may compute the output alone in another way. Of a
    quantity that several runs have, the row with the largest error counts.
    """
    refusals: list[str] = []
    reasons: tuple[str, ...] = ()
    for needs in _attempts(trial):
        reasons = _reasons(backend, trial, needs)
        if reasons:
            refusals.append(_refusal(needs, reasons))
            continue
        rows, without_gradients = _rows(backend, trial, needs), []
        if needs and not _reasons(backend, trial, ()):
            without_gradients += _rows(backend, trial, ())
        if not trial.return_lse:
            reasons = _reasons(backend, trial, (), return_lse=True)
            without_gradients += [] if reasons else _rows(backend, trial, (), return_lse=True)
            refusals += [f"lse: {'; '.join(reasons)}"] if reasons else []
        if needs:
            without_gradients = [row if row.ok else _noted(row) for row in without_gradients]
        return Outcome(_largest_errors([*rows, *without_gradients]), tuple(refusals))
    return Outcome((), reasons)


def _noted(row: Row) -> Row:
    """A row of a call without gradients, whose note says so."""
    return replace(row, note=", ".join(filter(None, [row.note, "in a call without gradients"])))


def _largest_errors(rows: Sequence[Row]) -> tuple[Row, ...]:
    """The row with the largest error of each quantity."""
    largest: dict[str, Row] = {}
    for row in rows:
        before = largest.setdefault(row.quantity, row)
        if not row.error <= before.error:
            largest[row.quantity] = row
    return tuple(largest.values())


def _attempts(trial: Trial) -> list[tuple[str, ...]]:
    """The sets of gradients to try, the largest first."""
    if not trial.gradients or trial.rest.get("k_scale") is not None:
        return [()]
    paged = trial.rest.get("pages") is not None
    names = [name for name in NAMES if trial.tensors.get(name) is not None and not (paged and name in ("k", "v"))]
    required = trial.requires_grad or {"q", "k", "v"}
    attempts = [tuple(names), tuple(name for name in names if name in required), ()]
    return list(dict.fromkeys(attempts))


def _leaves(trial: Trial, needs: Sequence[str]) -> dict[str, Tensor | None]:
    """New leaves that share the memory of the caller's tensors."""
    return {name: None if t is None else t.detach().requires_grad_(name in needs) for name, t in trial.tensors.items()}


def _reasons(backend: Backend, trial: Trial, needs: Sequence[str], **changes: Any) -> tuple[str, ...]:
    """The reasons why the backend refuses the problem; empty if it runs it."""
    decision = _explain(**_leaves(trial, needs), backend=backend.name, **{**trial.rest, **changes})
    if decision.chosen is backend:
        return ()
    return decision.reasons.get(backend.name) or ("it was not chosen and gave no reason",)


def _refusal(needs: Sequence[str], reasons: Sequence[str]) -> str:
    subject = f"gradients of {', '.join(needs)}" if needs else "output"
    return f"{subject}: {'; '.join(reasons)}"


def _rows(backend: Backend, trial: Trial, needs: Sequence[str], **changes: Any) -> list[Row]:
    """The rows of a run with these gradients."""
    leaves, rest = _leaves(trial, needs), {**trial.rest, **changes}
    names = ["out", *(["lse"] if rest.get("return_lse") else []), *(f"d{name}" for name in needs)]
    try:
        returned = _attention(**leaves, backend=backend.name, **rest)
        outputs = [returned] if isinstance(returned, Tensor) else list(returned)
        quantities = dict(zip(names, [*outputs, *_gradients(outputs, leaves, needs, trial)], strict=True))
        rows = [_row(backend, name, x, trial) for name, x in quantities.items()]
    except Exception as error:  # whatever a kernel raises is a failed row
        text = f"raised {type(error).__name__}: {' '.join(str(error).split())}"
        name = "lse" if changes.get("return_lse") else "out"
        rows = [Row(backend.name, name, math.inf, trial.budget.max_errors[name], text)]
    return rows


def _gradients(
    outputs: list[Tensor], leaves: NamedTensors, needs: Sequence[str], trial: Trial
) -> tuple[Tensor | None, ...]:
    if not needs:
        return ()
    grads = [trial.upstream.out]
    if len(outputs) == 2 and trial.upstream.lse is not None:
        grads.append(trial.upstream.lse.reshape(outputs[1].shape).to(outputs[1].dtype))
    required = [leaf for name in needs if (leaf := leaves[name]) is not None]
    return torch.autograd.grad(outputs, required, grads, allow_unused=True)


def _row(backend: Backend, name: str, value: Tensor | None, trial: Trial) -> Row:
    budget = trial.budget
    limit, note = budget.max_errors[name], ""
    if value is None:
        return Row(backend.name, name, math.inf, limit, "no gradient was returned")
    tensor = trial.tensors["q" if name == "out" else name[1:]] if name != "lse" else None
    dtype = lse_dtype(budget.problem.dtype) if tensor is None else tensor.dtype
    if value.dtype != dtype:
        return Row(backend.name, name, math.inf, limit, f"dtype {value.dtype}, expected {dtype}")
    if name in budget.undecided:
        note = UNDECIDED
    elif name != "lse" and not bool(value.isfinite().all()):
        note = "NaN or infinity"
    elif budget.has_lost_rows(name, value):
        note = "a row that must not be 0 is 0"
    return Row(backend.name, name, budget.error(name, value), limit, note, name in budget.undecided)

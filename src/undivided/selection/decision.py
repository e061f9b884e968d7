"""Which backend runs a problem, and why not the others: a pure function of (Problem, Machine, Policy).

The outcome is a `Decision`. The log, ``explain()`` and the command line all print this one object; the error has it.

Candidates are tried in the caller's order, if there is one, then by rank. If two or more that can run were measured
on such a problem (`selection.measured`), they are sorted among their places, the fastest first; the others keep theirs.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from undivided._bounded import Bounded
from undivided.arguments.checks import check_type
from undivided.arguments.graphs import outside_of_graphs
from undivided.backends import all_backends, has_name
from undivided.backends._base import Backend
from undivided.errors import NoBackendError
from undivided.machine import Machine
from undivided.request.problem import Problem
from undivided.selection import log
from undivided.selection import measured as _measured
from undivided.selection.order import default_rank
from undivided.selection.policy import Policy

DEFAULT_RANK = "default rank"
"""The start of the note on a backend that was not measured on such a problem."""


@dataclass(frozen=True)
class Verdict:
    """The result of selection for one backend. Without reasons it can run; `note` then explains why it was not chosen.

    estimate: its time by a benchmark; None if it cannot run, or was not measured on such a problem.
    """

    backend: Backend
    reasons: tuple[str, ...]
    note: str = ""
    estimate: _measured.Estimate | None = None

    @property
    def can_run(self) -> bool:
        """Whether it has no reason to refuse."""
        return not self.reasons


@dataclass(frozen=True, eq=False)
class Decision:
    """The chosen backend, and the reasons against every other.

    ``decision.backend`` is the one that runs, ``decision.reasons`` maps every other name to its reasons,
    ``str(decision)`` is the table. ``decision.verdicts`` has all backends in the order in which they were tried, with
    estimates of time if they were measured. `undivided.explain` returns one.

    Args:
        problem: sizes, dtype, mask structure and features, without tensors.
        machine: the machine that it is for.
        policy: what the caller allows.
        chosen: the backend that runs; None if none may.
        notes: what the backend found in the tensors' values, such as the keys that sequences share.

    >>> import torch, undivided
    >>> q = torch.randn(1, 8, 2, 16)
    >>> decision = undivided.explain(q, q, q, layout="bshd", backend="reference")
    >>> decision.backend.name, decision.reasons["reference"], decision.reasons["torch_flash"][0]
    ('reference', (), "not requested: backend='reference'")
    """

    problem: Problem
    machine: Machine
    policy: Policy
    chosen: Backend | None
    notes: tuple[str, ...] = ()

    @property
    def backend(self) -> Backend:
        """The backend that runs.

        Raises:
            NoBackendError: there is none.
        """
        if self.chosen is None:
            raise NoBackendError(self, self._refusal())
        return self.chosen

    @cached_property
    def verdicts(self) -> tuple[Verdict, ...]:
        """Every backend in the order it was tried, with its reasons. Built when first read."""
        return _verdicts(self)

    @property
    def reasons(self) -> dict[str, tuple[str, ...]]:
        """Reasons by backend name. The chosen one has none; one that could run has a note with its rank."""
        return {v.backend.name: v.reasons or ((v.note,) if v.note else ()) for v in self.verdicts}

    def standing(self, verdict: Verdict) -> str:
        """Why a backend that can run has its place in the order.

        Args:
            verdict: one of `verdicts`.

        Returns:
            Its estimate, or a note on its default rank; "" if it cannot run or the caller gave the order. If two
            backends or more have estimates, their ranks are measured, and it says so.

        Raises:
            InputError: it is not a `Verdict`.
        """
        check_type("verdict", verdict, Verdict, "one of the decision's verdicts")
        if not verdict.can_run:
            return ""
        if verdict.estimate is not None:
            compared = sum(other.estimate is not None for other in self.verdicts) > 1
            foreign = _measured.is_foreign(verdict.estimate.run, self.problem.device, self.machine)
            rank = f"measured rank{', another vendor' if foreign else ''}: "
            return f"{rank if compared else ''}{verdict.estimate}"
        if self.policy.forced is not None or self.policy.allowed is not None:
            return ""
        architecture = _measured.architecture(self.problem.device, self.machine) or "this machine"
        return f"{DEFAULT_RANK}: no measurement near this problem on {architecture}"

    def _verdict(self, backend: Backend) -> Verdict:
        reasons = tuple(_reasons_against(backend, self.problem, self.machine, self.policy))
        if reasons:
            return Verdict(backend, reasons)
        entry = _measured.nearest(self.problem, self.machine)
        estimate = _measured.estimate(entry, backend.name, self.problem)
        note = f"can run, ranked after {self.chosen.name if self.chosen else 'none'}"
        return Verdict(backend, (), "" if backend is self.chosen else note, estimate)

    def __str__(self) -> str:
        return self._table(self.verdicts)

    def _refusal(self) -> str:
        """The text of the error: of a requested backend its own reasons, and the names of those that could run."""
        forced = self.policy.forced
        others = replace(self, policy=self.policy._replace(forced=None)).verdicts
        could_run = ", ".join(verdict.backend.name for verdict in others if verdict.can_run)
        if forced is None or not could_run:
            return str(self)
        requested = [verdict for verdict in self.verdicts if has_name(verdict.backend, forced)]
        return self._table(requested, f"  could run: {could_run}")

    def _table(self, verdicts: Sequence[Verdict], *more: str) -> str:
        """The problem, the machine, these verdicts, more lines, and a hint."""
        head = f"{self.chosen.name} runs" if self.chosen else "no backend can run this problem"
        lines = [
            head,
            f"  problem: {self.problem}",
            f"  machine: {self.machine}",
            *(f"  note: {n}" for n in self.notes),
        ]
        width = max(len(v.backend.name) for v in verdicts)
        for verdict in verdicts:
            name, backend = verdict.backend.name.ljust(width), verdict.backend
            texts = verdict.reasons or (verdict.note or f"chosen ({backend.family})",)
            if standing := self.standing(verdict):
                texts = (f"{texts[0]}; {standing}",)
            for i, reason in enumerate(texts):
                lines.append(f"  {name if i == 0 else ' ' * width}  {reason}")
        lines += more
        if self.chosen is None and self.policy.forced is not None:
            lines.append(
                f"  HINT: an explicit backend={self.policy.forced!r} never falls back; leave it out "
                f"to let selection choose"
            )
        return "\n".join(lines)


def select(problem: Problem, machine: Machine, policy: Policy) -> Decision:
    """The Decision for a problem. A repeated problem takes a dictionary look-up.

    Raises:
        NoBackendError: no allowed backend can run it; the error has the Decision.
    """
    key = (id(problem), id(policy), id(machine))  # hashing their contents would cost as much as the rest
    cached = _decisions.get(key)
    if cached is None:
        cached = problem, policy, machine, _select_by_class(problem, machine, policy)
        _decisions[key] = cached
    _last.decision = decision = cached[-1]
    return decision


def set_last(decision: Decision) -> None:
    """Make an earlier decision of `select` that of this thread's last call too."""
    _last.decision = decision


class _Last(threading.local):
    decision: Decision | None = None


_last = _Last()


def last_decision() -> Decision | None:
    """The Decision of the last call of this thread: which backend ran, and why not the others.

    Set by every call that selects: `attention`, `scaled_dot_product_attention`, the layers, the caches, and compiled
    graphs when they run. `explain`, and a call that raises `NoBackendError`, do not change it. Under context
    parallelism it is the Decision for the last piece of work of the rank. Under torch.func and forward-mode
    differentiation the reference's operations run, whatever was decided.

    Returns:
        The `Decision`; None before the thread's first call.

    >>> import torch, undivided
    >>> q = torch.randn(1, 8, 2, 16)
    >>> out = undivided.attention(q, q, q, layout="bshd", backend="reference")
    >>> undivided.last_decision().backend.name
    'reference'
    """
    decision = _last.decision
    if decision is None or decision.chosen is None:
        return decision
    notes = decision.chosen.last_notes(decision.problem)
    return replace(decision, notes=tuple(notes)) if notes else decision


def decide(problem: Problem, machine: Machine, policy: Policy) -> Decision:
    """The Decision for exactly this problem, also if no backend can run it. Caches nothing and raises nothing."""
    problem = _with_demands(problem, policy)
    for backend in _in_order(problem, machine, policy):
        if not _reasons_against(backend, problem, machine, policy):
            return Decision(problem, machine, policy, backend)
    return Decision(problem, machine, policy, None)


def _with_demands(problem: Problem, policy: Policy) -> Problem:
    """The problem with the policy's demands on its result."""
    if policy.deterministic and not problem.deterministic:
        problem = problem._replace(deterministic=True)
    if policy.batch_invariant and not problem.batch_invariant:
        problem = problem._replace(batch_invariant=True)
    return problem


def selection_key(problem: Problem) -> Problem:
    """The problem with its lengths reduced to what a backend may read of them, so that decoding shares decisions.

    These are: the value up to 16, the divisibility by 8 to 64, the powers of two around it, and which of query and key
    length is larger. `Backend.reasons` must read nothing else.
    """
    q_len, kv_len = length_class(problem.q_len), length_class(problem.kv_len)
    order = (problem.q_len > problem.kv_len) - (problem.q_len < problem.kv_len)
    documents = problem.documents
    if documents is not None:
        count, max_q, max_kv = documents
        documents = (length_class(count), _maybe_class(max_q), _maybe_class(max_kv))
    # a class is an int that represents similar lengths; the comparison of the two is added to the class of q_len
    return problem._replace(q_len=q_len * 4 + order, kv_len=kv_len, documents=documents)


def length_class(length: int) -> int:
    """A number that is the same for lengths between which no backend may tell the difference."""
    if length <= 16:
        return length
    alignment = min(length & -length, 64)
    return (length - 1).bit_length() * 1024 + alignment


def _maybe_class(length: int | None) -> int | None:
    return None if length is None else length_class(length)


@outside_of_graphs
def _verdicts(decision: Decision) -> tuple[Verdict, ...]:
    order = _in_order(decision.problem, decision.machine, decision.policy)
    return tuple(decision._verdict(backend) for backend in order)


_decisions: Bounded[object, tuple[Problem, Policy, Machine, Decision]] = Bounded(4096)
"""Keys are the ids of problem, policy and machine, which are kept alive here so that their ids stay unique."""
_by_class: Bounded[object, Decision] = Bounded(4096)


def _select_by_class(problem: Problem, machine: Machine, policy: Policy) -> Decision:
    key = (selection_key(problem), policy, id(machine))
    cached = _by_class.get(key)
    if cached is not None and cached.machine is machine:
        return Decision(_with_demands(problem, policy), machine, policy, cached.chosen)
    decision = decide(problem, machine, policy)
    name = "no backend" if decision.chosen is None else decision.chosen.name
    log.log(decision, f"{name} for {problem}", policy.log)
    if decision.chosen is None:
        raise NoBackendError(decision, decision._refusal())
    _by_class[key] = decision
    return decision


def _in_order(problem: Problem, machine: Machine, policy: Policy) -> Sequence[Backend]:
    """Backends in the order to try: that of the caller, then by default rank; measured ones then change places."""

    def callers_order(backend: Backend) -> tuple[bool, int]:
        return _place_by_caller(backend, policy)

    order = sorted(all_backends(), key=lambda b: (callers_order(b), default_rank(b, problem, machine)))
    entry = _measured.nearest(problem, machine)
    if entry is None:
        return order
    measured = [b for b in order if b.name in entry.rates and not _reasons_against(b, problem, machine, policy)]
    by_name = {backend.name: backend for backend in measured}
    tie = _measured.tie(entry, problem.device, machine)
    by_speed: list[Backend] = []
    for _, equals in itertools.groupby(measured, key=callers_order):
        names = _measured.fastest_first([backend.name for backend in equals], entry.rates, tie)
        by_speed += [by_name[name] for name in names]
    next_measured = iter(by_speed)
    return [next(next_measured) if backend in measured else backend for backend in order]


def _place_by_caller(backend: Backend, policy: Policy) -> tuple[bool, int]:
    """The place of a backend in the caller's order, lowest first: a requested one, then those of the caller's list."""
    listed = policy.allowed or ()
    place = next((n for n, word in enumerate(listed) if has_name(backend, word)), len(listed))
    return policy.forced is not None and not has_name(backend, policy.forced), place


def _reasons_against(backend: Backend, problem: Problem, machine: Machine, policy: Policy) -> list[str]:
    """Every reason against this backend: those of the policy, then its own."""
    from_policy = []
    is_forced = policy.forced is not None and has_name(backend, policy.forced)
    if policy.forced is not None and not is_forced:
        from_policy.append(f"not requested: backend={policy.forced!r}")
    if policy.allowed is not None and not any(has_name(backend, word) for word in policy.allowed):
        from_policy.append(f"not among {policy.allowed_by}={','.join(policy.allowed)}")
    from_policy += [f"switched off by {who}" for word, who in policy.disabled if has_name(backend, word)]
    reasons = from_policy + backend.reasons(problem, machine)
    is_named = is_forced or (policy.allowed is not None and backend.name in policy.allowed)
    if not reasons and not is_named and (why := backend.only_when_asked(problem, machine)):
        reasons.append(why)
    return reasons

"""Request -> Call and its Decision: the first step of every entry point."""

from __future__ import annotations

from dataclasses import replace

from undivided.machine import Machine
from undivided.request.call import Call
from undivided.request.normalise import normalise
from undivided.request.request import Request, Tensors
from undivided.request.seed import draw_seed
from undivided.selection.decision import Decision, decide, select
from undivided.selection.policy import Policy


def prepare(request: Request, policy: Policy, needs: tuple[bool, ...] | None = None) -> tuple[Decision, Call, Tensors]:
    """(decision, call, tensors) of a request on the machine that its tensors are on.

    Args:
        request: the arguments of the caller.
        policy: the backends that the caller allows.
        needs: which of the tensors need a gradient; None reads requires_grad, which a compiled graph does not have.

    Returns:
        The decision, the call for its backend, and the call's tensors.

    Raises:
        InputError: an argument is wrong.
        NoBackendError: no allowed backend can run it.
    """
    call, tensors = normalise(request, needs=needs)
    q = tensors.q
    machine = Machine.this() if q.is_cpu else Machine.this(q.device)
    decision = select(call.problem, machine, policy)
    call.problem = decision.problem
    if call.dropout_p and call.dropout_seed is None:  # not before: a call that is refused leaves the generator as it is
        call.dropout_seed = draw_seed(q.device)
    return decision, call, tensors


def decide_request(request: Request, machine: Machine, policy: Policy, device: str | None) -> Decision:
    """The decision for a request, also if no backend can run it.

    Args:
        request, policy: as for `prepare`; the tensors may be on the meta device.
        machine: the machine to decide for.
        device: replaces the device of the tensors; None keeps it.
    """
    call, tensors = normalise(request, device=device)
    decision = decide(call.problem, machine, policy)
    if decision.chosen is None or not machine.probed:
        return decision
    return replace(decision, notes=tuple(decision.chosen.notes(call, tensors)))

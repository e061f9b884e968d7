"""Request -> Call and its Decision: what every entry point does before it runs anything."""

from __future__ import annotations

from undivided.machine import Machine
from undivided.request.call import Call
from undivided.request.normalise import normalise
from undivided.request.request import Request, Tensors
from undivided.selection.decision import Decision, decide, select
from undivided.selection.policy import Policy


def prepare(request: Request, allowed: Policy, needs: tuple[bool, ...] | None = None) -> tuple[Decision, Call, Tensors]:
    """Check the request and choose a backend of the machine that its tensors are on.

    Args:
        request: as the caller wrote it.
        allowed: the backends that the caller allows.
        needs: which of the tensors need a gradient, if they do not say so themselves (inside a compiled graph).

    Returns:
        The decision, the call for its backend, and the call's tensors.

    Raises:
        InputError: naming the argument that is wrong.
        NoBackendError: no allowed backend can run it.
    """
    call, tensors = normalise(request, needs=needs)
    q = tensors.q
    machine = Machine.this() if q.is_cpu else Machine.this(q.device)
    decision = select(call.problem, machine, allowed)
    call.problem = decision.problem
    return decision, call, tensors


def explained(request: Request, machine: Machine, allowed: Policy, device: str | None) -> Decision:
    """The decision alone, also if no backend can run the request.

    Args:
        request, allowed: as for `prepare`; the tensors may be on the meta device.
        machine: where it would run.
        device: replaces that of the tensors; None keeps it.
    """
    call, _ = normalise(request, device=device)
    return decide(call.problem, machine, allowed)

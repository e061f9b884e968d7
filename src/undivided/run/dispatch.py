"""Calls that are not prepared and run directly: torch.compile, dispatch modes, tensor subclasses and other ranks handle
them first.

    torch.compile, dispatch modes, tensor subclasses   one opaque operator (`compile`)
    DTensors                                           the call on what each rank holds (`dtensors`)
    context_parallel=                                  the ranks of the context

All other calls bypass this module: `attention` prepares and runs them at once.
"""

from __future__ import annotations

from typing import Protocol, cast

import torch

from undivided.arguments.graphs import is_unknown
from undivided.arguments.tensors import is_observed, jit_trace
from undivided.errors import InputError
from undivided.machine import Machine
from undivided.request.normalise import check_fake_request
from undivided.request.request import Options, Request
from undivided.request.result import Output
from undivided.run import autograd, compile
from undivided.run.dtensors import has_dtensors, local_request
from undivided.run.prepare import prepare
from undivided.selection import switches as _sdp_switches
from undivided.selection.decision import Decision
from undivided.selection.policy import current_policy


class ContextParallelLike(Protocol):
    """The part of `undivided.ContextParallel` that `attention` calls: nothing below it imports process groups."""

    def attention(self, request: Request) -> Output:
        """The result for this rank's tokens."""

    def explain(self, request: Request, machine: Machine, device: str | None) -> Decision:
        """The decision for this rank's largest piece of work."""

    def groups_for_dtensors(self) -> list[list[int]]:
        """The global ranks of each of its groups; InputError if ranks hold different numbers of tokens."""


def attention(request: Request, switches: str | None = None) -> Output:
    """The result of a request for which `is_observed` is True, or that torch.compile traces.

    switches: PyTorch's, for a call that depends on them.
    """
    if not has_dtensors(request):
        return _observed(request, switches)
    local, part = local_request(request)
    q, k, v, *others = local.tensors
    if torch.compiler.is_compiling() or is_observed(q, k, v, local.options.mask, *others):
        return part.result(_observed(local, switches))
    return part.result(_run_directly(local, switches))


def untraced_attention(request: Request) -> Output:
    """The result of a request that torch.compile must not see, because it could not trace a caller."""
    from undivided.arguments import _graph_break

    return cast(Output, _graph_break.call(_run_directly, (request, None), {}))


def context_attention(request: Request, context: ContextParallelLike) -> Output:
    """The result of a request over the ranks of a context."""
    if not has_dtensors(request):
        return context.attention(request)
    local, part = local_request(request, context.groups_for_dtensors())
    return part.result(context.attention(local))


def _observed(request: Request, switches: str | None) -> Output:
    """The result by the operator; with tangents by plain operations, which a mode sees."""
    if torch.compiler.is_compiling():
        if (name := _unknown_number(request.options)) is not None:
            return _break_graph(request, switches, name)
        return compile.attention(request, switches)
    if jit_trace() is None:  # sizes are tensors while it records
        check_fake_request(request)
    if autograd.has_tangent(request.tensors):
        return _run_directly(request, switches)
    return compile.attention(request, switches)


def _unknown_number(options: Options) -> str | None:
    """The name of a number that is the value of a tensor, which no graph has as a constant; None if there is none."""
    for name, number in (("scale", options.scale), ("softcap", options.softcap), ("dropout_p", options.dropout_p)):
        if is_unknown(number):
            return name
    return None


def _break_graph(request: Request, switches: str | None, name: str) -> Output:
    """The result outside of the graph, as of PyTorch's function; InputError if nothing can run while it is recorded."""
    if torch.compiler.is_dynamo_compiling():
        from undivided.arguments import _graph_break

        return cast(Output, _graph_break.call(_run_directly, (request, switches), {}))
    must = "be known while a program is recorded"
    hint = "scale=1.0 and q * scale" if name == "scale" else f"{name}=0.5, for example: it is a constant of the program"
    raise InputError(name, must, "the value of a tensor", hint=hint)


def _run_directly(request: Request, switches: str | None) -> Output:
    """The result of a backend, without the operator."""
    switches = _sdp_switches.read() if switches == "" else switches or ""
    policy = current_policy(request.backend, request.deterministic, request.batch_invariant, switches)
    decision, call, tensors = prepare(request, policy)
    return autograd.run(decision.backend, call, tensors)

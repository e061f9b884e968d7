"""Tensors as the native kernel reads them: in memory, at their pointers."""

from __future__ import annotations

from torch import Tensor

from undivided.arguments.tensors import materialise
from undivided.errors import InputError
from undivided.request.call import Call
from undivided.request.request import Tensors


def require_memory(tensor: Tensor) -> Tensor:
    """The tensor if its values are at its pointer; a copy if it is a negated view or a zero tensor without memory.

    Raises:
        InputError: its values are not at its pointer (fake tensors, wrappers), or it is not on the CPU.
    """
    try:
        if tensor.is_cpu and (tensor._is_zerotensor() or tensor.data_ptr() or not tensor.numel()):
            return materialise(tensor)
    except (NotImplementedError, RuntimeError):  # raised if it has no pointer
        pass
    kind = type(tensor).__name__
    raise InputError(
        "a tensor of the call",
        "lie in memory for the native kernel",
        f"a {kind} on {tensor.device} without memory",
        hint="it is a fake tensor or a wrapper: call outside of the mode that created it, or unwrap it",
    )


def as_kernel_sinks(sinks: Tensor | None) -> Tensor | None:
    """Sinks as the kernel reads them: fp32, contiguous, in memory. The caller must keep this tensor alive."""
    return None if sinks is None else require_memory(sinks.detach()).float().contiguous()


def with_addresses(tensors: Tensors) -> tuple[Tensors, tuple[int, int, int]]:
    """The tensors, and the addresses of q, k and v. The caller must keep these tensors alive: some may be copies."""
    q, k, v = tensors.q, tensors.k, tensors.v
    addresses = q.data_ptr(), k.data_ptr(), v.data_ptr()
    if 0 not in addresses and not (q.is_neg() or k.is_neg() or v.is_neg()):
        return tensors, addresses
    q, k, v = require_memory(q), require_memory(k), require_memory(v)
    return tensors._replace(q=q, k=k, v=v), (q.data_ptr(), k.data_ptr(), v.data_ptr())


def contiguous_groups(call: Call) -> Call:
    """The call, with scales of int4 whose last axis has stride 1, in memory."""
    k_scale, v_scale = call.k_scale, call.v_scale
    assert k_scale is not None and v_scale is not None
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        readable = require_memory(scale)
        if call.problem.quantized == "int4" and readable.stride(-1) != 1:
            readable = readable.contiguous()
        if readable is not scale:
            call = call.with_problem(call.problem, **{name: readable})
    return call

"""The scales of quantised keys and values, as the kernel reads them."""

from __future__ import annotations

from undivided.backends.native.call import require_memory
from undivided.request.call import Call


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

"""PyTorch's switches for scaled_dot_product_attention, as limits on the families of backends.

    torch.backends.cuda.enable_flash_sdp, enable_mem_efficient_sdp, enable_cudnn_sdp, enable_math_sdp
    torch.nn.attention.sdpa_kernel([...], set_priority=False)

Each switch is for one of PyTorch's kernels and applies to the families of the same kind here. Their state is a short
string, which can be a dictionary key and a constant of a compiled graph: a letter for each switch that is off, and
after a colon the order that set_priority gave. "" is PyTorch's default, and ":" the same as the state of a graph.
"""

from __future__ import annotations

import sys

import torch
from torch.backends import cuda
from torch.nn import attention

# letter, PyTorch's number of the kernel (torch.nn.attention.SDPBackend), families, what switches it off
_SWITCHES = (
    ("f", 1, ("flash", "flex"), "flash"),
    ("e", 2, ("efficient",), "mem_efficient"),
    ("c", 3, ("fused",), "cudnn"),
    ("m", 0, ("math",), "math"),
)
_FAMILIES = {str(number): families for _, number, families, _ in _SWITCHES}
_DEFAULT_ORDERS = ([1, 2, 0, 3, 4], [3, 1, 2, 0, 4])
"""PyTorch's own, the second where it prefers cuDNN (Hopper and later); any other was requested."""
_ALL_ON = ":"


def read() -> str:
    """The current state of the switches; inside torch.compile, the state during tracing."""
    # in the order of `_SWITCHES`
    state = (
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        cuda.math_sdp_enabled(),
    )
    order = torch._C._get_sdp_priority_order()
    if all(state) and order in _DEFAULT_ORDERS:
        return ""
    off = "".join(letter for (letter, *_), is_on in zip(_SWITCHES, state, strict=True) if not is_on)
    return off + ":" + ("" if order in _DEFAULT_ORDERS else "".join(map(str, order)))


def read_for_graph() -> str:
    """The state that a graph keeps; "" if the graph is to read the state whenever it runs.

    Dynamo enters an `sdpa_kernel` of the compiled function while it traces, with a node of the graph: its state belongs
    to the function. Without such a node the state comes from outside, and may be another one at the next call.
    """
    dynamo = sys.modules.get("torch._dynamo.symbolic_convert")
    try:
        tracers = dynamo.InstructionTranslator.current_tx().output.tracers  # type: ignore[union-attr]
    except AttributeError:  # not traced by Dynamo
        return read()
    inside = any(node.target is attention._sdpa_kernel for tracer in tracers for node in tracer.graph.nodes)
    return (read() or _ALL_ON) if inside else ""


# assume_constant_result, without importing the compiler
read._dynamo_marked_constant = True  # type: ignore[attr-defined]
read_for_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]


def disabled(state: str) -> tuple[tuple[str, str], ...]:
    """(family, the setting) for every family that is off."""
    off = state.partition(":")[0]
    return tuple(
        (family, f"sdpa_kernel or torch.backends.cuda.enable_{switch}_sdp(False)")
        for letter, _, families, switch in _SWITCHES
        if letter in off
        for family in families
    )


def order(state: str) -> tuple[str, ...]:
    """The families in the order that set_priority gave, or () if it was not used."""
    return tuple(family for number in state.partition(":")[2] for family in _FAMILIES.get(number, ()))

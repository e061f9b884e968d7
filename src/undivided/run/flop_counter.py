"""Formulas for PyTorch's FlopCounterMode: the products of all pairs, whatever the mask, as for PyTorch's attention."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from undivided.arguments import layout as _layout
from undivided.arguments.modes import without_modes
from undivided.request.flops import backward_flops, forward_flops
from undivided.request.problem import Problem
from undivided.run.operator_arguments import Arguments, BackwardArguments, Spec


def register_if_counting() -> None:
    """Register the formulas if the counter has been imported; importing it here would cost every program.

    A counter copies the formulas when it is created; one that was created before the registration gets them here.
    """
    if "torch.utils.flop_counter" not in sys.modules:
        return
    formulas = _register()
    for counter in _counters():
        counter.flop_registry.update(formulas)


def counted_attention(problem: Problem, pairs: int, *, is_backward: bool = False) -> AbstractContextManager[None]:
    """A context whose operations are counted as attention over so many pairs of a query and a key, in all heads."""
    if not torch._C._len_torch_dispatch_stack():
        return nullcontext()
    operator, flops = ("attention_backward", backward_flops) if is_backward else ("attention", forward_flops)
    return _counted(operator, flops(pairs, problem.qk_dim, problem.v_dim))


@contextmanager
def _counted(operator: str, flops: float) -> Iterator[None]:
    """A context whose operations are counted as those of one operator of `torch.ops.undivided`, and not by themselves:
    a counter sees what some backends compute, and not what others do."""
    for counter in _counters():
        for module in set(counter.mod_tracker.parents):
            counter.flop_counts[module][getattr(torch.ops.undivided, operator)] += int(flops)
    with without_modes(_is_counter):
        yield


def _counters() -> list[Any]:
    """The active FlopCounterModes."""
    modes: list[Any] = _get_current_dispatch_mode_stack()
    return [mode.counter for mode in modes if _is_counter(mode)]


def _is_counter(mode: TorchDispatchMode) -> bool:
    """Whether it is the mode that a FlopCounterMode enters."""
    return hasattr(getattr(mode, "counter", None), "flop_registry")


@functools.cache
def _register() -> dict[Any, Any]:
    """The formulas of both operators, registered with PyTorch."""
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    operators = torch.ops.undivided
    register_flop_formula(operators.attention)(_forward)
    register_flop_formula(operators.attention_backward)(_backward)
    return {operator: flop_registry[operator] for operator in (operators.attention, operators.attention_backward)}


def _forward(*arguments: Any, **_: Any) -> int:
    """FLOPs of a forward pass. The counter passes the operator's arguments, with shapes in place of tensors."""
    shapes: Any = Arguments(*arguments)
    is_int4 = shapes.v_scale is not None and len(shapes.v_scale) == len(shapes.v)  # two numbers in each byte of v
    return int(forward_flops(_pairs(shapes), shapes.q[-1], shapes.v[-1] * (2 if is_int4 else 1)))


def _backward(*arguments: Any, **_: Any) -> int:
    """FLOPs of a backward pass."""
    shapes: Any = BackwardArguments.read(arguments).of_forward
    return int(backward_flops(_pairs(shapes), shapes.q[-1], shapes.v[-1]))


def _pairs(shapes: Any) -> int:
    """Number of pairs of a query and a key, in all heads."""
    layout: Any = Spec.read(shapes.spec).layout
    batch, q_len, heads, _ = _layout.sizes(shapes.q, layout)
    kv_len = _layout.sizes(shapes.k, layout)[1] if shapes.pages is None else shapes.pages[1] * shapes.k[1]
    return int(batch * heads * q_len * kv_len)

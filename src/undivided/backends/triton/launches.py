"""Launches of Triton kernels, remembered: everything but the tensors of a call is computed and looked up once.

A launch through Triton's own interface costs the host more than many of these kernels take: about a hundred arguments
are collected, bound by name and specialised each time. A remembered launch is a list of arguments in which only the
tensors are replaced, passed to the compiled kernel.

Triton specialises a kernel on the alignment of each pointer and on the values of its other arguments. Both are decided
by the key of a launch: facts that the caller names, and the dtypes, sizes, strides and alignment of its tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor

from undivided._bounded import Bounded

ALIGNMENT = 16
"""Bytes: Triton compiles a kernel for pointers that are multiples of this, and another for others."""


class Launch(NamedTuple):
    """A compiled kernel and its programs, its arguments in the order of its parameters, and the names of the tensors
    among them by place."""

    compiled: Any
    grid: tuple[int, int, int]
    arguments: list[Any]
    tensors: tuple[tuple[int, str], ...]

    def run(self, given: Mapping[str, Any]) -> None:
        """Launch the kernel with these tensors, or objects in place of them, by name."""
        values = self.arguments.copy()
        for place, name in self.tensors:
            values[place] = given[name]
        self.compiled[self.grid](*values)


Key = tuple[int, tuple[int, int, int], tuple[Hashable, ...], tuple[tuple[Hashable, ...], ...]]
_launches: Bounded[Key, Launch] = Bounded(1024)
"""Remembered launches: a model has a few per kind of layer and length."""


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    facts: tuple[Hashable, ...],
    tensors: Mapping[str, Tensor],
    others: Callable[[], Mapping[str, Any]],
    replaced: Mapping[str, Any] = MappingProxyType({}),
) -> Launch | None:
    """Launch a kernel on the current stream of the current device.

    Args:
        kernel: a function decorated with ``triton.jit``.
        grid: its programs.
        facts: what decides, together with the dtypes, sizes and strides of `tensors`, all that `others` returns.
        tensors: the tensors of the call, by the names of the kernel's arguments.
        others: returns the remaining arguments and the options of the compilation by name; called once per key.
        replaced: objects that are passed in place of some of the tensors (tensor descriptors).

    Returns:
        The remembered launch; None under Triton's interpreter.
    """
    key = key_of(kernel, grid, facts, tensors)
    remembered = _launches.get(key)
    given = {**tensors, **replaced} if replaced else tensors
    if remembered is None:
        arguments = {**others(), **given}
        compiled = kernel[grid](**arguments)
        # None: Triton's interpreter ran it
        return None if compiled is None else _remember(key, kernel, compiled, arguments, given)
    remembered.run(given)
    return remembered


def key_of(kernel: Any, grid: tuple[int, int, int], facts: tuple[Hashable, ...], tensors: Mapping[str, Tensor]) -> Key:
    """The key of a launch: two launches with one key differ in nothing but their tensors."""
    # the id of the kernel, which lives as long as its module: Triton's hash of it is a tenth of the cost of a call
    return id(kernel), grid, facts, tuple([(name, *_seen(tensor)) for name, tensor in tensors.items()])


def _seen(tensor: Tensor) -> tuple[Hashable, ...]:
    """What a kernel's arguments and its compilation depend on, besides the facts."""
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr() % ALIGNMENT == 0, tensor.get_device()


def _remember(key: Key, kernel: Any, compiled: Any, arguments: Mapping[str, Any], given: Mapping[str, Any]) -> Launch:
    values = [arguments[name] for name in kernel.arg_names]
    places = tuple((place, name) for place, name in enumerate(kernel.arg_names) if name in given)
    for place, _ in places:
        values[place] = None  # keeps no memory of a call
    remembered = _launches[key] = Launch(compiled, key[1], values, places)
    return remembered

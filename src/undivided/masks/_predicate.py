"""Masks given as functions: the part that holds one, and the tensors that its function can reach."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from undivided.errors import InputError
from undivided.masks._parts import Field, Part

PredicateFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Predicate(Part):
    """A function of the indices; the handle finds it again from inside an opaque operator."""

    name: ClassVar[str] = "predicate"
    fn: PredicateFunction
    handle: int

    def fields(self) -> tuple[Field, ...]:
        return (self.handle,)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return ()

    def captured(self) -> tuple[Tensor, ...]:
        """The tensors that the function closes over: they, too, may change in place."""
        return tuple(_captured(self.fn, frozenset(), depth=6))

    def __reduce__(self) -> tuple[Any, ...]:
        return (register_predicate, (self.fn,))


_predicates: WeakValueDictionary[int, Predicate] = WeakValueDictionary()
_handles = itertools.count(1)


def register_predicate(fn: PredicateFunction) -> Predicate:
    """A part for the function, under a handle of its own."""
    part = Predicate(fn, next(_handles))
    _predicates[part.handle] = part
    return part


def find_predicate(handle: int) -> Predicate:
    """The part of this handle, as long as its mask is alive."""
    part = _predicates.get(handle)
    if part is None:
        raise InputError(
            "mask", "be kept alive while its compiled graph runs", f"a released predicate (handle {handle})",
            "keep the mask that masks.predicate returned in a variable outside of the compiled function",
        )  # fmt: skip
    return part


def _captured(value: object, names: frozenset[str], depth: int) -> list[Tensor]:
    """The tensors that a function can reach: what it closes over, its defaults, the globals it names, and of every object
    among them the attributes that it names."""
    if isinstance(value, Tensor):
        return [value]
    if depth == 0 or isinstance(value, type | ModuleType | str | int | float):
        return []
    inner: list[object] = []
    if isinstance(value, list | tuple):
        inner = list(value)
    elif isinstance(value, dict):
        inner = list(value.values())
    elif isinstance(value, functools.partial):
        inner = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, MethodType):
        names |= _names(getattr(value.__func__, "__code__", None))
        inner = [value.__func__, value.__self__]
    elif isinstance(value, FunctionType):
        names |= _names(value.__code__)
        for cell in value.__closure__ or ():
            try:
                inner.append(cell.cell_contents)
            except ValueError:  # a cell that is not filled yet holds nothing to watch
                continue
        inner += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        inner += [value.__globals__[name] for name in names if name in value.__globals__]
    else:
        inner = _attributes(value, names)
    return [tensor for item in inner for tensor in _captured(item, names, depth - 1)]


def _names(code: CodeType | None) -> frozenset[str]:
    if code is None:
        return frozenset()
    return frozenset(code.co_names).union(*(_names(c) for c in code.co_consts if isinstance(c, CodeType)))


def _attributes(value: object, names: frozenset[str]) -> list[object]:
    """Of an object, the attributes of these names: its own, a module's tensors and children, its class's methods."""
    own = [getattr(value, "__dict__", {})]
    if isinstance(value, torch.nn.Module):
        own += [value._buffers, value._parameters, value._modules]
    found = [attributes[name] for attributes in own for name in names if name in attributes]
    called = "forward" if isinstance(value, torch.nn.Module) else "__call__"
    for name in (*names, called):
        member = getattr(type(value), name, None)
        member = member.fget if isinstance(member, property) else member
        if isinstance(member, FunctionType):
            found.append(MethodType(member, value))
    return found

"""``Predicate``: the part that holds a function of indices, its registry, and the tensors that a function captures."""

from __future__ import annotations

import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor

from undivided.errors import InputError
from undivided.masks._parts import Field, Part

PredicateFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Predicate(Part):
    """A function of the indices. An opaque operator receives its handle and finds the function by it."""

    name: ClassVar[str] = "predicate"
    fn: PredicateFunction
    handle: int

    def fields(self) -> tuple[Field, ...]:
        return (self.handle,)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return ()

    def captured(self) -> tuple[Tensor, ...]:
        """The tensors that the function captures; these may change in place too."""
        return tuple(_captured_tensors(self.fn, frozenset(), depth=6))

    def __reduce__(self) -> tuple[Any, ...]:
        return (register_predicate, (self.fn,))


_predicates: weakref.WeakValueDictionary[int, Predicate] = weakref.WeakValueDictionary()
_handles = itertools.count(1)


def register_predicate(fn: PredicateFunction) -> Predicate:
    """A part for the function, with a new handle."""
    part = Predicate(fn, next(_handles))
    _predicates[part.handle] = part
    return part


def check_signature(fn: PredicateFunction) -> None:
    """InputError unless it takes four arguments, or has no signature that can be read."""
    try:  # follow_wrapped=False: a decorated function is called with the parameters of its wrapper
        signature = inspect.signature(fn, follow_wrapped=False)
    except (TypeError, ValueError, NameError):  # no readable signature; NameError: an annotation (Python 3.14)
        return
    try:
        signature.bind(*"bhqk")
    except TypeError as error:
        hint = "lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, for example; b and h may be unused"
        raise InputError("fn", "take (b, h, q_idx, kv_idx)", signature, hint) from error


def find_predicate(handle: int) -> Predicate:
    """The part with this handle; InputError if its mask was released."""
    part = _predicates.get(handle)
    if part is None:
        raise InputError(
            "mask",
            "be kept alive while its compiled graph runs",
            f"a released predicate (handle {handle})",
            "keep the mask that masks.predicate returned in a variable outside of the compiled function",
        )
    return part


def keep_with(tensor: Tensor, parts: Iterable[Part]) -> None:
    """Keep the predicates among the parts of a mask for as long as the memory of the tensor: a backward pass finds them
    by their handles, after the function that built the mask has returned."""
    predicates = [part for part in parts if isinstance(part, Predicate)]
    if predicates:
        weakref.finalize(tensor.untyped_storage(), predicates.clear).atexit = False


def _captured_tensors(value: object, names: frozenset[str], depth: int) -> list[Tensor]:
    """The tensors that a function can reach.

    These are its closure, its defaults, the globals that it names, and the attributes of these objects that it names.
    """
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
        names |= _names_in(getattr(value.__func__, "__code__", None))
        inner = [value.__func__, value.__self__]
    elif isinstance(value, FunctionType):
        names |= _names_in(value.__code__)
        for cell in value.__closure__ or ():
            try:
                inner.append(cell.cell_contents)
            except ValueError:  # an empty cell
                continue
        inner += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        inner += [value.__globals__[name] for name in names if name in value.__globals__]
    else:
        inner = _attributes(value, names)
    return [tensor for item in inner for tensor in _captured_tensors(item, names, depth - 1)]


def _names_in(code: CodeType | None) -> frozenset[str]:
    """The global and attribute names that code and its inner functions use."""
    if code is None:
        return frozenset()
    return frozenset(code.co_names).union(*(_names_in(c) for c in code.co_consts if isinstance(c, CodeType)))


def _attributes(value: object, names: frozenset[str]) -> list[object]:
    """The attributes with these names: of the object, of a module's tensors and children, and methods of the class."""
    own = [getattr(value, "__dict__", {})]
    if isinstance(value, torch.nn.Module):
        own += [value._buffers, value._parameters, value._modules]
    values = [attributes[name] for attributes in own for name in names if name in attributes]
    called = "forward" if isinstance(value, torch.nn.Module) else "__call__"
    for name in (*names, called):
        member = getattr(type(value), name, None)
        member = member.fget if isinstance(member, property) else member
        if isinstance(member, FunctionType):
            values.append(MethodType(member, value))
    return values

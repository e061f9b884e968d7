"""``Predicate``: the part that holds a function of indices, its registry, and the tensors that a function captures."""

from __future__ import annotations

import contextlib
import enum
import functools
import inspect
import itertools
import numbers
import secrets
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from types import BuiltinMethodType, CodeType, FunctionType, MappingProxyType, MethodType, MethodWrapperType, ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor

from undivided.errors import InputError
from undivided.masks._parts import Field, Part

PredicateFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Predicate(Part):
    """A function of the indices, or of positions. An opaque operator receives its handle and finds the part by it.

    Graphs of torch.compile have small handles, which are the same in the next run, so that the compiler's cache finds
    them. Programs that may be saved (torch.export, torch.jit.trace) have handles that no other process has.
    """

    name: ClassVar[str] = "predicate"
    fn: PredicateFunction
    handle: int
    positions: bool = False

    def fields(self) -> tuple[Field, ...]:
        stays_here = torch.compiler.is_dynamo_compiling() and not torch.compiler.is_exporting()
        return (self.handle if stays_here else _PROCESS + self.handle,)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return ()

    def captured(self) -> list[Tensor] | None:
        """The tensors that the function captures; these may change in place too. None if they are unknown."""
        return captured_tensors(self.fn)

    def __reduce__(self) -> tuple[Any, ...]:
        return (register_predicate, (self.fn, self.positions))


_predicates: weakref.WeakValueDictionary[int, Predicate] = weakref.WeakValueDictionary()
_handles = itertools.count(1)
_PROCESS = (1 + secrets.randbits(30)) << 32
"""Added to the handles of programs that may be saved."""


def register_predicate(fn: PredicateFunction, positions: bool = False) -> Predicate:
    """A part for the function, with a new handle."""
    part = Predicate(fn, next(_handles), positions)
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
    """The part with this handle; InputError if its mask was released, or belongs to another process."""
    number = handle - _PROCESS if handle >= _PROCESS else handle
    part = _predicates.get(number)
    if part is not None:
        return part
    if number >> 32:
        raise InputError(
            "mask",
            "be of tensors in a program that is saved",
            "masks.predicate with a function of the process that saved it",
            "masks.dense(mask.to_dense(batch, heads, q_len, kv_len)) before torch.export or torch.jit.trace",
        )
    raise InputError(
        "mask",
        "be kept alive while its compiled graph runs",
        f"a released predicate (handle {number})",
        "keep the mask that masks.predicate returned in a variable outside of the compiled function",
    )


def keep_with(tensor: Tensor, parts: Iterable[Part]) -> None:
    """Keep the predicates among the parts of a mask for as long as the memory of the tensor: a backward pass finds them
    by their handles, after the function that built the mask has returned."""
    predicates = [part for part in parts if isinstance(part, Predicate)]
    if predicates:
        weakref.finalize(tensor.untyped_storage(), predicates.clear).atexit = False


_MAX_OBJECTS = 512
"""Most objects that a search for tensors visits, and most elements of a container."""

_ATOMS = (str, bytes, numbers.Number, torch.SymInt, type(None), range, slice, enum.Enum, torch.dtype, torch.device)
"""Types of values without tensors; NumPy's numbers are among them."""

_CONTAINERS = (list, tuple, set, frozenset, deque)
_READ_ANY_ATTRIBUTE = frozenset({"getattr", "vars", "__dict__", "parameters", "buffers", "children", "modules"})
_NOT_CALLED = frozenset({"__init__", "__new__", "__init_subclass__", "__repr__", "__reduce__", "__getstate__"})
"""Special methods that an evaluation does not call."""


def captured_tensors(function: object) -> list[Tensor] | None:
    """The tensors that a function can reach; None if there is something that cannot be searched, or too much.

    These are in its closure, its defaults, the globals that its code names, and what these contain: containers wholly,
    of other objects the attributes that any of the code names. So a model whose method is the predicate is not searched
    as a whole.
    """
    names: frozenset[str] = frozenset()
    while True:
        search = _Search(names)
        if not search.visit_all(function):
            return None
        if not search.read_attributes or search.named <= names:
            return search.tensors
        names |= search.named


class _Search:
    """One search for tensors.

    Args:
        names: of attributes that are read.
    """

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self.named: set[str] = set()
        """The names in the code of all functions that were found."""
        self.read_attributes = False
        """Whether there was an object of which only named attributes were searched."""
        self.tensors: list[Tensor] = []
        self._visited: dict[int, object] = {}  # which keeps temporary objects, so that their ids stay theirs

    def visit_all(self, start: object) -> bool:
        """Whether all that can be reached was searched."""
        waiting = [start]
        while waiting:
            value = waiting.pop()
            if id(value) in self._visited:
                continue
            if isinstance(value, Tensor):
                self._visited[id(value)] = value
                self.tensors.append(value)
                continue
            if isinstance(value, _ATOMS):
                continue
            self._visited[id(value)] = value
            inner = self._inside_function(value) if isinstance(value, FunctionType) else self._inside(value)
            if inner is None or len(self._visited) > _MAX_OBJECTS or len(inner) > _MAX_OBJECTS:
                return False
            waiting += inner
        return True

    def _inside(self, value: object) -> Collection[object] | None:
        """What a value contains or calls; None if that is unknown."""
        if isinstance(value, ModuleType):
            return [] if _is_core(value.__name__) else self._named_in(vars(value))
        if isinstance(value, type):
            return [] if _is_core(value.__module__) else self._members(value)
        if isinstance(value, MethodType):
            return [value.__func__, value.__self__]
        if isinstance(value, BuiltinMethodType | MethodWrapperType):
            return [value.__self__]
        if isinstance(value, functools.partial):
            return [value.func, *value.args, *value.keywords.values()]
        if isinstance(value, property):
            return [value.fget]
        if isinstance(value, functools.cached_property):
            return [value.func]
        if isinstance(value, staticmethod | classmethod):
            return [value.__func__]
        if isinstance(value, weakref.ref):
            return [value()]
        if isinstance(value, dict | MappingProxyType):
            return [*value.values(), *self._attributes(value)]
        if isinstance(value, _CONTAINERS):
            return [*value, *self._attributes(value)]
        own = _own(value)
        if "__wrapped__" in own:  # of functools.lru_cache
            return [own["__wrapped__"]]
        is_pythons = type(value).__dictoffset__ != 0 or any("__slots__" in vars(base) for base in type(value).__mro__)
        return self._attributes(value) if is_pythons else None

    def _inside_function(self, function: FunctionType) -> list[object]:
        names: frozenset[str] = frozenset()
        if not _is_core(function.__module__):
            names = _names_in(function.__code__)
        self.named |= names
        inner: list[object] = []
        for cell in function.__closure__ or ():
            try:
                inner.append(cell.cell_contents)
            except ValueError:  # an empty cell
                continue
        inner += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        return inner + [function.__globals__[name] for name in names if name in function.__globals__]

    def _attributes(self, value: object) -> list[object]:
        """The attributes of an object that may be read, and the methods that may be called."""
        kind = type(value)
        own: list[Mapping[str, object]] = [_own(value)]
        reads_all = not self._names.isdisjoint(_READ_ANY_ATTRIBUTE)
        if isinstance(value, torch.nn.Module):
            own += [value._buffers, value._parameters, value._modules]
            reads_all = reads_all or hasattr(kind, "__getitem__")
        found = [
            item for attributes in own for item in (attributes.values() if reads_all else self._named_in(attributes))
        ]
        return found + self._members(kind)

    def _members(self, kind: type) -> list[object]:
        """Of a class: what code names, and its special methods."""
        bases = [base for base in kind.__mro__ if not _is_core(base.__module__)]
        found = [item for base in bases for item in self._named_in(vars(base))]
        special = ("forward",) if issubclass(kind, torch.nn.Module) else ()
        for base in bases:
            names = [name for name in vars(base) if name.startswith("__") and name not in _NOT_CALLED]
            found += [vars(base)[n] for n in (*special, *names) if isinstance(vars(base).get(n), FunctionType)]
        return [item for item in found if not _is_field(item)]

    def _named_in(self, attributes: Mapping[str, object]) -> list[object]:
        self.read_attributes = True
        return [attributes[name] for name in self._names if name in attributes]


def _is_core(module: str | None) -> bool:
    """Whether a module is of PyTorch or Python's core: its functions read no tensors but those that they are given."""
    return (module or "").partition(".")[0] in ("torch", "builtins", "enum")


def _is_field(member: object) -> bool:
    """Whether a member of a class is a field that Python's core reads: a slot, or an element of a named tuple."""
    if isinstance(member, FunctionType | property | staticmethod | classmethod):
        return False
    return hasattr(type(member), "__get__") and not hasattr(member, "__dict__")


def _own(value: object) -> dict[str, object]:
    """What an object holds itself, in its dictionary and in slots, by its name; without running code of its class."""
    held: dict[str, object] = {}
    for base in type(value).__mro__:
        slots = vars(base).get("__slots__", ())
        names = (slots,) if isinstance(slots, str) else tuple(slots)
        for name in names:
            with contextlib.suppress(AttributeError):  # an empty slot
                held[name] = object.__getattribute__(value, name)
    with contextlib.suppress(AttributeError):
        held.update(object.__getattribute__(value, "__dict__"))
    return held


@functools.lru_cache(1024)
def _names_in(code: CodeType) -> frozenset[str]:
    """The global and attribute names that code and its inner functions use."""
    return frozenset(code.co_names).union(*(_names_in(c) for c in code.co_consts if isinstance(c, CodeType)))

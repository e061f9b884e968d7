"""Masks given as functions: the part that holds one, its pairs, and the tensors that its function can reach."""

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

from undivided._tensors import readable
from undivided.errors import InputError
from undivided.masks._parts import Field, Part
from undivided.masks.normal_form.intervals import Index, index_tensor
from undivided.masks.normal_form.positions import Geometry

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


@dataclass(frozen=True, eq=False)
class PredicatePairs:
    """The pairs of a function, evaluated for real queries and real keys alone.

    The ranges of the mask exclude padding. Here a padded index is replaced by that of a real token, so that
    the function may index tensors that cover the real tokens only.

    Args:
        fn: the function.
        device: where its indices are made.
        rows, keys: int64 ``[B|1, Sq]`` and ``[B|1, Sk]``: the raw index at which each is evaluated, -1 if its
            batch element has no real token; None: all are real.
    """

    fn: PredicateFunction
    device: torch.device
    rows: Tensor | None = None
    keys: Tensor | None = None

    @staticmethod
    def within(fn: PredicateFunction, geometry: Geometry) -> PredicatePairs:
        """The pairs of a function for a call whose sequences lie as `geometry` says."""
        if not geometry.batch:
            return PredicatePairs(fn, geometry.device)
        rows, keys = _stand_ins(geometry.real_rows), _stand_ins(geometry.real_keys)
        return PredicatePairs(fn, geometry.device, rows, keys)

    def pairs(self, batch: slice, heads: slice, rows: Index, keys: Index) -> Tensor:
        q_idx, kv_idx = (index_tensor(index, self.device) for index in (rows, keys))
        if all(at is None or at.shape[0] == 1 for at in (self.rows, self.keys)):
            return self._pairs(batch, heads, _at(self.rows, 0, q_idx), _at(self.keys, 0, kv_idx))
        if batch.start >= batch.stop:
            return torch.zeros((0, 1, 1, 1), dtype=torch.bool, device=self.device)
        each = (  # a call per batch element, so that the indices keep the shapes that fn was promised
            self._pairs(slice(n, n + 1), heads, _at(self.rows, n, q_idx), _at(self.keys, n, kv_idx))
            for n in range(batch.start, batch.stop)
        )
        return torch.cat(torch.broadcast_tensors(*each))

    def _pairs(self, batch: slice, heads: slice, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        if any(bool((at[:1] < 0).any()) for at in (q_idx, kv_idx) if readable(at)):  # no real token
            return torch.zeros((1, 1, 1, 1), dtype=torch.bool, device=self.device)
        b, h = (index_tensor(index, self.device) for index in (batch, heads))
        b, h, q_idx = b[:, None, None, None], h[None, :, None, None], q_idx[None, None, :, None]
        kv_idx = kv_idx[None, None, None, :]
        want = (b.numel(), h.numel(), q_idx.numel(), kv_idx.numel())
        try:
            allowed = self.fn(b, h, q_idx, kv_idx)
        except IndexError as error:
            raise InputError(
                "fn",
                f"be defined for every real query and key ({_largest(q_idx, kv_idx)})",
                f"IndexError: {error}",
                "padding is not evaluated if the mask says where it is: masks.lengths(kv, q) & masks.predicate(fn)",
            ) from error
        if isinstance(allowed, bool):
            allowed = torch.full((1, 1, 1, 1), allowed, device=self.device)
        if not isinstance(allowed, Tensor) or allowed.dtype != torch.bool:
            got = allowed.dtype if isinstance(allowed, Tensor) else type(allowed).__name__
            raise InputError("fn", "return a bool tensor", got, "predicates are fn(b, h, q_idx, kv_idx) -> bool")
        shape = (1,) * (4 - allowed.dim()) + tuple(allowed.shape)
        if len(shape) != 4 or any(have not in (1, size) for have, size in zip(shape, want, strict=True)):
            raise InputError("fn", f"return a tensor broadcastable to {list(want)}", list(allowed.shape))
        return allowed.reshape(shape)


def _stand_ins(real: Tensor | None) -> Tensor | None:
    """Each index if it is real, else the first real one, or -1: int64 ``[B|1, S]``. None if all are real."""
    if real is None or (readable(real) and bool(real.all())):
        return None
    index = torch.arange(real.shape[1], device=real.device)
    first = torch.where(real, index, real.shape[1]).amin(1, keepdim=True)
    found = torch.where(real, index, torch.where(first < real.shape[1], first, -1))
    same = readable(found) and bool((found == found[:1]).all())
    return found[:1] if same else found


def _at(table: Tensor | None, n: int, index: Tensor) -> Tensor:
    return index if table is None else table[n if table.shape[0] > 1 else 0][index]


def _largest(q_idx: Tensor, kv_idx: Tensor) -> str:
    found = [f"{name} up to {int(at.max())}" for name, at in (("q_idx", q_idx), ("kv_idx", kv_idx)) if at.numel()]
    return ", ".join(found)


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
            "mask",
            "be kept alive while its compiled graph runs",
            f"a released predicate (handle {handle})",
            "keep the mask that masks.predicate returned in a variable outside of the compiled function",
        )
    return part


def _captured(value: object, names: frozenset[str], depth: int) -> list[Tensor]:
    """The tensors that a function can reach: what it closes over, its defaults, the globals it names, and of every
    object among them the attributes that it names."""
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

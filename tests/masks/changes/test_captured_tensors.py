"""A predicate follows the tensors that its function reads, wherever they are."""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import enum
import functools
import itertools
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks

from undivided import masks
from undivided.masks._predicate import captured_tensors

Function = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclasses.dataclass(slots=True)
class Slots:
    limit: Tensor


class Item:
    def __init__(self, limit: Tensor) -> None:
        self._content = [limit]

    def __getitem__(self, index: int) -> Tensor:
        return self._content[index]


class Dynamic:
    def __init__(self, limit: Tensor) -> None:
        self._content = {"limit": limit}

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["_content"][name]


class ByName:
    def __init__(self, limit: Tensor) -> None:
        self.hidden = limit

    @property
    def limit(self) -> Tensor:
        return getattr(self, "hid" + "den")  # type: ignore[no-any-return]


class Cached:
    def __init__(self, limit: Tensor) -> None:
        self._limit = limit

    @functools.cached_property
    def limit(self) -> Tensor:
        return self._limit


class Ring:
    """Refers to itself."""

    def __init__(self, limit: Tensor) -> None:
        self.limit, self.me = limit, self

    def __call__(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return k < self.me.limit


def in_class(limit: Tensor) -> Function:
    holder = type("Holder", (), {"limit": limit})
    return lambda b, h, q, k: k < holder.limit  # type: ignore[attr-defined]


def in_module(limit: Tensor) -> Function:
    holder = types.ModuleType("holder")
    holder.limit = limit  # type: ignore[attr-defined]
    return lambda b, h, q, k: k < holder.limit


def in_modules(limit: Tensor) -> Function:
    layer = torch.nn.Module()
    layer.register_buffer("limit", limit)
    layers = torch.nn.ModuleList([torch.nn.Linear(2, 2), layer])
    return lambda b, h, q, k: k < layers[1].limit  # type: ignore[operator]


def in_parameters(limit: Tensor) -> Function:
    parameters = torch.nn.ParameterList([torch.nn.Parameter(limit, requires_grad=False)])
    return lambda b, h, q, k: k < parameters[0]


def in_all_buffers(limit: Tensor) -> Function:
    layer = torch.nn.Module()
    layer.register_buffer("bound", limit)
    return lambda b, h, q, k: k < next(layer.buffers())


def wrapped(limit: Tensor) -> Function:
    @functools.lru_cache
    def found() -> Tensor:
        return limit

    return lambda b, h, q, k: k < found()


def attribute_of(holder: Any) -> Function:
    return lambda b, h, q, k: k < holder.limit


def item_of(holder: Any, index: object = 0) -> Function:
    return lambda b, h, q, k: k < holder[index]


def deep(limit: Tensor) -> Function:
    for _ in range(9):
        limit = [limit]  # type: ignore[assignment]
    return lambda b, h, q, k: k < limit[0][0][0][0][0][0][0][0][0]


def by_reference(limit: Tensor) -> Function:
    reference = weakref.ref(limit)
    return lambda b, h, q, k: k < reference()


PLACES: dict[str, Callable[[Tensor], Function]] = {
    "slots": lambda limit: attribute_of(Slots(limit)),
    "__getitem__": lambda limit: item_of(Item(limit)),
    "__getattr__": lambda limit: attribute_of(Dynamic(limit)),
    "getattr": lambda limit: attribute_of(ByName(limit)),
    "cached property": lambda limit: attribute_of(Cached(limit)),
    "named tuple": lambda limit: attribute_of(collections.namedtuple("Pair", "limit other")(limit, 1)),
    "name space": lambda limit: attribute_of(types.SimpleNamespace(limit=limit)),
    "deque": lambda limit: item_of(collections.deque([limit])),
    "UserDict": lambda limit: item_of(collections.UserDict(x=limit), "x"),
    "ChainMap": lambda limit: item_of(collections.ChainMap({"x": limit}), "x"),
    "set": lambda limit: lambda b, h, q, k, every={limit}: k < next(iter(every)),
    "lists in lists": deep,
    "object that refers to itself": Ring,
    "class": in_class,
    "module of Python": in_module,
    "ModuleList": in_modules,
    "ParameterList": in_parameters,
    "buffers()": in_all_buffers,
    "lru_cache": wrapped,
    "and_masks": lambda limit: and_masks(lambda b, h, q, k: k < limit, lambda b, h, q, k: k >= 0),
    "method of a tensor": lambda limit: lambda b, h, q, k, less=limit.__gt__: less(k),
    "weak reference": by_reference,
}


@pytest.mark.parametrize("make", PLACES.values(), ids=PLACES)
def test_a_change_of_a_tensor_is_seen(make: Callable[[Tensor], Function]) -> None:
    limit = torch.tensor(1)
    function = make(limit)
    mask = masks.predicate(function)
    assert mask.intervals(1, 4).tolist() == [[[0, 1]]]
    limit.fill_(3)
    assert mask.intervals(1, 4).tolist() == [[[0, 3]]]
    assert captured_tensors(function) is not None


def test_what_cannot_be_searched_is_evaluated_in_each_call() -> None:
    limit, variable = torch.tensor(1), contextvars.ContextVar[Tensor]("variable")
    variable.set(limit)
    many = [torch.tensor(1) for _ in range(1000)]
    for function, tensor in ((lambda b, h, q, k: k < variable.get(), limit), (item_of(many, 999), many[999])):
        mask = masks.predicate(function)
        assert captured_tensors(function) is None
        assert mask.intervals(1, 4).tolist() == [[[0, 1]]]
        tensor.fill_(3)
        assert mask.intervals(1, 4).tolist() == [[[0, 3]]]


def test_functions_that_name_one_another_are_searched_once() -> None:
    """Each path among them was followed: nine helpers took a tenth of a second per call."""
    limit, helpers = torch.tensor(1), {}
    names = [f"helper{n}" for n in range(40)]
    for name in names:
        others = " + ".join(f"{other}(k)" for other in names if other != name)
        exec(f"def {name}(k):\n    return {others}", helpers)
    helpers["limit"] = limit
    exec("def fn(b, h, q, k):\n    return (k < limit) if True else helper0(k)", helpers)
    found = captured_tensors(helpers["fn"])
    assert found is not None
    assert [tensor is limit for tensor in found] == [True]


class Kind(enum.Enum):
    ONE = 1


def test_only_what_the_code_names_is_searched() -> None:
    window = np.int64(4)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("limit", torch.tensor(1))
            self.layers = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(9)))
            self.kind, self.counter = Kind.ONE, itertools.count()  # the counter cannot be searched

        def allowed(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (k < self.limit) & (self.kind is Kind.ONE) & (q - k < window)

    model = Model()
    found = captured_tensors(model.allowed)
    assert found is not None
    assert [tensor is model.limit for tensor in found] == [True]

"""Values that an argument may not have, which types an annotation allows, and what an object holds."""

from __future__ import annotations

import inspect
import math
import numbers
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

import undivided
from undivided import masks


class Unhashable:
    """A value without a hash."""

    __hash__ = None  # type: ignore[assignment]


VALUES: dict[str, Any] = {
    "None": None,
    "True": True,
    "-1": -1,
    "0": 0,
    "2**63": 2**63,
    "1.5": 1.5,
    "nan": math.nan,
    "inf": math.inf,
    "text": "text",
    "bytes": b"",
    "[]": [],
    "[[]]": [[]],
    "['text']": ["text"],
    "a long list": [1] * 100,
    "{'a': []}": {"a": []},
    "an object": object(),
    "unhashable": Unhashable(),
    "int64(-1)": numpy.int64(-1),
    "float32(nan)": numpy.float32("nan"),
    "an array": numpy.zeros(2),
    "a function": lambda: None,
    "a dtype": torch.int32,
    "a device": torch.device("meta"),
    "a tensor": torch.zeros(2, 3),
    "a 0-d tensor": torch.tensor(1.5),
    "an int tensor": torch.tensor([1, -2, 3]),
    "a meta tensor": torch.empty(2, dtype=torch.int32, device="meta"),
    "a sparse tensor": torch.zeros(2, dtype=torch.int64).to_sparse(),
    "a mask": masks.predicate(lambda b, h, q, k: q >= k),
    "a module": torch.nn.Identity(),
}


def variants(value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Tensors that differ from a valid one in one thing."""
    yield "of another rank", value[None]
    yield "without elements", value.flatten()[:0]
    yield "on meta", value.to("meta")
    yield "sparse", value.detach().to_sparse()
    yield "complex", value.detach().to(torch.complex64)
    yield "bool", value.detach().to(torch.bool)
    yield "fp16", value.detach().to(torch.float16)
    if value.dim():
        yield "nested", torch.nested.nested_tensor([value.detach(), value.detach()], layout=torch.jagged)
        yield "cut", value[:-1]
    if value.is_floating_point():
        yield "with a gradient", value.detach().clone().requires_grad_()


def fits(annotation: Any, value: object) -> bool:
    """Whether the type of a value is one that the annotation names; True for annotations that are not known here."""
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    return any(_fits(part.strip(), value) for part in re.sub(r"\[.*\]", "", text).split("|"))


_TYPES: dict[str, Any] = {
    "str": str,
    "Tensor": Tensor,
    "torch.dtype": torch.dtype,
    "Mask": masks.Mask,
    "Machine": undivided.Machine,
    "ContextParallel": undivided.ContextParallel,
    "ContextParallelLike": undivided.ContextParallel,
    "InferenceParams": undivided.InferenceParams,
    "torch.nn.Module": torch.nn.Module,
    "nn.Module": torch.nn.Module,
    "ModuleT": torch.nn.Module,
    "ModelT": torch.nn.Module,
    "torch.optim.Optimizer": torch.optim.Optimizer,
    "DeviceMesh": torch.distributed.device_mesh.DeviceMesh,
    "torch.device": torch.device,
    "Mapping": Mapping,
    "Init": Callable,
    "Callable": Callable,
    "MaskFunction": Callable,
    "PredicateFunction": Callable,
    "BaseException": BaseException,
    "Exception": Exception,
    "Plan": (),
    "Settings": (),
    "StrPath": str,
}
_SEQUENCES = {"Sequence", "Ints", "Lengths", "tuple", "list"}
_NAMES = {"Layout", "Strategy", "PlacementName", "Align", "Side", "MergeMethod", "Format"}
"""Annotations that are Literals of text: no value here is one of them."""


def _fits(name: str, value: object) -> bool:
    if name == "None":
        return value is None
    if name in ("int", "bool"):
        return isinstance(value, bool) == (name == "bool") and isinstance(value, numbers.Integral)
    if name == "float":
        return isinstance(value, numbers.Real) and not isinstance(value, bool)
    if name == "Hashable":
        return getattr(value, "__hash__", None) is not None
    if name in _SEQUENCES:
        return isinstance(value, Sequence | Tensor) and not isinstance(value, str | bytes)
    if name in _NAMES:
        return False
    return isinstance(value, _TYPES[name]) if name in _TYPES else True


def parameter_types(function: Callable[..., Any]) -> dict[str, Any]:
    """The annotation of each parameter, as it is written."""
    return {name: parameter.annotation for name, parameter in inspect.signature(function).parameters.items()}


def state(thing: object, depth: int = 0) -> Any:
    """What an object holds, to compare before and after; objects of other libraries by identity."""
    if isinstance(thing, Tensor):
        if thing.is_meta or thing.layout != torch.strided or type(thing) not in (Tensor, torch.nn.Parameter):
            return type(thing), tuple(thing.shape), thing.dtype
        return (
            thing.dtype,
            tuple(thing.shape),
            thing.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes(),
        )
    if isinstance(thing, dict):
        return {key: state(value, depth) for key, value in thing.items()}
    if isinstance(thing, list | tuple):
        return [state(value, depth) for value in thing]
    if isinstance(thing, torch.nn.Module) or (type(thing).__module__.startswith("undivided") and depth < 8):
        names = [name for c in type(thing).__mro__ for name in getattr(c, "__slots__", ())]
        own = {name: getattr(thing, name) for name in names if hasattr(thing, name)} | getattr(thing, "__dict__", {})
        return {name: state(value, depth + 1) for name, value in own.items() if name not in MEMOS}
    return thing if isinstance(thing, str | int | float | None) else id(thing)


MEMOS = {"_table", "_placements", "_digest", "_tokens", "_entries", "traffic", "q", "kv", "order", "digest"}
"""Attributes that keep what was computed, and may change at any time."""

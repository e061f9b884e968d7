"""`on_all_ranks`: a layer's call, which tensor parallel ranks compare before they send anything else.

Only the outermost layer compares, because it passes the same arguments on to the layers in it. The recomputation of a
checkpoint compares again: all ranks recompute the same layers in the same order.

Context parallel ranks compare in each attention, with what the outermost layer says of its own call. It tells them of
an error before that.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from undivided.arguments.signature import checked_call
from undivided.cache import InferenceParams
from undivided.context_parallel import ContextParallel
from undivided.context_parallel.exchange.failures import rank_errors
from undivided.context_parallel.exchange.handshake import SharedArguments, called_by, digest
from undivided.nn.arguments.other_names import OTHER_NAMES


class Layer(Protocol):
    """What a layer over ranks has."""

    @property
    def layer_number(self) -> Any:
        """The layer's number, for errors."""

    @property
    def tensor_parallel(self) -> Any:
        """The checked arguments of tensor parallelism."""

    def _shared_state(self) -> Any: ...

    def _contexts(self) -> list[ContextParallel]: ...


P = ParamSpec("P")
T = TypeVar("T")
LayerT = TypeVar("LayerT", bound=Layer)

_SHOWN_VALUES = 16
"""Numbers of a tensor that an error shows."""


class _Running(threading.local):
    """The call of a layer that runs in this thread.

    Attributes:
        layer: the outermost layer; None outside of calls.
        attended: how many of its attentions over context ranks have ended; None while one runs.
    """

    layer: Layer | None = None
    attended: int | None = 0


_running = _Running()


def running_call() -> str:
    """The layer whose call runs in this thread, for errors."""
    return "a layer" if _running.layer is None else _call(_running.layer)


def _call(layer: Layer) -> str:
    return f"{type(layer).__name__} {layer.layer_number}"


def attending(cp: ContextParallel | None) -> AbstractContextManager[None]:
    """The context of a layer's attention over these context ranks, if any, which tells them of its own errors."""
    return contextlib.nullcontext() if cp is None or torch.compiler.is_compiling() else _attending()


@contextlib.contextmanager
def _attending() -> Iterator[None]:
    before, _running.attended = _running.attended, None
    yield
    _running.attended = None if before is None else before + 1  # not after an error


def on_all_ranks(forward: Callable[Concatenate[LayerT, P], T]) -> Callable[Concatenate[LayerT, P], T]:
    """A layer's forward method that compares its arguments on tensor parallel ranks, and names ranks that fail.

    It tells context parallel ranks of errors before an attention, in which they wait for this rank. It is a
    `checked_call`, too.
    """
    forward = checked_call(forward, OTHER_NAMES)
    names = tuple(inspect.signature(forward).parameters)[1:]
    defaults = {name: p.default for name, p in inspect.signature(forward).parameters.items() if name in names}

    @functools.wraps(forward)
    def on_ranks(layer: LayerT, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling() or _running.layer is not None:
            return forward(layer, *args, **kwargs)

        def arguments() -> dict[str, Any]:
            return defaults | dict(zip(names, args, strict=False)) | kwargs

        _running.layer, _running.attended = layer, 0
        try:
            with called_by(lambda: _of_context_ranks(layer, arguments())):
                ranks = layer.tensor_parallel.ranks
                if ranks is None:
                    return forward(layer, *args, **kwargs)
                _compare_on_tensor_ranks(layer, arguments())
                with rank_errors(f"the forward pass of {_call(layer)}", ranks.group):
                    return forward(layer, *args, **kwargs)
        except Exception as error:
            if _running.attended is not None:
                for cp in layer._contexts()[_running.attended :][:1]:
                    cp.tell_of_error(error)
            raise
        finally:
            _running.layer = None

    return on_ranks


def _compare_on_tensor_ranks(layer: Layer, arguments: Mapping[str, Any]) -> None:
    """Raise on every tensor parallel rank unless they share the arguments of this call and the state of the layer."""
    ranks, call = layer.tensor_parallel.ranks, _call(layer)
    if ranks.check and _is_comparable(next((x for x in arguments.values() if x is not None), None)):
        texts = {name: _text(value) for name, value in arguments.items()}
        ranks.compare({"layer": call, **texts, **layer._shared_state()}, call)


def _of_context_ranks(layer: Layer, arguments: Mapping[str, Any]) -> SharedArguments:
    """What context parallel ranks share besides what an attention compares: the layer, and the angles of positions."""
    angles = arguments.get("rotary_pos_emb")
    tables = angles if isinstance(angles, tuple | list) else (angles,)
    return {"layer": _call(layer), "rotary_pos_emb": f"{_text(angles)}{''.join(map(_first_and_last_row, tables))}"}


def _first_and_last_row(table: object) -> str:
    """A hash of these rows of a table in the memory of a CPU: parts of a table differ in them."""
    if not isinstance(table, Tensor) or not _is_comparable(table) or not table.numel() or not table.dim():
        return ""
    return f" ({digest(table[[0, -1]]):x})"


def _is_comparable(x: object) -> bool:
    """Whether to compare a call with these hidden states: on a GPU it would wait for the device, and tensors without
    memory have no call to compare."""
    return not isinstance(x, Tensor) or (type(x) in (Tensor, torch.nn.Parameter) and x.device.type == "cpu")


def _text(value: object) -> str:
    """A text that differs between arguments that ranks must share."""
    if isinstance(value, Tensor):
        gradient = ", requires_grad" if value.requires_grad and torch.is_grad_enabled() else ""
        device = "" if value.device.type == "cpu" else f", on {value.device.type}"
        return f"{list(value.shape)}, {value.dtype}{device}{gradient}{_values(value)}"
    if isinstance(value, InferenceParams):
        return f"InferenceParams of the lengths {dict(value.sequences)}"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_text, value))})"
    return str(value) if isinstance(value, str | int | float | None) else type(value).__name__


def _values(x: Tensor) -> str:
    """The values of offsets, lengths and seeds on the CPU, which decide what is computed."""
    if x.device.type != "cpu" or x.dim() > 1 or x.is_floating_point() or x.dtype is torch.bool:
        return ""
    return f", {x.tolist()}" if x.numel() <= _SHOWN_VALUES else f", {x[:_SHOWN_VALUES].tolist()} .. ({digest(x):x})"

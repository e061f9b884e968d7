"""Checks of tensors, integers and vectors of integers from callers."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from undivided.arguments.tensors import functional_mode, has_dispatch, is_dense, jit_trace, missing_memory
from undivided.errors import InputError, did_you_mean

INT32_MAX, INT64_MAX = 2**31 - 1, 2**63 - 1


class _Required:
    """The type of `REQUIRED`."""

    def __repr__(self) -> str:
        return "no value"


REQUIRED: Any = _Required()
"""The default of an argument that must be given: the checks refuse it, at no cost to calls that give the argument."""


def as_type_error(error: InputError) -> InputError:
    """The error as one that is also a TypeError, except under torch.compile, which cannot create a class."""
    return error if torch.compiler.is_compiling() else error.as_also(TypeError)


_UNREADABLE_CLASSES = {
    "DTensor": "{name}.to_local() is what this rank holds, {name}.full_tensor() the whole; undivided.attention takes "
    "q, k, v, bias, sinks and alibi_slopes as DTensors, and masks of the whole",
    "MaskedTensor": "{name}.get_data(), and what it masks as mask=masks.dense(...)",
}
"""Classes whose values no kernel reads, and what to pass instead."""
_JAGGED = (
    "for jagged q, k, v [B, S, H, D]: undivided.attention(q.values(), k.values(), v.values(), layout='thd', "
    "mask=masks.documents(q.offsets())); [B, H, S, D]: undivided.scaled_dot_product_attention(q, k, v)"
)


_FOR_FX = (
    "torch.fx.symbolic_trace records a function of yours under torch.fx.wrap(...), and a module that is_leaf_module of "
    "its Tracer accepts, as one call; torch.export records everything"
)


def check_tensor(name: str, value: object, hint: str | None = None) -> None:
    """InputError unless it is a strided tensor whose memory holds all its elements; `hint` is for other types."""
    if value is REQUIRED:
        raise as_type_error(InputError(name, "be a torch.Tensor", REQUIRED, hint=f"{name} has no default"))
    if not isinstance(value, Tensor):
        hint = hint or _conversion(name, value) or (_FOR_FX if type(value).__name__ == "Proxy" else None)
        raise InputError(name, "be a torch.Tensor", type(value).__name__, hint)
    if not is_dense(value):
        kind = "a nested tensor" if value.is_nested else str(value.layout)
        raise InputError(name, "be a dense (strided) tensor", kind, hint=_JAGGED if value.is_nested else None)
    if torch.compiler.is_compiling():
        return
    if type(value) is not Tensor:
        _check_class(name, value)
    check_memory(name, value)


def _conversion(name: str, value: object) -> str | None:
    """The expression that makes a tensor of an array or a list; None for other values."""
    convert = {"ndarray": "torch.from_numpy", "list": "torch.tensor", "tuple": "torch.tensor"}.get(type(value).__name__)
    return convert and f"{convert}({name})"


def _check_class(name: str, value: Tensor) -> None:
    """InputError if a kernel cannot read the values of a tensor of this subclass."""
    for base in type(value).__mro__:
        if (hint := _UNREADABLE_CLASSES.get(base.__name__)) is not None:
            raise InputError(name, "be a plain tensor", f"a {base.__name__}", hint=hint.format(name=name))
    if type(value).__name__ == "FunctionalTensor" and not functional_mode():
        raise InputError(name, "be used under the FunctionalTensorMode that made it", "a FunctionalTensor without it")
    if torch.nn.parameter.is_lazy(value):
        raise InputError(
            name, "be initialized", type(value).__name__, "run the lazy module once before its parameters are used"
        )


def check_memory(name: str, tensor: Tensor) -> None:
    """InputError unless it has a storage that is as large as sizes and strides require."""
    if torch.compiler.is_compiling():  # it traces no storages
        return
    try:
        if missing_memory(tensor) is None:
            return
    except (NotImplementedError, RuntimeError):  # raised if there is no storage
        pass
    if has_dispatch(tensor) or torch._is_functional_tensor(tensor):  # its class is responsible for its values
        return
    if not torch._C._has_storage(tensor):
        if torch._C._functorch.peek_interpreter_stack() is None:
            raise InputError(
                name,
                "have memory of its own",
                "a tensor without storage",
                "a tensor must not outlive its torch.func transform",
            )
        return
    if (short := missing_memory(tensor)) is not None:
        need, have = short
        raise InputError(
            name,
            f"have its {need} bytes in memory",
            f"a storage of {have} bytes",
            hint="the storage was resized, as FSDP does with parameters outside of their module's forward",
        )


def as_integer(argument: str, value: object, at_least: int | None = None) -> int:
    """``value`` as an int of at least ``at_least``, or InputError."""
    # torch.compile cannot trace hasattr of a size
    if type(value) is not int and (isinstance(value, bool | Tensor | float | str) or not hasattr(value, "__index__")):
        raise InputError(argument, "be an int", repr(value), _hint_for_int(value))
    try:
        # operator.index would make a size that torch.export records, a SymInt, a constant of the program
        number = cast(int, value) if isinstance(value, int | torch.SymInt) else operator.index(value)
    except TypeError:  # an array has __index__, whatever its shape
        raise InputError(argument, "be an int", repr(value), _hint_for_int(value)) from None
    if at_least is not None and number < at_least:
        raise InputError(argument, f"be at least {at_least}", _in_digits(number))
    if not isinstance(number, torch.SymInt) and abs(number) > INT64_MAX:
        raise InputError(argument, "fit into 64 bits", _in_digits(number))
    return number


def _hint_for_int(value: object) -> str | None:
    """How to make an int of a value that is none."""
    if isinstance(value, Tensor):
        if jit_trace() is not None:
            return "int(x): under torch.jit.trace sizes are tensors, and the int is a constant of the trace"
        return "x.item() converts a tensor to an int"
    if isinstance(value, float) and value.is_integer():
        return f"write {int(value)}"
    return _FOR_FX if type(value).__name__ == "Proxy" else None


def _in_digits(number: int) -> str:
    return str(number) if abs(number) <= 10**20 else f"an int of {number.bit_length()} bits"


_available: set[torch.device] = set()


def as_device(argument: str, value: object) -> torch.device:
    """``value`` (a device, its name, or the number of an accelerator) as a ``torch.device``, or InputError."""
    device = _as_device(argument, value)
    if device.type not in ("cpu", "meta") and device not in _available:
        _check_available(argument, device)
    return device


def _as_device(argument: str, value: object) -> torch.device:
    if isinstance(value, torch.device):
        return value
    if isinstance(value, str | int) and not isinstance(value, bool):
        try:
            return torch.device(value)
        except (RuntimeError, ValueError) as error:  # ValueError: an int beyond 64 bits
            if isinstance(value, int) and 0 <= value <= INT64_MAX and not torch.accelerator.is_available():
                raise _unavailable(argument, value, error) from None
    raise InputError(argument, "be a torch.device or its name", repr(value), hint="'cpu' or 'cuda:0', for example")


def _unavailable(argument: str, device: object, error: Exception) -> InputError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return InputError(argument, "be available", str(device), hint=f"PyTorch says: {reason}")


def _check_available(argument: str, device: torch.device) -> None:
    """InputError if PyTorch cannot use the device; its own error would come with the first tensor there."""
    try:
        tensor = torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # AssertionError: PyTorch was built without CUDA
        raise _unavailable(argument, device, error) from None
    if type(tensor) is torch.Tensor:  # under FakeTensorMode every device is
        _available.add(device)


def check_device(name: str, tensor: Tensor, device: torch.device, of: str = "q") -> None:
    """InputError unless the tensor is on the device of q, or of another argument."""
    if tensor.device != device:
        raise InputError(name, f"be on the device of {of} ({device})", str(tensor.device), f"{name}.to({of}.device)")


def check_mask_devices(argument: str, tensors: Iterable[Tensor], device: torch.device) -> None:
    """InputError unless the tensors of a mask are on the device of q, or on the CPU. A q on "meta" has no values."""
    for tensor in tensors:
        if tensor.device != device and tensor.device.type != "cpu" and device.type != "meta":
            where = "be on the CPU" if device.type == "cpu" else f"be on {device}, or on the CPU"
            raise InputError(argument, f"{where}, as q is on {device}", tensor.device, "mask.to(q.device)")


def checked_choice(argument: str, value: object, choices: Sequence[str]) -> str:
    """The value; InputError unless it is one of the choices."""
    if isinstance(value, str) and value in choices:
        return value
    hint = did_you_mean(value, choices) if isinstance(value, str) else None
    raise InputError(argument, f"be one of {', '.join(map(repr, choices))}", repr(value), hint)


def checked_flag(argument: str, value: object) -> bool:
    """The value; InputError unless it is a bool."""
    if not isinstance(value, bool):
        raise InputError(argument, "be True or False", repr(value))
    return value


def check_type(argument: str, value: object, kind: type, name: str) -> None:
    """InputError unless ``value`` is a `kind`, which the message calls ``name``."""
    if not isinstance(value, kind):
        raise InputError(argument, f"be {name}", type(value).__name__)


def is_finite(value: object) -> bool:
    """Whether it is a real number that a float can represent (an int can be too large)."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


def as_vector(argument: str, value: object, hint: str | None = None) -> Tensor:
    """``value`` (an int tensor ``[N]`` or a list of ints) as a tensor, or InputError."""
    if isinstance(value, list | tuple):
        numbers = [as_integer(f"{argument}[{n}]", item) for n, item in enumerate(value)]
        if any(abs(number) > INT32_MAX for number in numbers):
            raise InputError(argument, f"hold values of at most {INT32_MAX}", max(numbers, key=abs))
        return torch.tensor(numbers, dtype=torch.int32, device="cpu")
    if not isinstance(value, Tensor):
        got = type(value).__name__
        raise InputError(argument, "be an int tensor or a list of ints", got, hint or _conversion(argument, value))
    check_tensor(argument, value)
    check_int_dtype(argument, value)
    if value.dim() != 1:
        if hint is None and value.dim() == 2:
            one_row = value.shape[0] == 1
            hint = f"{argument}.squeeze(0)" if one_row else f"{argument}.sum(-1), if it has a 1 for each real token"
        raise InputError(argument, "have one dimension", f"shape {list(value.shape)}", hint)
    return value


def ids_tensor(argument: str, value: Tensor | Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
    """One number per token as an int tensor [B, S] or [1, S], or InputError."""
    if isinstance(value, list | tuple) and value and isinstance(value[0], list | tuple):
        rows = [as_vector(f"{argument}[{n}]", row) for n, row in enumerate(value)]
        if len(sizes := {row.numel() for row in rows}) > 1:
            hint = "pad the shorter lists with -1"
            raise InputError(argument, "have lists of equal length", f"lengths {sorted(sizes)}", hint)
        ids = torch.stack(rows)
    else:
        ids = value if isinstance(value, Tensor) else as_vector(argument, value)
    check_tensor(argument, ids)
    check_int_dtype(argument, ids)
    if ids.dim() not in (1, 2):
        raise InputError(argument, "have shape [B, S], [1, S] or [S]", list(ids.shape))
    return ids if ids.dim() == 2 else ids[None]


def check_int_dtype(argument: str, tensor: Tensor) -> None:
    """InputError unless its dtype is an integer dtype."""
    if tensor.dtype not in (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8):
        hint = f"{argument}.to(torch.int32)"
        if tensor.dtype == torch.bool and tensor.dim() > 1:
            hint = f"{argument}.sum(-1), if it is True for each real token"
        raise InputError(argument, "have an integer dtype", tensor.dtype, hint)


def check_at_least(argument: str, value: int | Tensor | None, least: int) -> None:
    """InputError if the smallest of ``value`` is below ``least``; reads the values of a tensor."""
    if value is None:
        return
    if isinstance(value, Tensor):
        value = int(value.min()) if value.numel() else least
    if value < least:
        raise InputError(argument, f"be at least {least}", value)


def check_offsets(argument: str, offsets: Tensor) -> None:
    """InputError unless the cumulative lengths start at 0 and never decrease; reads their values."""
    hint = "cu_seqlens are cumulative: documents of length 3 and 2 are [0, 3, 5]"
    if int(offsets[0]) != 0:
        raise InputError(argument, "start at 0", int(offsets[0]), hint)
    if offsets.numel() > 1 and int(offsets.long().diff().min()) < 0:  # uint8 would wrap around
        raise InputError(argument, "never decrease", offsets.tolist() if offsets.numel() < 10 else "a decrease", hint)


def listed(names: Sequence[str], most: int = 6) -> str:
    """The first names, separated by commas, and how many more there are, for a message."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")

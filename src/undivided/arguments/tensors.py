"""Properties of tensors: storage, dispatch, tracing, and whether they were changed."""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

TensorT = TypeVar("TensorT", Tensor, Tensor | None)

_functorch = torch._C._functorch
_modes = torch._C._len_torch_dispatch_stack
_NO_DISPATCH = torch._C._disabled_torch_dispatch_impl
_KEYS = torch._C._TorchDispatchModeKey
jit_trace = torch._C._get_tracing_state
"""What ``torch.jit.trace`` records at the moment; None outside of it."""
_RECORDERS = {
    _KEYS.PROXY: "make_fx or torch.export",
    _KEYS.FAKE: "a FakeTensorMode",
    _KEYS.FUNCTIONAL: "a FunctionalTensorMode",
}


def has_dispatch(value: object) -> bool:
    """Whether it is a tensor of a class with ``__torch_dispatch__``: its data pointer may not lead to its values."""
    return isinstance(value, Tensor) and type(value).__torch_dispatch__ is not _NO_DISPATCH


def is_dtensor(value: object) -> bool:
    """Whether it is a `torch.distributed.tensor.DTensor`. Reads the name, so that nothing imports that module."""
    if torch.compiler.is_compiling():  # torch.compile cannot iterate over the base classes of a Parameter
        return type(value).__name__ == "DTensor"
    return any(base.__name__ == "DTensor" for base in type(value).__mro__)


def is_observed(q: object, k: object, v: object, mask: object = None, *others: object) -> bool:
    """Whether the call must be dispatched as one operator: for a TorchDispatchMode (fake tensors, make_fx, AOT, FLOP
    counters), ``torch.jit.trace``, or the class of a tensor. torch.func gets plain operations instead.

    `mask` is a `Mask`, None, or what a caller passed by mistake; `others` are tensors, numbers or None.
    """
    if _modes() or jit_trace() is not None:
        return _functorch.peek_interpreter_stack() is None
    if not (type(q) is type(k) is type(v) is Tensor) and any(map(has_dispatch, (q, k, v))):
        return True
    if mask is not None and getattr(mask, "parts", None) and mask.has_dispatch:  # type: ignore[attr-defined]
        return True
    for other in others:  # noqa: SIM110  a generator costs more than everything above
        if other is not None and has_dispatch(other):
            return True
    return False


def dtype_name(dtype: torch.dtype | None) -> str:
    """``torch.bfloat16`` as ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def footprint(tensor: Tensor) -> int:
    """Number of elements from the first to the last in memory, inclusive; 0 if it is empty."""
    sizes, steps = tensor.shape, tensor.stride()
    return 0 if 0 in sizes else 1 + sum(map(operator.mul, sizes, steps)) - sum(steps)


def memory(tensor: Tensor) -> Tensor:
    """The memory from the first to the last element: a view as int64 numbers, which compare faster than bytes, if it
    consists of such.

    >>> memory(torch.ones(4, 4, dtype=torch.bool)).shape, memory(torch.ones(3, dtype=torch.bool).expand(5, 3)).shape
    (torch.Size([2]), torch.Size([3]))
    """
    data = tensor.detach().as_strided((footprint(tensor),), (1,)).view(torch.uint8)
    words = data.numel() % 8 == 0 and data.storage_offset() % 8 == 0
    return data.view(torch.int64) if words else data


def snapshot(tensor: Tensor) -> Tensor:
    """A copy; what is expanded stays so.

    >>> snapshot(torch.ones(3).expand(5, 3)).stride(), snapshot(torch.ones(5, 9)[:, :3]).stride()
    ((0, 1), (3, 1))
    """
    if footprint(tensor) >= tensor.numel():
        return tensor.detach().clone()
    return memory(tensor).clone().view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


def batch_stride(table: Tensor) -> int:
    """The batch stride of a [B|1, ..] table; 0 if it is broadcast."""
    return table.stride(0) if table.shape[0] > 1 else 0


def missing_memory(tensor: Tensor) -> tuple[int, int] | None:
    """(bytes needed, bytes of the storage) if the storage is too small; None if it is large enough.

    A storage can be resized after the tensor was created, as FSDP does with parameters that are sharded again.
    """
    size, have = tensor.element_size(), tensor.untyped_storage().nbytes()
    begin = tensor.storage_offset()
    if have >= begin * size + tensor.nbytes and tensor.is_contiguous():
        return None
    need = int((begin + footprint(tensor)) * size) if tensor.numel() else 0
    return (need, have) if need > have else None


def is_autocast(device: torch.device) -> bool:
    """Whether torch.autocast applies to tensors on the device; for the meta device PyTorch raises an error."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def values_are_traced() -> bool:
    """Whether a mode is active under which values of tensors are fakes or proxies, or would become constants."""
    return any(torch._C._get_dispatch_mode(key) is not None for key in _RECORDERS)


def recorder(tensors: Iterable[object]) -> str | None:
    """What records a call with these tensors or fakes their values, for errors; None: the call computes with values."""
    if jit_trace() is not None:
        return "torch.jit.trace"
    if _modes():
        for key, name in _RECORDERS.items():
            if torch._C._get_dispatch_mode(key) is not None:
                return name
    return "fake tensors" if any(type(tensor).__name__ == "FakeTensor" for tensor in tensors) else None


def after_collective(tensor: TensorT) -> TensorT:
    """The tensor that a functional collective of PyTorch returns, once it has its values; any other one unchanged.

    Reads the name of the class, so that nothing imports that module.
    """
    if type(tensor).__name__ != "AsyncCollectiveTensor":
        return tensor
    result: Any = tensor
    return result.clone() if result.requires_grad else result.wait()  # type: ignore[no-any-return]


def functional_mode() -> bool:
    """Whether a FunctionalTensorMode is active."""
    return torch._C._get_dispatch_mode(_KEYS.FUNCTIONAL) is not None


def readable(*tensors: Tensor | None) -> bool:
    """Whether the values may be read: plain CPU tensors, outside of torch.compile, ``torch.jit.trace`` (which would
    record what follows from them as constants) and tracing or fake modes, that no vmap batches."""
    if torch.compiler.is_compiling() or jit_trace() is not None or (_modes() and values_are_traced()):
        return False
    if _functorch.peek_interpreter_stack() is not None and any(map(is_batched, tensors)):
        return False
    return all(t is None or (t.device.type == "cpu" and type(t) in (Tensor, torch.nn.Parameter)) for t in tensors)


def is_batched(tensor: Tensor | None) -> bool:
    """Whether a tensor stands for several ones, of which a vmap runs the operations at once. Only under torch.func."""
    while tensor is not None and _functorch.is_functorch_wrapped_tensor(tensor):
        if _functorch.is_batchedtensor(tensor):
            return True
        tensor = _functorch.get_unwrapped(tensor)
    return False


def scattered(table: Tensor, axis: int, index: Tensor, values: Any) -> Tensor:
    """The table with values at an index along an axis; in place, unless vmap may batch the index and not the table."""
    in_place = torch.compiler.is_compiling() or _functorch.peek_interpreter_stack() is None
    written: Tensor = table.scatter_(axis, index, values) if in_place else table.scatter(axis, index, values)
    return written


def is_traced() -> bool:
    """Whether torch.compile, a TorchDispatchMode, torch.func or CUDA graph capture is active: nothing may be
    cached then."""
    return (
        torch.compiler.is_compiling()
        or _modes() > 0
        or _functorch.peek_interpreter_stack() is not None
        or is_captured()
    )


def is_captured() -> bool:
    """Whether a CUDA graph is being captured: kernels run only at replay, in memory of the graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


_MAX_COMPARED_BYTES = 1 << 14
"""More than the lengths, offsets and block tables of most calls have. To copy and compare them takes a microsecond."""

_PLAIN = (Tensor, torch.nn.Parameter)


def versions(tensors: Sequence[Tensor]) -> tuple[object, ...] | None:
    """What differs once a tensor was changed: the bytes of a small tensor on the CPU, otherwise its in-place version.

    The version does not count what is written through ``.data`` or the array of ``torch.from_numpy``.

    Returns:
        A hashable value to compare by ``==``; None if a change may go unseen: large inference tensors, which have no
        version, large ones in memory that PyTorch does not own, tensors of torch.func, tracing.

    >>> lengths = torch.tensor([3, 5])
    >>> before = versions((lengths,))
    >>> lengths.data[0] = 4
    >>> versions((lengths,)) == before
    False
    """
    if torch.compiler.is_compiling():
        return None
    try:
        return tuple([_content(tensor) or _counted_version(tensor) for tensor in tensors])
    except RuntimeError:
        return None


def _content(tensor: Tensor) -> bytes | None:
    """The bytes of the memory that the tensor, or its storage if that is small too, has on the CPU; None if there are
    too many."""
    if not tensor.is_cpu or type(tensor) not in _PLAIN:
        return None
    storage = tensor.untyped_storage()
    size, address = storage.nbytes(), storage.data_ptr()
    if size > _MAX_COMPARED_BYTES:
        size, address = tensor.nbytes, tensor.data_ptr()
        if size > _MAX_COMPARED_BYTES or not tensor.is_contiguous() or missing_memory(tensor):
            return None
    return ctypes.string_at(address, size) if address else None


def have_small_storages(tensors: Sequence[Tensor]) -> bool:
    """Whether all are on the CPU, with so little memory that its bytes are compared."""
    return all(t.is_cpu and t.untyped_storage().nbytes() <= _MAX_COMPARED_BYTES for t in tensors)


def small_storages(tensors: Sequence[Tensor]) -> tuple[object, ...] | None:
    """What plain tensors on the CPU are, where they lie, and the bytes of their storages; None if one is not such a
    tensor or large.

    >>> lengths = torch.tensor([3, 5])
    >>> before = small_storages([lengths])
    >>> small_storages([lengths]) == before, small_storages([lengths[None]]) == before
    (True, False)
    """
    if not have_small_storages(tensors):
        return None
    return tuple([(t.data_ptr(), t.shape, t.stride(), t.storage_offset(), t.dtype, _content(t)) for t in tensors])


def _counted_version(tensor: Tensor) -> int:
    """The in-place version; RuntimeError if there is none, or if it does not count every change."""
    if tensor.is_cpu and type(tensor) in _PLAIN and not tensor.untyped_storage().resizable():
        raise RuntimeError("others, such as NumPy, may write to memory that PyTorch does not own")
    return tensor._version


def is_dense(x: Tensor) -> bool:
    """Whether a tensor has sizes and strides: not one that is sparse, nested, or in a layout of oneDNN."""
    return x.layout is torch.strided and not x.is_nested


def is_lazy(tensor: Tensor) -> bool:
    """Whether the values at its pointer are not its own: a negated view, or a tensor of zeros without memory."""
    return tensor.is_neg() or tensor._is_zerotensor()


def materialise(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it if it `is_lazy`.

    >>> import torch
    >>> materialise(torch._neg_view(torch.ones(1))).data_ptr() == 0
    False
    """
    if tensor._is_zerotensor():
        return tensor.clone()
    return tensor.resolve_neg() if tensor.is_neg() else tensor


def some_rows(tensor: Tensor, rows: slice) -> Tensor:
    """Rows (axis 2) of the tensor; the tensor itself if these are all, because a view costs two microseconds.

    >>> lse = torch.zeros(1, 2, 5)
    >>> some_rows(lse, slice(0, 5)) is lse, some_rows(lse, slice(2, 5)).shape, some_rows(lse, slice(0, 4)).shape
    (True, torch.Size([1, 2, 3]), torch.Size([1, 2, 4]))
    """
    return tensor if rows.start == 0 and rows.stop >= tensor.shape[2] else tensor[:, :, rows]


def with_contiguous_rows(tensor: Tensor) -> Tensor:
    """The tensor if its last axis has stride 1, as kernels require; else a contiguous copy."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def empty_rows_like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """`torch.empty_like` with a last axis of stride 1, also if rows of the tensor overlap.

    >>> import torch
    >>> windows = torch.arange(9).unfold(0, 8, 1)
    >>> torch.empty_like(windows).stride(), empty_rows_like(windows).stride()
    ((1, 2), (8, 1))
    """
    empty = torch.empty_like(tensor, dtype=dtype)
    if empty.stride(-1) == 1 or empty.shape[-1] == 1:
        return empty
    return torch.empty_like(tensor, dtype=dtype, memory_format=torch.contiguous_format)

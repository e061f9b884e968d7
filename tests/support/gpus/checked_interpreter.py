"""Triton's interpreter, in which a kernel may read and write only its own tensors.

The interpreter reads and writes at any address, as a GPU does: it changes what lies beside a tensor, or ends. Here a
load or store outside of the tensors of its launch raises an error. Tensors that a call does not have, for which the
kernels get placeholders, may not be touched at all.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from undivided.arguments.tensors import footprint
from undivided.backends.triton import inputs

POOLS = ("k", "v", "k_scale", "v_scale")
"""Arguments of kernels that may be pools of pages."""


class OutsideOfTensors(Exception):
    """A kernel reads or writes memory that is not of its tensors."""


def install() -> None:
    """Check every load and store of kernels that are interpreted from now on; nothing happens without Triton."""
    if importlib.util.find_spec("triton") is None:
        return
    from triton.runtime import interpreter

    builder, run, placeholder = interpreter.InterpreterBuilder, interpreter.GridExecutor.__call__, inputs._placeholder
    placeholders: set[int] = set()
    memory = _Memory("", [])

    @functools.cache
    def told(dtype: torch.dtype, device: torch.device) -> Tensor:
        tensor = placeholder(dtype, device)
        placeholders.add(tensor.data_ptr())
        return tensor

    @functools.wraps(run)
    def with_its_memory(executor: Any, *arguments: Any, **named: Any) -> None:
        nonlocal memory
        before, given = memory, dict(zip(executor.arg_names, arguments, strict=False)) | named
        tensors = {name: getattr(value, "base", value) for name, value in given.items()}  # base: of a tensor descriptor
        spans = [
            _span(tensor, name in POOLS and given.get("PAGE", 0) > 0)
            for name, tensor in tensors.items()
            if isinstance(tensor, Tensor) and tensor.numel() and tensor.data_ptr() not in placeholders
        ]
        memory = _Memory(executor.fn.__name__, spans)
        try:
            run(executor, *arguments, **named)
        finally:
            memory = before

    def checked(name: str, place_of_mask: int) -> None:
        original = getattr(builder, name)

        @functools.wraps(original)
        def access(self: Any, pointers: Any, *others: Any, **named: Any) -> Any:
            size = pointers.get_element_ty().primitive_bitwidth // 8
            memory.check(pointers.data, others[place_of_mask].data, size)
            return original(self, pointers, *others, **named)

        setattr(builder, name, access)

    inputs._placeholder = told
    interpreter.GridExecutor.__call__ = with_its_memory
    checked("create_masked_load", 0)
    checked("create_masked_store", 1)


def _span(tensor: Tensor, is_pool: bool) -> tuple[int, int]:
    """The addresses of a tensor, from the first to one past the last.

    is_pool: up to the end of its storage, because a view of chosen blocks has only the first token of each page
        (`undivided.backends.shared.chosen.pools`).
    """
    storage, first = tensor.untyped_storage(), tensor.data_ptr()
    return first, storage.data_ptr() + storage.nbytes() if is_pool else first + footprint(
        tensor
    ) * tensor.element_size()


class _Memory:
    """The memory of a kernel's tensors.

    Args:
        kernel: its name.
        spans: addresses of the first byte of each tensor, and of one past its last.
    """

    def __init__(self, kernel: str, spans: Iterable[tuple[int, int]]) -> None:
        self._kernel, spans = kernel, sorted(spans)
        self._first = np.array([first for first, _ in spans], dtype=np.uint64)
        # tensors may overlap: what one of those that begin earlier reaches
        self._last = np.maximum.accumulate(np.array([last for _, last in spans], dtype=np.uint64))

    def check(self, pointers: Any, mask: Any, size: int) -> None:
        """Raise OutsideOfTensors if a pointer that is not masked out is not of `size` bytes of a tensor."""
        pointers, mask = np.broadcast_arrays(pointers, mask)
        used = pointers[mask.astype(bool)].astype(np.uint64)  # a mask of scalars may be of integers
        if not used.size:
            return
        place = np.searchsorted(self._first, used, side="right")
        inside = place > 0
        if len(self._first):
            inside &= used + np.uint64(size) <= self._last[np.maximum(place, 1) - 1]
        if not inside.all():
            raise OutsideOfTensors(f"{self._kernel}: {int((~inside).sum())} of {used.size} accesses of {size} bytes")

"""The native kernel's backward: its second record, and the sums that the kernel leaves to Python.

The kernel writes dq, dk, dv, and one number per query row for sinks, slopes and a bias that all keys share (one per key
for a bias that all rows share). They are summed here over the axes along which the input is broadcast, in fp64 and in
order: the order of `torch.sum` depends on the number of threads, that of `cumsum` does not.

The kernel may request another attempt, in two cases:

- On AMX, products are those of 16-bit numbers: fp32 and its gradients are sums of several, and gradients of fp16 scores
  are rounded to fp16. If some numbers do not fit (for example rows of V with unusually large norms), the next attempt
  takes a type with a wider range.
- Gradients are NaN although no allowed pair is. The kernel computes such heads again, pair by pair; if several calls or
  heads add to one buffer, it does so for all of them, in one more attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from undivided.arguments import layout as _layout
from undivided.arguments.layout import STRIDE_GETTERS
from undivided.arguments.tensors import empty_rows_like, some_rows, with_contiguous_rows
from undivided.backends._base import Gradients
from undivided.backends.native.call import Records, is_plain, plain_record
from undivided.backends.native.memory import require_memory, with_addresses
from undivided.backends.shared.alibi import sum_of_sequences
from undivided.kernels import cpu
from undivided.request.call import Call
from undivided.request.problem import Problem
from undivided.request.request import Tensors
from undivided.request.result import Result

_PACK = cpu.GRADIENT_RECORD.pack
_SIZE = cpu.GRADIENT_RECORD.size
_NO_TENSOR: tuple[int, ...] = (0,) * 4
_NO_BIAS: tuple[int, ...] = (0,) * 5
_Outcome = TypeVar("_Outcome")


def backward(call: Call, tensors: Tensors, result: Result, grad_out: Tensor, grad_lse: Tensor | None) -> Gradients:
    """Gradients from (out, lse); see `Backend.backward`."""
    layout = call.problem.layout
    library = cpu.load()
    assert isinstance(library, cpu.Library)
    (tensors, addresses), grad_out = with_addresses(tensors), require_memory(grad_out)
    out, lse = with_contiguous_rows(require_memory(result.out)), with_contiguous_rows(require_memory(result.lse))
    grad_lse = None if grad_lse is None else require_memory(grad_lse)
    if call.pages is None and tensors.sinks is None and is_plain(call, tensors):
        problem_record = plain_record(call, tensors, addresses, None, out, lse)
        return _plain(library, call, tensors, problem_record, grad_out, grad_lse, call.problem.dtype)
    records = Records(
        call,
        tensors,
        (*tensors.without_pages(call.pages, layout).heads_first(layout), _layout.heads_first(out, layout), lse),
    )
    slices = records.slices()

    def run(attempt: int) -> tuple[int | None, _Buffers]:
        gradients = _Buffers(call, tensors, grad_out, grad_lse, accumulate=len(slices) > 1, attempt=attempt)
        for rows in slices:
            next_attempt = library.backward(records.record(rows), gradients.record(rows), attempt)
            if next_attempt is not None:
                return next_attempt, gradients
        return None, gradients

    return _run_attempts(run).finish()


def _run_attempts(run: Callable[[int], tuple[int | None, _Outcome]]) -> _Outcome:
    """What the first valid attempt gave. run(attempt) returns the number of the attempt to make next, None if this one
    is valid, and what it gave."""
    next_attempt: int | None = 0
    while next_attempt is not None:
        next_attempt, outcome = run(next_attempt)
    return outcome


def plain_fp32(call: Call, tensors: Tensors, result: Result, grad_out: Tensor, grad_lse: Tensor | None) -> Gradients:
    """The gradients of q, k and v in fp32, which a caller adds up. The problem `is_plain`, without sinks and in layout
    bhsd, and all tensors are contiguous."""
    library = cpu.load()
    assert isinstance(library, cpu.Library)
    tensors, addresses = with_addresses(tensors)
    problem_record = plain_record(call, tensors, addresses, None, result.out, result.lse)
    return _plain(library, call, tensors, problem_record, grad_out, grad_lse, torch.float32)


def _plain(
    library: cpu.Library,
    call: Call,
    tensors: Tensors,
    problem_record: bytes,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    dtype: torch.dtype,
) -> Gradients:
    """The gradients of q, k and v of a problem that `is_plain`, without sinks, in one kernel call, in its dtype or
    fp32."""
    problem = call.problem
    grad = with_contiguous_rows(grad_out if grad_out.dtype is problem.dtype else grad_out.to(problem.dtype))
    lse = None if grad_lse is None else with_contiguous_rows(grad_lse.float())
    inputs = (tensors.q, tensors.k, tensors.v)
    buffers = [_gradient_buffer(x, False, dtype) if n else None for x, n in zip(inputs, call.needs, strict=False)]
    strides = STRIDE_GETTERS[problem.layout]
    grad_fields = (grad.data_ptr(), *strides(grad.stride()))
    gradient_fields = [_NO_TENSOR if x is None else (x.data_ptr(), *strides(x.stride())) for x in buffers]

    def run(attempt: int) -> tuple[int | None, list[Tensor | None]]:
        record = _record(problem, cpu.DTYPES[dtype], False, attempt, grad_fields, lse, gradient_fields)
        return library.backward(problem_record, record, attempt), buffers

    return [*_run_attempts(run), None, None, None]


def _record(
    problem: Problem,
    dtype: int,
    accumulate: bool,
    attempt: int,
    grad: tuple[int, ...],
    lse: Tensor | None,
    gradient_fields: Sequence[tuple[int, ...]],
    rows: tuple[int, int] = (0, 0),
    bias: tuple[int, ...] = _NO_BIAS,
) -> bytes:
    """The C record. grad and gradient_fields (dq, dk, dv): see `_tensor_fields`; rows: addresses of the row sums for
    sinks and slopes."""
    return _PACK(
        _SIZE,
        dtype,
        accumulate,
        attempt,
        *grad,
        *(_NO_TENSOR[:3] if lse is None else (lse.data_ptr(), *lse.stride()[:2])),
        *gradient_fields[0],
        *gradient_fields[1],
        *gradient_fields[2],
        *rows,
        problem.heads * problem.q_len,
        problem.q_len,
        *bias,
    )


def _tensor_fields(tensor_BHSD: Tensor | None) -> tuple[int, ...]:
    """A record's fields of a tensor: its address, and the strides of batch, head and token."""
    return _NO_TENSOR if tensor_BHSD is None else (tensor_BHSD.data_ptr(), *tensor_BHSD.stride()[:3])


class _Buffers:
    """The buffers that the kernel fills, the records that point to them, and the results."""

    def __init__(
        self, call: Call, tensors: Tensors, grad_out: Tensor, grad_lse: Tensor | None, accumulate: bool, attempt: int
    ) -> None:
        problem = call.problem
        self._call, self._tensors, self._accumulate, self._attempt = call, tensors, accumulate, attempt
        self._grad_out = with_contiguous_rows(_layout.heads_first(grad_out.to(problem.dtype), problem.layout))
        self._grad_lse = None if grad_lse is None else with_contiguous_rows(grad_lse.float())
        needs, layout = call.needs, problem.layout
        inputs = (tensors.q, tensors.k, tensors.v)
        self._qkv = [
            _gradient_buffer(x, accumulate, problem.dtype) if n else None for x, n in zip(inputs, needs, strict=False)
        ]
        self._views = [None if x is None else _layout.heads_first(x, layout) for x in self._qkv]
        rows = (problem.batch, problem.heads, problem.q_len)
        self._sinks = torch.zeros(rows, dtype=torch.float32, device=grad_out.device) if needs[4] else None
        self._slopes = torch.zeros(rows, dtype=torch.float32, device=grad_out.device) if needs[5] else None
        self._bias = self._bias_buffer() if needs[3] else None

    def _bias_buffer(self) -> Tensor:
        """fp32 sums: [B, H, Sq, 1] for a bias without a key axis, [B, H, 1, Sk] without a row axis, else the bias's
        shape."""
        problem, bias = self._call.problem, self._tensors.bias
        assert bias is not None
        if bias.shape[3] == 1:
            return torch.zeros(problem.batch, problem.heads, problem.q_len, 1, dtype=torch.float32, device=bias.device)
        if bias.shape[2] == 1:
            return torch.zeros(problem.batch, problem.heads, 1, problem.kv_len, dtype=torch.float32, device=bias.device)
        return torch.zeros(bias.shape, dtype=torch.float32, device=bias.device)

    def record(self, rows: slice) -> bytes:
        """The record for these rows."""
        dq, dk, dv = self._views
        lse = self._grad_lse
        bias = _NO_BIAS
        sinks, slopes = (0 if x is None else some_rows(x, rows).data_ptr() for x in (self._sinks, self._slopes))
        if self._bias is not None:
            sums = some_rows(self._bias, rows) if self._bias.shape[2] > 1 else self._bias
            strides = (
                stride if size > 1 else 0 for stride, size in zip(self._bias.stride(), self._bias.shape, strict=True)
            )
            bias = (sums.data_ptr(), *strides)
        return _record(
            self._call.problem,
            cpu.DTYPES[torch.float32 if self._accumulate else self._call.problem.dtype],
            self._accumulate,
            self._attempt,
            _tensor_fields(some_rows(self._grad_out, rows)),
            None if lse is None else some_rows(lse, rows),
            (_tensor_fields(None if dq is None else some_rows(dq, rows)), _tensor_fields(dk), _tensor_fields(dv)),
            (sinks, slopes),
            bias,
        )

    def finish(self) -> list[Tensor | None]:
        """The gradients in the order, shapes and dtypes of the inputs."""
        tensors = self._tensors
        gradients: list[Tensor | None] = [None if x is None else x.to(self._call.problem.dtype) for x in self._qkv]
        bias = sinks = slopes = None
        if self._bias is not None:
            assert tensors.bias is not None
            bias = _sum_to(self._bias, tensors.bias.shape)
        if self._sinks is not None:
            sinks = _sum_to(self._sinks, (1, self._call.problem.heads, 1)).flatten()
        if self._slopes is not None:
            slopes = self._sum_of_slopes(self._slopes)
        for tensor, x in ((tensors.bias, bias), (tensors.sinks, sinks), (tensors.alibi_slopes, slopes)):
            gradients.append(None if x is None or tensor is None else x.to(tensor.dtype))
        return gradients

    def _sum_of_slopes(self, rows: Tensor) -> Tensor:
        slopes = self._tensors.alibi_slopes
        assert slopes is not None
        if slopes.dim() == 1:
            return _sum_to(rows, (1, self._call.problem.heads, 1)).flatten()
        if self._call.problem.batch != 1:  # documents, whose rows may be of any sequence, are a batch of one
            return _sum_to(rows, (*rows.shape[:2], 1)).squeeze(-1)
        return sum_of_sequences(rows, slopes, self._call.normal_form(self._tensors.q))


def _gradient_buffer(tensor: Tensor, accumulate: bool, dtype: torch.dtype) -> Tensor:
    """The buffer of the gradient of q, k or v: uninitialised with the tensor's strides, or fp32 zeros if several kernel
    calls add to it."""
    if accumulate:
        return torch.zeros(tensor.shape, dtype=torch.float32, device=tensor.device)
    return empty_rows_like(tensor, dtype)


def _sum_to(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """The sum over the axes that are 1 in `shape`, in an order that does not depend on the number of threads."""
    summed = [axis for axis, size in enumerate(shape) if size == 1 and tensor.shape[axis] != 1]
    if not summed:
        return tensor
    others = [axis for axis in range(tensor.dim()) if axis not in summed]
    flat = tensor.permute(*others, *summed).flatten(len(others))
    if flat.shape[-1] == 0:
        return tensor.new_zeros(shape)
    return flat.cumsum(-1, dtype=torch.float64)[..., -1].float().reshape(shape)

"""A forward that runs again with other tensors: the kernel's record of the first call, with other addresses."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from undivided.kernels import cpu
from undivided.request.call import Call
from undivided.request.problem import Problem

NEEDS_MORE = frozenset({"backward", "lse", "bias", "alibi", "sinks", "dropout", "strided"})
"""Features of calls that have other outputs, or read tensors that a replay does not get."""

_CHANGING = ("threads", "q", "k", "v", "out", "pages", "k_scale", "v_scale")
"""The fields of the record that differ from call to call, in its order."""

_STARTS = [8 * cpu.FIELDS.index(name) for name in _CHANGING]
_BETWEEN = [slice(a, b) for a, b in zip([0, *(s + 8 for s in _STARTS)], [*_STARTS, cpu.RECORD.size], strict=True)]
_PACK = struct.Struct("=" + "q".join(f"{gap.stop - gap.start}s" for gap in _BETWEEN)).pack


class KernelReplay:
    """The forward of a call of one record.

    Args:
        library: the loaded kernel.
        record: of the call. What it points to need not be kept alive, but for the call's mask.
        call: the call.
    """

    def __init__(self, library: cpu.Library, record: bytes, call: Call) -> None:
        self._constants = tuple([record[gap] for gap in _BETWEEN])
        self._forward, self._problem = library.forward, call.problem
        self._mask = call.checked_mask  # its normal form owns the table of ranges that the record points to

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, pages: Tensor | None, k_scale: Tensor | None, v_scale: Tensor | None
    ) -> Tensor:
        out = new_output(self._problem, q)
        constant = self._constants
        record = _PACK(  # a loop costs two microseconds
            constant[0],
            torch.get_num_threads(),
            constant[1],
            q.data_ptr(),
            constant[2],
            k.data_ptr(),
            constant[3],
            v.data_ptr(),
            constant[4],
            out.data_ptr(),
            constant[5],
            _address(pages),
            constant[6],
            _address(k_scale),
            constant[7],
            _address(v_scale),
            constant[8],
        )
        self._forward(record)
        return out


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def new_output(problem: Problem, q: Tensor) -> Tensor:
    """Uninitialised, contiguous, in the caller's layout."""
    if problem.v_dim == problem.qk_dim and q.is_contiguous():
        return torch.empty_like(q)
    return q.new_empty((*q.shape[:-1], problem.v_dim))

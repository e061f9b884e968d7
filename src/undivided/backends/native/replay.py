"""A forward that runs again with other tensors: the kernel's record of the first call, with other addresses."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from undivided.arguments.layout import STRIDE_GETTERS
from undivided.backends._base import KeyRange
from undivided.backends.native.memory import as_kernel_sinks
from undivided.kernels import cpu
from undivided.request.call import Call
from undivided.request.problem import Problem

UNSUPPORTED_FEATURES = frozenset({"backward", "lse", "alibi", "dropout", "strided"})
"""Features of calls that have other outputs, or read tensors that a replay does not get."""


class _Template:
    """Splits a record into the fields that differ from call to call and the bytes between them.

    bias: the field of the tensor that a replay gets as its bias.
    """

    def __init__(self, bias: str) -> None:
        # in the record's order
        changing = ("threads", "q", "k", "v", "out", "pages", "sinks", bias, "k_scale", "v_scale")
        starts = [8 * cpu.FIELDS.index(name) for name in changing]
        ends = [start + 8 for start in starts]
        self.between = [slice(a, b) for a, b in zip([0, *ends], [*starts, cpu.RECORD.size], strict=True)]
        self.pack = struct.Struct("=" + "q".join(f"{gap.stop - gap.start}s" for gap in self.between)).pack


_WITH_BIAS, _WITH_MASK = _Template("bias"), _Template("dense")

_KV_LEN_OFFSET, _K_STRIDES_OFFSET, _V_STRIDES_OFFSET, _RANGES_OFFSET = (
    8 * cpu.FIELDS.index(name) for name in ("kv_len", "k_b", "v_b", "ranges")
)
_WRITE_INT, _WRITE_STRIDES, _WRITE_PLACE = (struct.Struct(f"={count}q").pack_into for count in (1, 3, 2))


class KernelReplay:
    """The forward of a call of one record.

    Args:
        library: the loaded kernel.
        record: of the call. Of what it points to, only the call's mask is kept alive.
        call: the call.
        mask_memory: what the record points to besides the tensors of a call and of its normal form.
        is_plain: whether the record has no optional fields but sinks, as `plain_record` makes it.
        takes_mask: whether calls supply a boolean mask in place of the bias.
    """

    def __init__(
        self,
        library: cpu.Library,
        record: bytes,
        call: Call,
        mask_memory: object = None,
        is_plain: bool = False,
        takes_mask: bool = False,
    ) -> None:
        # the normal form owns the table of ranges, and most other tensors of the mask
        self._set(
            library, record, call.problem, (call.checked_mask, mask_memory), _WITH_MASK if takes_mask else _WITH_BIAS
        )
        self._is_plain = is_plain and call.pages is call.k_scale is None

    def _set(
        self,
        library: cpu.Library,
        record: bytes,
        problem: Problem,
        mask_memory: object,
        template: _Template = _WITH_BIAS,
    ) -> None:
        self._constants, self._pack = tuple([record[gap] for gap in template.between]), template.pack
        self._library, self._record, self._problem, self._mask_memory = library, record, problem, mask_memory
        self._forward = library.forward

    def with_keys(self, problem: Problem, keys: Sequence[KeyRange] | None, k: Tensor, v: Tensor) -> KernelReplay | None:
        """The forward of a call with other keys (see `Backend.replay_keys`); None if the record is not plain."""
        if not self._is_plain:
            return None
        record, strides, table = bytearray(self._record), STRIDE_GETTERS[problem.layout], None
        _WRITE_INT(record, _KV_LEN_OFFSET, problem.kv_len)
        _WRITE_STRIDES(record, _K_STRIDES_OFFSET, *strides(k.stride()))
        _WRITE_STRIDES(record, _V_STRIDES_OFFSET, *strides(v.stride()))
        if keys is not None:
            table = array("i", chain.from_iterable(keys))
            _WRITE_PLACE(record, _RANGES_OFFSET, table.buffer_info()[0], 2 if len(keys) > 1 else 0)
        replay = object.__new__(KernelReplay)
        replay._set(self._library, bytes(record), problem, table)
        replay._is_plain = True
        return replay

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        sinks: Tensor | None,
        pages: Tensor | None,
        k_scale: Tensor | None,
        v_scale: Tensor | None,
    ) -> Tensor:
        out, sinks = new_output(self._problem, q), as_kernel_sinks(sinks)
        constant = self._constants
        record = self._pack(  # written out, because a loop costs two microseconds
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
            _address(sinks),
            constant[7],
            _address(bias),
            constant[8],
            _address(k_scale),
            constant[9],
            _address(v_scale),
            constant[10],
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

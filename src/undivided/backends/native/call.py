"""The native kernel's arguments: a call and its tensors as the flat records of its C ABI.

Sizes, strides and ranges are already validated, and ranges are clamped to the keys; the library refuses other records
with a status (abi/check.cc). It cannot check that the memory behind a pointer is as large as the sizes say: the
caller keeps every tensor that a record points to alive until the kernel returns.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from undivided.arguments.layout import STRIDE_GETTERS, Strides
from undivided.arguments.tensors import batch_stride, some_rows
from undivided.backends.native import evaluated
from undivided.backends.native.memory import as_kernel_sinks, require_memory
from undivided.backends.shared.alibi import row_slopes
from undivided.errors import InputError
from undivided.kernels import cpu, philox
from undivided.masks import FULL
from undivided.masks.normal_form import DensePairs
from undivided.masks.normal_form.tree_pairs import TreePairs
from undivided.quantization import FORMAT_CODES
from undivided.request.call import Call
from undivided.request.problem import Problem
from undivided.request.request import Tensors
from undivided.request.result import UNREAD

_SIZE = cpu.RECORD.size
_PACK = cpu.RECORD.pack
# the record in groups of fields: tensors; ranges; pages; and the optional ones, which are 0 in plain problems
_FORMAT = cpu.RECORD.format
_RANGES, _PAGES, _REST = map(cpu.FIELDS.index, ("ranges", "pages", "sinks"))
_TENSORS = struct.Struct("=72s q 2d q 24s q 24s q 24s q 24s q 16s")  # sizes; threads; scale, softcap; pointers, strides
assert _TENSORS.size == struct.calcsize(_FORMAT[:_RANGES])
_PACK_TENSORS, _PACK_SIZES, _PACK_STRIDES = _TENSORS.pack, struct.Struct("=9q").pack, struct.Struct("=3q").pack
_PACK_RANGES = struct.Struct(_FORMAT[_RANGES:_PAGES]).pack
_PACK_PAGES = struct.Struct(_FORMAT[_PAGES:_REST]).pack
# the record's fields of absent arguments: pointers, then strides
NO_RANGES: tuple[int, ...] = (0, 0, 2, 0, 0, 0)
NO_PAGES: tuple[int, ...] = (0,) * 4
_NO_LSE: tuple[int, ...] = (0,) * 3
_NO_BIAS: tuple[int, ...] = (0,) * 6
_NO_DENSE: tuple[int, ...] = (0,) * 9
_EVERY_KEY_HAS_ENTRIES = (0,) * 4  # the fields from `dense_from` on
_NO_SLOPES: tuple[int, ...] = (0,) * 6
_NO_KEYS: tuple[int, ...] = (0,) * 2
_NO_DROPOUT: tuple[float, ...] = (0, 0, 0.0, 0, 0, 0, 0, 0)
_NOT_INVARIANT: tuple[int, ...] = (0,) * 3
_NO_SCALES: tuple[int, ...] = (0,) * 9
_PACK_REST = struct.Struct(_FORMAT[_REST:]).pack
_NO_OPTIONS = (*_NO_BIAS, *_NO_DENSE, *_NO_SLOPES, *_NO_KEYS, *_NO_DROPOUT, *_NOT_INVARIANT)  # after the sinks
_NOTHING_ELSE = _PACK_REST(0, *_NO_OPTIONS, *_NO_SCALES)
_WRITE_DENSE = struct.Struct("=5q").pack_into  # a boolean mask and its strides
_EVERY_KEY = _PACK_RANGES(*NO_RANGES)
_PLAIN_REST = _PACK_PAGES(*NO_PAGES) + _NOTHING_ELSE
_BANDS = frozenset({"causal", "window"})  # the same in every sequence: the kernel computes the ranges, without a table
_OPTIONAL_FEATURES = frozenset({"bias", "alibi", "dropout"})


def is_plain(call: Call, tensors: Tensors) -> bool:
    """Whether the mask is ranges and the call has no optional feature but sinks. Most calls are plain: they take a
    short path."""
    problem = call.problem
    if problem.features & _OPTIONAL_FEATURES or problem.batch_invariant:
        return False
    return is_ranges(call, tensors.q)


def is_ranges(call: Call, q: Tensor) -> bool:
    """Whether the mask is a range of keys for each row, and nothing else."""
    return call.problem.mask.kinds <= _BANDS or call.normal_form(q).exact


def plain_record(
    call: Call,
    tensors: Tensors,
    addresses: tuple[int, int, int],
    strides: Strides | None,
    out: Tensor,
    lse: Tensor,
    pages: tuple[int, ...] = NO_PAGES,
    sinks: Tensor | None = None,
) -> bytes:
    """The record of a whole problem that `is_plain`. q, k and v are at these addresses in the caller's layout, or in
    pages; strides None reads those of `tensors`; sinks are those of `as_kernel_sinks`."""
    if strides is None:
        strides = Strides(*tensors[:3], call.problem.layout, call.pages is not None)
    # repeated calls pack 14 values instead of 30
    sizes, q_strides, k_strides, v_strides, out_strides, lse_strides = strides.record_parts or _pack(
        strides, call.problem, out, lse
    )
    if not (out_address := out.data_ptr()):
        require_memory(out)  # of fake memory, under a mode
    q, k, v = addresses
    lse_address = 0 if lse is UNREAD else lse.data_ptr()
    options = torch.get_num_threads(), call.scale, call.softcap or 0.0
    head = _PACK_TENSORS(
        sizes, *options, q, q_strides, k, k_strides, v, v_strides, out_address, out_strides, lse_address, lse_strides
    )
    checked, mask = call.checked_mask, call.mask
    if checked is not None:
        ranges = checked.range_record or _pack_ranges(call, tensors)
    else:
        ranges = _EVERY_KEY if mask is FULL or mask.is_full else _pack_ranges(call, tensors)
    if sinks is None and call.k_scale is None:
        return head + ranges + (_PLAIN_REST if pages is NO_PAGES else _PACK_PAGES(*pages) + _NOTHING_ELSE)
    sinks_address = 0 if sinks is None else sinks.data_ptr()
    return head + ranges + _PACK_PAGES(*pages) + _PACK_REST(sinks_address, *_NO_OPTIONS, *scale_fields(call))


def with_dense(record: bytes, mask: Tensor) -> bytes:
    """A record without a boolean mask, with this one [B, H, Sq, Sk]."""
    changed = bytearray(record)
    _WRITE_DENSE(changed, 8 * cpu.FIELDS.index("dense"), mask.data_ptr(), *mask.stride())
    return bytes(changed)


def _pack(strides: Strides, problem: Problem, out: Tensor, lse: Tensor) -> tuple[bytes, ...]:
    """The parts of a plain record that repeated calls share, kept in `strides`: sizes, and the strides of q, k, v, out
    and lse."""
    _, dtype, layout, batch, heads, kv_heads, q_len, kv_len, qk_dim, v_dim = problem[:10]
    sizes = _PACK_SIZES(_SIZE, cpu.DTYPES[dtype], batch, heads, kv_heads, q_len, kv_len, qk_dim, v_dim)
    out_strides = STRIDE_GETTERS[layout](out.stride())
    lse_strides = (0, 0) if lse is UNREAD else lse.stride()[:2]
    rows = [_PACK_STRIDES(*steps) for steps in (strides.q, strides.k, strides.v, out_strides, (*lse_strides, 0))]
    strides.record_parts = (sizes, *rows[:4], rows[4][:16])
    return strides.record_parts


def _pack_ranges(call: Call, tensors: Tensors) -> bytes:
    """The record's fields of ranges, kept with the checked mask, as its table is."""
    packed = _PACK_RANGES(*range_fields(call, tensors))
    if call.checked_mask is not None:
        call.checked_mask.range_record = packed
    return packed


def record(call: Call, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: float) -> bytes:
    """The C record; `rest` are its fields from `ranges` on. The kernel does not write lse if it is `UNREAD`."""
    problem = call.problem
    return _PACK(
        _SIZE,
        cpu.DTYPES[problem.dtype],
        problem.batch,
        problem.heads,
        problem.kv_heads,
        q.shape[2],
        problem.kv_len,
        problem.qk_dim,
        problem.v_dim,
        torch.get_num_threads(),
        call.scale,
        call.softcap or 0.0,
        q.data_ptr(),
        *q.stride()[:3],
        k.data_ptr(),
        *k.stride()[:3],
        v.data_ptr(),
        *v.stride()[:3],
        out.data_ptr(),
        *out.stride()[:3],
        *(_NO_LSE if lse is UNREAD else (lse.data_ptr(), *lse.stride()[:2])),
        *rest,
    )


def range_fields(call: Call, tensors: Tensors) -> tuple[int, ...]:
    """The record's fields of ranges and band. The normal form, which the call keeps alive, owns the table."""
    problem = call.problem
    if call.mask.is_full:
        return NO_RANGES
    if problem.mask.kinds <= _BANDS:
        return (0, 0, 2, 1, *_band(problem))
    return (*call.normal_form(tensors.q).table_place, 0, 0, 0)


def _band(problem: Problem) -> tuple[int, int]:
    """(start, stop): query row i sees keys [i + start, i + stop)."""
    left, right, far = problem.mask.left, problem.mask.right, problem.q_len + problem.kv_len
    shift = problem.kv_len - problem.q_len if problem.align == "bottom_right" else 0
    start = shift - (far if left is None else min(left, far))
    stop = shift + 1 + (far if right is None else min(right, far))
    return start, stop


def _tree_fields(tree: TreePairs, rows: slice) -> tuple[int, ...]:
    """The record's fields of a boolean mask that has entries for nodes only. The normal form owns the tensors."""
    ancestors, first = tree.ancestors[:, rows], tree.first[:, rows]
    place = (ancestors.data_ptr(), batch_stride(ancestors), 0, ancestors.stride(1), 1)
    return (*place, first.data_ptr(), batch_stride(first), ancestors.shape[2], 0)


def scale_fields(call: Call) -> tuple[int, ...]:
    """The record's fields from `format` on."""
    problem, k_scale, v_scale = call.problem, call.k_scale, call.v_scale
    if k_scale is None or v_scale is None:
        return _NO_SCALES
    assert problem.quantized is not None
    strides = STRIDE_GETTERS["bshd" if call.pages is not None else problem.layout]
    return (
        FORMAT_CODES[problem.quantized],
        k_scale.data_ptr(),
        *strides(k_scale.stride()),
        v_scale.data_ptr(),
        *strides(v_scale.stride()),
    )


def page_fields(call: Call, tensors: Tensors) -> tuple[Tensor | None, tuple[int, ...]]:
    """The block table, which must be kept alive until the call returns, and the record's fields that point to it."""
    if call.pages is None:
        return None, NO_PAGES
    # in layout thd the table's rows, like the sequences, follow one another
    table, pool = require_memory(call.pages).contiguous(), tensors.k
    return table, (table.data_ptr(), table.shape[1], pool.shape[1], pool.shape[0])


class Records:
    """Creates records for all query rows or for blocks of them; views are q, k, v, out [B, H, S, D], lse [B, H, Sq].

    takes_pages: whether k and v may be pools of pages (in a forward).
    """

    def __init__(self, call: Call, tensors: Tensors, views: tuple[Tensor, ...], takes_pages: bool = False) -> None:
        problem = call.problem
        self.call, self.tensors = call, tensors
        self.views = tuple([require_memory(view) for view in views])
        self.table, self.pages = page_fields(call, tensors) if takes_pages else (None, NO_PAGES)
        self.sinks = as_kernel_sinks(tensors.sinks)
        self.bias = self.slopes = self.row_position = self.key_position = None
        self.dropout_row = self.dropout_sequence = None
        self.mask_memory: tuple[Tensor | None, ...] = ()
        """The pairs of the mask, and the first keys, that the last record points to."""
        if tensors.bias is not None:
            bias = require_memory(tensors.bias.detach())
            bias = bias if bias.dtype in cpu.DTYPES else bias.float()
            self.bias = bias.expand(problem.batch, problem.heads, problem.q_len, problem.kv_len)
        if tensors.alibi_slopes is not None:
            form = call.normal_form(tensors.q)
            self.slopes = row_slopes(require_memory(tensors.alibi_slopes.detach()).float(), problem, form)
            self.row_position = (form.q_position + form.shift).contiguous()
        if tensors.alibi_slopes is not None or call.dropout_p:
            self.key_position = call.normal_form(tensors.q).kv_position.contiguous()
        if call.dropout_p:
            form = call.normal_form(tensors.q)
            self.dropout_row, self.dropout_sequence = form.q_position.contiguous(), form.sequence_number.contiguous()

    def slices(self) -> list[slice]:
        """The query rows of each kernel call: all at once, unless the mask must be evaluated in blocks."""
        problem = self.call.problem
        if self.mask_is_stored():
            return [slice(0, problem.q_len)]
        return list(evaluated.row_blocks(self.call.normal_form(self.tensors.q), problem))

    def mask_is_stored(self) -> bool:
        """Whether the mask is ranges, a tree or one boolean tensor. Others are evaluated for each record."""
        if self.call.problem.mask.kinds <= _BANDS:
            return True
        form = self.call.normal_form(self.tensors.q)
        return form.exact or form.tree is not None or self._stored_mask() is not None

    def _stored_mask(self) -> Tensor | None:
        """The mask's boolean tensor if the mask is that tensor and ranges; else None."""
        extras = self.call.normal_form(self.tensors.q).extras
        if len(extras) == 1 and isinstance(extras[0], DensePairs):
            return extras[0].tensor
        return None

    def record(self, rows: slice) -> bytes:
        """The record for these rows. What it points to stays alive until the next record is created."""
        call = self.call
        q, k, v, out, lse = self.views
        q, out, lse = some_rows(q, rows), some_rows(out, rows), lse if lse is UNREAD else some_rows(lse, rows)
        bias, slopes, keys, dropout = _NO_BIAS, _NO_SLOPES, _NO_KEYS, _NO_DROPOUT
        if self.bias is not None:
            values = some_rows(self.bias, rows)
            bias = (values.data_ptr(), cpu.DTYPES[values.dtype], *values.stride())
        if self.slopes is not None:
            assert self.row_position is not None
            slope, position = some_rows(self.slopes, rows), self.row_position[:, rows]
            slopes = (slope.data_ptr(), *slope.stride(), position.data_ptr(), batch_stride(position))
        if self.key_position is not None:
            keys = (self.key_position.data_ptr(), batch_stride(self.key_position))
        if call.dropout_p:
            dropout = self._dropout(rows)
        sinks = 0 if self.sinks is None else self.sinks.data_ptr()
        return record(
            call,
            q,
            k,
            v,
            out,
            lse,
            *self._ranges(rows),
            *self.pages,
            sinks,
            *bias,
            *self._dense(rows),
            *slopes,
            *keys,
            *dropout,
            *self._invariance(rows),
            *scale_fields(call),
        )

    def _ranges(self, rows: slice) -> tuple[int, ...]:
        if (rows.start, rows.stop) == (0, self.call.problem.q_len):
            return range_fields(self.call, self.tensors)
        form = self.call.normal_form(self.tensors.q)
        return (form.table[:, rows].data_ptr(), *form.table_place[1:], 0, 0, 0)

    def _dense(self, rows: slice) -> tuple[int, ...]:
        problem = self.call.problem
        if problem.mask.kinds <= _BANDS:
            return _NO_DENSE
        form = self.call.normal_form(self.tensors.q)
        if form.exact:
            return _NO_DENSE
        if form.tree is not None:
            return _tree_fields(form.tree, rows)
        dense, first = self._stored_mask(), None
        if dense is None:  # the ranges are fields of their own
            dense, first = evaluated.evaluate(form, problem, rows)
        else:
            dense = dense[:, :, rows] if dense.shape[2] > 1 else dense
            dense = dense.expand(problem.batch, problem.heads, rows.stop - rows.start, problem.kv_len)
        self.mask_memory = require_memory(dense), first
        place = (dense.data_ptr(), *dense.stride())
        return (*place, *(_EVERY_KEY_HAS_ENTRIES if first is None else (first.data_ptr(), 0, dense.shape[3], 0)))

    def _invariance(self, rows: slice) -> tuple[int, ...]:
        """The record's fields from `batch_invariant` on."""
        if not self.call.problem.batch_invariant:
            return _NOT_INVARIANT
        is_band = self.call.problem.mask.kinds <= _BANDS
        first = None if is_band else self.call.normal_form(self.tensors.q).first_key
        if first is None:
            return (1, 0, 0)
        if self.table is not None and bool((first % self.tensors.k.shape[1]).any()):
            must, size = "start each sequence at a page for batch-invariant results", self.tensors.k.shape[1]
            raise InputError("mask", must, f"first keys {first.unique().tolist()[:8]} with pages of {size}")
        return (1, first[:, rows].data_ptr(), batch_stride(first))

    def _dropout(self, rows: slice) -> tuple[float, ...]:
        """The record's fields from `dropout` on."""
        assert self.dropout_row is not None and self.dropout_sequence is not None and self.call.dropout_seed is not None
        p, position, sequence = self.call.dropout_p, self.dropout_row[:, rows], self.dropout_sequence[:, rows]
        return (
            philox.threshold(p),
            int(self.call.dropout_seed),
            philox.survivor_scale(p) or 1.0,  # a factor of 0 is that of rows without a key, whose values do not count
            position.data_ptr(),
            batch_stride(position),
            sequence.data_ptr(),
            batch_stride(sequence),
            self.call.normal_form(self.tensors.q).first_head,
        )

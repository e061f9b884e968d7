"""``BlockRows``: the query rows of a call as rows of query blocks.

Axes: N sequences, U units (groups of heads with one table row: all of them, or the smallest, which have one key head),
A query blocks, L query rows of a sequence (a multiple of the query block), V = N * U * A virtual sequences.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from undivided.masks._parts import Size
from undivided.masks.normal_form import BlockPairs
from undivided.masks.normal_form.positions import Geometry
from undivided.request.problem import Problem


@dataclass(frozen=True, eq=False)
class BlockRows:
    """The query rows of a call as rows of blocks: where each one lies in the caller's tensors.

    Args:
        index: raw row of each row of each sequence, int64 ``[N, L]``; None: row l of batch element n.
        real: whether there is such a row, bool ``[N, L]``; None with `index`.
        batch, q_len: sizes of the caller's tensors.
        packed: whether the sequences are documents.
        blocks, size: query blocks of a sequence, and rows of each.
        units, group: units, and heads of each.
        key_heads: key heads of a unit.
        geometry: places of the sequences.
        reads_values: whether values of tensors may be read on the host.
    """

    index: Tensor | None
    real: Tensor | None
    batch: int
    q_len: int
    packed: bool
    blocks: int
    size: int
    units: int
    group: int
    key_heads: int
    geometry: Geometry
    reads_values: bool

    @staticmethod
    def of_call(pairs: BlockPairs, problem: Problem, joins_heads: bool, reads_values: bool) -> BlockRows:
        """The rows of a call. joins_heads: key heads with one table row are one unit; heads that are side by side in
        memory are then read together. If no values are read, sequences have rows up to an upper limit."""
        geometry = pairs.geometry
        packed = geometry.q_slot_ends is not None
        elsewhere = packed or isinstance(geometry.q_start, Tensor)
        longest = _longest(pairs, problem) if packed else problem.q_len
        if reads_values and elsewhere and isinstance(geometry.q_size, Tensor):
            longest = max(int(geometry.q_size.max()) if geometry.q_size.numel() else 0, 1)
        size = min(pairs.q_block or longest, longest)
        blocks = -(-longest // size)
        tables = pairs.table.shape[1]
        units = tables if joins_heads and problem.kv_heads % tables == 0 else math.lcm(tables, problem.kv_heads)
        index = real = None
        if elsewhere:
            row = torch.arange(blocks * size, device=geometry.device)[None]
            start, count = (_as_tensor(x, geometry.device) for x in (geometry.q_start, geometry.q_size))
            index = (start.view(-1, 1) + row).expand(max(start.numel(), count.numel()), -1)
            real = (row < count.view(-1, 1)) & (index >= 0) & (index < problem.q_len)
            index = index.clamp(0, problem.q_len - 1)
        group, key_heads = problem.heads // units, max(problem.kv_heads // units, 1)
        sizes = problem.batch, problem.q_len, packed, blocks, size, units, group, key_heads
        return BlockRows(index, real, *sizes, geometry, reads_values)

    @property
    def excess(self) -> float:
        """Rows of all sequences divided by rows of the caller's tensors."""
        return self.sequences * self.blocks * self.size / (self.batch * self.q_len)

    @property
    def sequences(self) -> int:
        """N."""
        return self.batch if self.index is None else len(self.index)

    def take(self, tensor: Tensor) -> Tensor:
        """The rows of ``[B|1, Sq, ...]`` as ``[N, L, ...]``; rows that do not exist hold any real row, or 0."""
        if self.index is None:
            missing = self.blocks * self.size - self.q_len
            rows = pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, missing)) if missing else tensor
            return rows.expand(self.batch, *rows.shape[1:])
        rows = tensor.expand(self.batch, *tensor.shape[1:])
        if self._is_every_row:
            return rows.reshape(self.sequences, -1, *rows.shape[2:])
        return rows[self._sequence_index, self.index]

    def take_heads(self, tensor_BSHD: Tensor) -> Tensor:
        """The rows of ``[B, Sq, H, D]`` as heads of the virtual sequences, ``[V, G, size, D]``."""
        rows = self.take(tensor_BSHD)
        rows = rows.view(self.sequences, self.blocks, self.size, self.units, self.group, rows.shape[-1])
        return rows.permute(0, 3, 1, 4, 2, 5).reshape(-1, self.group, self.size, rows.shape[-1])

    def restored(self, heads_VGLD: Tensor, missing: float) -> Tensor:
        """``[V, G, size, D]`` as the caller's rows ``[B, Sq, H, D]``, a view if their memory is in that order.

        missing: the value of rows of no sequence. No value is read.
        """
        shape = (self.sequences, self.units, self.blocks, self.group, self.size, heads_VGLD.shape[-1])
        heads = self.units * self.group
        rows = heads_VGLD.view(shape).permute(0, 2, 4, 1, 3, 5).reshape(self.sequences, -1, heads, shape[-1])
        if self.index is None:
            return rows[:, : self.q_len]
        sequence, position, is_real = self._places
        return torch.where(is_real[..., None, None], rows[sequence, position], missing)

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor, Tensor]:
        """The sequence of each of the caller's rows, its row there, and whether it has one, each ``[B, Sq]``."""
        position, length = self.geometry.q_position, self.blocks * self.size
        is_real = (position >= 0) & (position < length)
        if (real := self.geometry.real_rows) is not None:
            is_real = is_real & real
        return self.geometry.q_sequence, position.clamp(0, length - 1), is_real

    def put_heads(self, heads_VGLD: Tensor, out_BSHD: Tensor) -> None:
        """Writes ``[V, G, size, D]`` to the caller's rows ``[B, Sq, H, D]``; rows of no sequence stay."""
        shape = (self.sequences, self.units, self.blocks, self.group, self.size, heads_VGLD.shape[-1])
        rows = heads_VGLD.view(shape).permute(0, 2, 4, 1, 3, 5).reshape(self.sequences, -1, *out_BSHD.shape[2:])
        if self.index is None:
            out_BSHD.copy_(rows[:, : self.q_len])
        elif self._is_every_row:
            out_BSHD.copy_(rows.reshape(out_BSHD.shape))
        else:
            assert self.real is not None
            sequence = self._sequence_index.expand(self.real.shape)[self.real]
            out_BSHD[sequence, self.index[self.real]] = rows[self.real].to(out_BSHD.dtype)

    @cached_property
    def _sequence_index(self) -> Tensor:
        device = self.geometry.device
        if self.packed:
            return torch.zeros(1, 1, dtype=torch.int64, device=device)
        return torch.arange(self.batch, device=device)[:, None]

    @cached_property
    def _is_every_row(self) -> bool:
        """Whether the rows of the sequences, one after another, are those of the tensors: nothing need be gathered."""
        if self.index is None or self.real is None or self.batch > 1 or not self.reads_values:
            return False
        return bool(self.real.all()) and torch.equal(self.index.flatten(), torch.arange(self.q_len))


def _longest(pairs: BlockPairs, problem: Problem) -> int:
    """Rows that no document exceeds: its table ends there, or the mask says so."""
    limit = problem.longest_lengths[0]
    return limit if pairs.q_block is None else max(min(limit, pairs.q_block * pairs.table.shape[2]), 1)


def _as_tensor(value: Size, device: torch.device) -> Tensor:
    """A number per sequence; one for all sequences if it is an int."""
    return value if isinstance(value, Tensor) else torch.full((1,), value, dtype=torch.int64, device=device)

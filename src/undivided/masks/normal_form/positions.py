"""``Geometry``: the position of every row and key within its sequence.

Axes: B batch, Sq query rows, Sk keys, N sequences (batch elements, or documents if packed). A position i' or j' counts
within a sequence; a raw index is ``position + start``. Nothing here waits for a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from undivided.masks._parts import Documents, Field, Lengths, Part, Size
from undivided.masks.normal_form.copies import int64_copy


def private_copy(value: Field, device: torch.device, default: int = 0) -> Size:
    """An int64 copy on the device, which later changes of the tensor do not affect; the default for None."""
    if value is None:
        return default
    return int64_copy(value, device) if isinstance(value, Tensor) else value


@dataclass(frozen=True, eq=False)
class Geometry:
    """The place of each sequence among the rows and keys of a call; sizes are ints, or int64 ``[N]``.

    Args:
        batch, q_len, kv_len: sizes of the call.
        device: device of all tensors.
        q_start, q_size, kv_start, kv_size: first raw index and length of each sequence.
        shift: d of each sequence: its alignment.
        q_slot_ends, kv_slot_ends: for documents, one past the last slot of each, int64 ``[N]``; otherwise None.
    """

    batch: int
    q_len: int
    kv_len: int
    device: torch.device
    q_start: Size
    q_size: Size
    kv_start: Size
    kv_size: Size
    shift: Size = 0
    q_slot_ends: Tensor | None = None
    kv_slot_ends: Tensor | None = None

    @staticmethod
    def from_parts(
        parts: Sequence[Part], bottom_right: bool, batch: int, q_len: int, kv_len: int, device: torch.device
    ) -> Geometry:
        """The geometry of a call whose mask has these parts."""
        q_ends = kv_ends = None
        q_start: Size = 0
        kv_start: Size = 0
        q_size: Size = q_len
        kv_size: Size = kv_len
        for part in parts:
            if isinstance(part, Lengths):
                q_start, kv_start = private_copy(part.q_start, device), private_copy(part.kv_start, device)
                q_size, kv_size = private_copy(part.q, device, q_len), private_copy(part.kv, device)
            elif isinstance(part, Documents):
                q_start, q_size, q_ends = _slots(part.cu_seqlens_q, part.padded_q, device)
                kv_start, kv_size, kv_ends = _slots(part.cu_seqlens_kv, part.padded_kv, device)
        shift = kv_size - q_size if bottom_right else 0
        return Geometry(batch, q_len, kv_len, device, q_start, q_size, kv_start, kv_size, shift, q_ends, kv_ends)

    @cached_property
    def q_sequence(self) -> Tensor:
        """The batch element of each row, int64 ``[B, Sq]``; packed: the document, ``[1, Sq]``."""
        return self._sequences(self.q_slot_ends, self.q_len)

    @cached_property
    def kv_sequence(self) -> Tensor:
        """The batch element of each key, int64 ``[B, Sk]``; packed: the document, ``[1, Sk]``."""
        return self._sequences(self.kv_slot_ends, self.kv_len)

    def _sequences(self, slot_ends: Tensor | None, length: int) -> Tensor:
        """The sequence of each token; packed tokens after all slots are in the last one."""
        if slot_ends is None:
            return torch.arange(self.batch, device=self.device)[:, None].expand(self.batch, length)
        tokens = torch.arange(length, device=self.device)
        return torch.searchsorted(slot_ends, tokens, right=True).clamp(max=slot_ends.numel() - 1)[None]

    def per_row(self, value: Size) -> Size:
        """A value per sequence (int or ``[N]``) as a value per row: int, ``[B, 1]`` or ``[1, Sq]``."""
        if not isinstance(value, Tensor):
            return value
        if self.q_slot_ends is None:
            return value[:, None]
        return value[self.q_sequence] if value.numel() else 0

    def _per_key(self, value: Size) -> Size:
        if not isinstance(value, Tensor):
            return value
        return value[:, None] if self.kv_slot_ends is None else value[self.kv_sequence]

    @cached_property
    def q_position(self) -> Tensor:
        """i' of each row, int64 ``[B|1, Sq]``."""
        rows = torch.arange(self.q_len, device=self.device)[None]
        return rows - self.per_row(self.q_start) if isinstance(self.q_start, Tensor) else rows

    @cached_property
    def kv_position(self) -> Tensor:
        """j' of each key, int64 ``[B|1, Sk]``."""
        return torch.arange(self.kv_len, device=self.device)[None] - self._per_key(self.kv_start)

    @cached_property
    def anchor(self) -> Tensor:
        """i' + d of each row, int64 ``[B|1, Sq]``: the row's own key."""
        moved = isinstance(self.shift, Tensor) or self.shift != 0
        return self.q_position + self.per_row(self.shift) if moved else self.q_position

    @property
    def real_rows(self) -> Tensor | None:
        """Whether each row belongs to a sequence, bool ``[B|1, Sq]``; None if all do."""
        if not isinstance(self.q_size, Tensor) and not isinstance(self.q_start, Tensor):
            return None
        return (self.q_position >= 0) & (self.q_position < self.per_row(self.q_size))

    @property
    def real_keys(self) -> Tensor | None:
        """Whether each key belongs to a sequence, bool ``[B|1, Sk]``; None if all do."""
        if not isinstance(self.kv_size, Tensor):
            return None
        return (self.kv_position >= 0) & (self.kv_position < self._per_key(self.kv_size))


def _slots(cu_seqlens: Tensor, padded: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Start, real size and end of each document's slot, int64 ``[N]``; without documents, one empty slot."""
    real = int64_copy(cu_seqlens, device)
    offsets = real if padded is None else int64_copy(padded, device)
    if real.numel() == 1:
        return offsets, torch.zeros_like(offsets), offsets
    return offsets[:-1], real.diff(), offsets[1:].contiguous()

"""The pairs of chosen key blocks: a table of blocks per query block and head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from undivided.arguments.tensors import readable, scattered
from undivided.errors import InputError
from undivided.masks._parts import Blocks
from undivided.masks.normal_form.copies import int64_copy
from undivided.masks.normal_form.pairs import Index, narrow
from undivided.masks.normal_form.positions import Geometry


@dataclass(frozen=True, eq=False)
class BlockPairs:
    """The pairs of query blocks and their chosen key blocks.

    Args:
        table: chosen key blocks in ascending order, each once, int64 ``[N|1, T, A, n]``; the other entries, at the end
            of a row, are ``limit``. N: sequences, T: groups of heads, A: query blocks.
        q_block: queries of a block; None: all of a sequence.
        kv_block: keys of a block.
        limit: number of key blocks, at least that of every sequence.
        heads: number of heads of the call.
        geometry: places of the sequences.
    """

    table: Tensor
    q_block: int | None
    kv_block: int
    limit: int
    heads: int
    geometry: Geometry

    @staticmethod
    def for_call(part: Blocks, geometry: Geometry, heads: int) -> BlockPairs:
        """The pairs of a call.

        Raises:
            InputError: in a pack, a document has more query blocks than the table.
        """
        table = int64_copy(part.table, geometry.device)
        position = geometry.q_position
        if part.q_block is not None and position.numel() and readable(position):
            real = geometry.real_rows
            last = int((position if real is None else position * real).max()) // part.q_block
            if last >= table.shape[2]:
                must = f"have a block table for {last + 1} query blocks, of {part.q_block} queries, per document"
                raise InputError("mask", must, f"{table.shape[2]} query blocks")
        limit = -(-geometry.kv_len // part.kv_block)
        table = torch.where(table < 0, limit, table).sort(-1).values
        repeated = torch.nn.functional.pad(table[..., 1:] == table[..., :-1], (1, 0))
        table = table.masked_fill_(repeated, limit).sort(-1).values
        return BlockPairs(table, part.q_block, part.kv_block, limit, heads, geometry)

    def pairs(self, batch: slice, heads: slice, rows: Index, keys: Index) -> Tensor:
        """Allowed pairs, bool ``[b|1, h, r, k]``."""
        position = narrow(self.geometry.q_position, 0, batch)[:, rows]  # [b, r]
        block = (position // (self.q_block or max(self.geometry.q_len, 1))).clamp(0, self.table.shape[2] - 1)
        sequence = narrow(self.geometry.q_sequence, 0, batch)[:, rows]
        if len(self.table) == 1 and self.geometry.q_slot_ends is None:
            sequence = sequence[:1]
        sequence = sequence.clamp(0, len(self.table) - 1)
        group = self.heads // self.table.shape[1]  # heads per row of the table
        first, last = heads.start // group, (max(heads.stop, 1) - 1) // group
        blocks = self.table[sequence, :, block][:, :, first : last + 1].transpose(1, 2)  # [b, t, r, n]
        is_chosen = torch.zeros(*blocks.shape[:3], self.limit + 1, dtype=torch.bool, device=blocks.device)
        is_chosen = scattered(is_chosen, 3, blocks, True)  # [b, t, r, key blocks + 1]
        is_chosen[..., self.limit] = False
        key_block = narrow(self.geometry.kv_position, 0, batch)[:, keys] // self.kv_block  # [b, k]
        key_block = key_block.clamp(0, self.limit)[:, None, None].expand(-1, *is_chosen.shape[1:3], -1)
        size = max(len(key_block), len(is_chosen)) if len(key_block) and len(is_chosen) else 0
        allowed = is_chosen.expand(size, -1, -1, -1).gather(3, key_block.expand(size, -1, -1, -1))  # [b, t, r, k]
        head = torch.arange(heads.start, heads.stop, device=allowed.device) // group - first
        return allowed[:, head]

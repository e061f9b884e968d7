"""``BlockSums``: the gradient of keys or values, added up per block."""

from __future__ import annotations

import torch
from torch import Tensor

from undivided.backends.shared.chosen import GatheredSequences, VirtualSequences


class BlockSums:
    """The gradient of k or v: fp32 sums per block of each sequence and key head, and one block that is not read."""

    def __init__(self, virtual: VirtualSequences, dim: int) -> None:
        geometry, self._size = virtual.chosen.pairs.geometry, virtual.chosen.pairs.kv_block
        self._virtual, self._kv_heads = virtual, virtual.call.problem.kv_heads
        length = torch.as_tensor(geometry.kv_size).expand(virtual.rows.sequences)
        self._counts = -(-length // self._size)
        self._first = self._counts.cumsum(0) - self._counts
        self._total = int(self._counts.sum())
        self._sums = torch.zeros(self._total * self._kv_heads + 1, self._size, dim, dtype=torch.float32, device="cpu")

    def add(self, gathered: GatheredSequences, gradient: Tensor) -> None:
        """Adds the gradients of the copies, ``[v, 1, n * kv_block, D]``."""
        exists = gathered.table < self._counts[gathered.sequence, None]
        block = (self._first[gathered.sequence, None] + gathered.table) * self._kv_heads + gathered.head[:, None]
        index = torch.where(exists, block, len(self._sums) - 1).flatten()
        self._sums.index_add_(0, index, gradient.reshape(-1, self._size, gradient.shape[-1]))

    def tokens(self, like_BSND: Tensor) -> Tensor:
        """The sums as ``[B, Sk, N, D]`` in the dtype of the input; 0 for keys of no sequence."""
        geometry, dim = self._virtual.chosen.pairs.geometry, self._sums.shape[-1]
        sums = self._sums[:-1].view(self._total, self._kv_heads, self._size, dim).transpose(1, 2)
        sums = sums.reshape(self._total * self._size, self._kv_heads, dim).to(like_BSND.dtype)
        batch, keys = like_BSND.shape[:2]
        if geometry.real_keys is None and geometry.kv_slot_ends is None:
            return sums.view(batch, -1, self._kv_heads, dim)[:, :keys]
        gradient = sums.new_zeros(batch, keys, *sums.shape[1:])
        real = (
            torch.ones(1, keys, dtype=torch.bool, device=sums.device)
            if geometry.real_keys is None
            else geometry.real_keys
        )
        real, position = real.expand(batch, keys), geometry.kv_position.expand(batch, keys)
        row = self._first[geometry.kv_sequence.expand(batch, keys)] * self._size + position
        gradient[real] = sums[row[real]]
        return gradient

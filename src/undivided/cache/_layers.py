"""The sizes and the memory of the caches of all layers of a model."""

from __future__ import annotations

import torch

from undivided.cache._storage import Heads, Memory, Storage


class LayerCaches:
    """The storage of each layer by its number, all with the same sizes."""

    def __init__(self, heads: Heads) -> None:
        self._heads = heads
        self._storages: dict[int, Storage] = {}

    @property
    def num_heads_kv(self) -> int:
        """Key/value heads in this process; with a mesh, those of this rank."""
        return self._heads.kv_heads

    @property
    def head_dim_k(self) -> int:
        """Head size of queries and keys."""
        return self._heads.head_dim

    @property
    def head_dim_v(self) -> int:
        """Head size of values."""
        return self._heads.value_dim

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the new keys and values, and of the queries."""
        return self._heads.dtype

    @property
    def quantize(self) -> str | None:
        """The format of the cached keys and values, or None."""
        return self._heads.format

    @property
    def memory(self) -> Memory:
        """The bytes of the caches that are allocated, and those of the same caches in bfloat16; `print` shows them."""
        return Memory(
            *(sum(sizes) for sizes in zip((0, 0, 0), *(s.memory for s in self._storages.values()), strict=True))
        )

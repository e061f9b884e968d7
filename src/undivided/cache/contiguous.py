"""`KVCache`: a contiguous cache with the same capacity for every sequence."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from undivided.arguments.checks import as_device, as_integer
from undivided.arguments.layout import Layout
from undivided.arguments.signature import checked_call
from undivided.cache._attend import CachedSequences
from undivided.cache._cache import Cache
from undivided.cache._checks import SIZE_NAMES
from undivided.cache._ledger.slots import Slots
from undivided.cache._storage import Storage, TokenSpec

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@functools.partial(checked_call, other_names=SIZE_NAMES)
class KVCache(Cache):
    """A contiguous cache of keys and values for a batch of sequences of up to `max_len` tokens each.

    Any number of tokens may be appended at a time, also a different number for each sequence. Unused memory never
    affects a result.

    Args:
        batch: number of sequences, B.
        max_len: tokens per sequence.
        kv_heads: key/value heads, N.
        head_dim: head size of queries and keys, Dk.
        value_dim: head size of values, Dv; Dk if None.
        dtype: float16, bfloat16, float32 or float64.
        device: device of keys and values.
        layout: layout of the arguments and results of `append` and `attend`: "bshd", "sbhd", "bhsd" or "thd". The
            memory is always [B, max_len, N, D].
        quantize: format in which keys and values are stored: "int8", "fp8_e4m3", "fp8_e5m2" or "int4" (head sizes that
            are multiples of 32). None: `dtype`. New tokens are quantised by `append`, and `attend` reads them in place.
        mesh: the ranks that the heads are divided over, a `DeviceMesh` with one axis: kv_heads then counts those of all
            ranks, and this cache holds the heads of one. None: kv_heads are those of this cache.

    Raises:
        InputError: an argument is wrong.

    >>> import torch, undivided
    >>> cache = undivided.KVCache(batch=2, max_len=64, kv_heads=2, head_dim=16, dtype=torch.float32)
    >>> k, v = torch.randn(2, 5, 2, 16), torch.randn(2, 5, 2, 16)
    >>> cache.append(k, v, lengths=[5, 3])                       # prompts of 5 and 3 tokens
    >>> cache.attend(torch.randn(2, 5, 8, 16)).shape             # causal, each sequence by its own length
    torch.Size([2, 5, 8, 16])
    >>> cache.append(k[:, :1], v[:, :1])                         # one new token each
    >>> cache.attend(torch.randn(2, 1, 8, 16)).shape, cache.lengths
    (torch.Size([2, 1, 8, 16]), (6, 4))
    >>> print(undivided.KVCache(1, 4096, kv_heads=8, head_dim=128, dtype=torch.bfloat16, quantize="int8").memory)
    8.2 MiB (values 8.0 MiB, scales 256.0 KiB; 0.52 x its size in bfloat16)
    """

    def __init__(
        self,
        batch: int,
        max_len: int,
        kv_heads: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        layout: Layout = "bshd",
        quantize: str | None = None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        spec = TokenSpec.checked(kv_heads, head_dim, value_dim, dtype, quantize=quantize, mesh=mesh)
        batch, self.max_len = as_integer("batch", batch, 1), as_integer("max_len", max_len, 1)
        storage = Storage(batch, self.max_len, spec, as_device("device", device))
        super().__init__(Slots(batch, self.max_len), storage, batch, layout)

    def _cached_sequences(self) -> CachedSequences:
        return CachedSequences(self._storage.pools, self._ledger.lengths)

    def __repr__(self) -> str:
        spec = self._storage.spec
        return (
            f"KVCache(batch={self.batch}, max_len={self.max_len}, kv_heads={spec.kv_heads}, "
            f"head_dim={spec.head_dim}, lengths={list(self.lengths)}, {self._storage.description})"
        )

"""`PagedKVCache`: a cache whose sequences share a pool of pages."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from undivided.arguments.checks import as_device, as_integer
from undivided.arguments.graphs import outside_of_graphs
from undivided.arguments.layout import Layout
from undivided.arguments.signature import checked_call
from undivided.cache._attend import CachedSequences
from undivided.cache._block_table import BlockTable
from undivided.cache._cache import Cache
from undivided.cache._checks import SIZE_NAMES, checked_token_ids
from undivided.cache._ledger import eviction
from undivided.cache._ledger.pages import Pages
from undivided.cache._storage import Storage, TokenSpec
from undivided.errors import InputError
from undivided.masks import Mask

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class SequencesOnPages(Cache):
    """A cache whose sequences are lists of pages; with ranks, of the pages of all ranks."""

    _ledger: Pages

    def __init__(
        self, spec: TokenSpec, num_pages: int, page_size: int, batch: int, device: torch.device | str, layout: Layout
    ) -> None:
        self.num_pages, self.page_size = as_integer("num_pages", num_pages, 1), as_integer("page_size", page_size, 1)
        batch = as_integer("batch", batch, 1)
        ranks, sizes = self._ranks, (self.num_pages, self.page_size, spec, as_device("device", device))
        storage = Storage(*sizes) if ranks is None else ranks.storage(*sizes)
        ledger = Pages(self.num_pages, self.page_size, batch, 1 if ranks is None else ranks.world)
        super().__init__(ledger, storage, batch, layout)
        self._table = BlockTable()

    @property
    def block_table(self) -> Tensor:
        """The pages of each sequence in order, int32 [B, pages of the longest]; over ranks, those of this rank.

        0 after the end of a sequence, and for evicted pages.
        """
        ledger, rank = self._ledger, 0 if self._ranks is None else self._ranks.rank
        return self._table.updated(
            ledger.changes, lambda: [ledger.pages_on_rank(rank, n) for n in range(self.batch)], self.device
        )

    @outside_of_graphs
    def remember(self, tokens: Sequence[int] | Tensor, i: int) -> None:
        """Index the full pages of sequence i by the tokens they hold, so that `match` finds them.

        The pages stay after `free`; the least recently used ones are given up when the pool needs pages.

        Args:
            tokens: token ids of sequence i from its start, at most as many as are cached: a list of ints or an int
                tensor [n]. Two sequences with equal tokens must have equal keys and values.
            i: index of the sequence.

        Raises:
            InputError: the sequence does not exist or has fewer tokens. The cache is unchanged.

        >>> import torch, undivided
        >>> cache = undivided.PagedKVCache(8, page_size=4, kv_heads=1, head_dim=8, batch=1, dtype=torch.float32)
        >>> cache.append(torch.randn(1, 6, 1, 8), torch.randn(1, 6, 1, 8))
        >>> cache.remember([5, 3, 8, 8, 1, 2], 0)
        >>> cache.free(0)
        >>> cache.match([5, 3, 8, 8, 9], 0), cache.lengths
        (4, (4,))
        """
        sequence = self._sequence("i", i)
        ids = checked_token_ids(tokens)
        if len(ids) > self.lengths[sequence]:
            must = f"be at most the {self.lengths[sequence]} cached tokens of sequence {i}"
            raise InputError("tokens", must, len(ids))
        self._ledger.remember(sequence, ids)

    @outside_of_graphs
    def match(self, tokens: Sequence[int] | Tensor, i: int) -> int:
        """The number of a prompt's first tokens that the cache has; sequence i starts with their pages.

        Only full pages match, and never the last token of the prompt: its query computes the first new token. Append
        the other tokens as usual.

        Args:
            tokens: token ids of the prompt, as for `remember`.
            i: index of an empty sequence.

        Returns:
            The number of tokens that the cache has already, a multiple of the page size, or 0.

        Raises:
            InputError: the sequence does not exist or is not empty.

        Source: Kwon et al. 2023 (arXiv:2309.06180), shared prefixes of PagedAttention.

        >>> import torch, undivided
        >>> cache = undivided.PagedKVCache(8, page_size=4, kv_heads=1, head_dim=8, batch=1, dtype=torch.float32)
        >>> cache.match([5, 3, 8, 8, 9], 0)
        0
        """
        sequence = self._sequence("i", i)
        ids = checked_token_ids(tokens)
        if self.lengths[sequence]:
            hint = f"free({i}) first"
            raise InputError("i", "be an empty sequence", f"one of {self.lengths[sequence]} tokens", hint)
        count = self._ledger.match(sequence, ids[:-1])
        self._note_change()
        return count

    @outside_of_graphs
    def evict(self, mask: Mask) -> int:
        """Release the pages that no later query can see under a mask.

        With ``window(left, 0) | sinks(n)`` a sequence of any length then holds the pages of its first n and last
        left + 1 tokens only. Call it after `attend`, at every step or from time to time; later calls of `attend` need
        this mask or a narrower one. `lengths` and positions do not change, and `block_table` has 0 for evicted pages.

        Args:
            mask: causal, window, sinks, prefix and chunks (without offset), joined by ``&`` and ``|``, aligned
                bottom-right. If layers have different masks, one that allows at least what each of them allows.

        Returns:
            The number of released pages, counted for each sequence; pages that another sequence shares stay in use.

        Raises:
            InputError: the mask contains something else, such as a predicate, which may show a hidden key again.

        Source: Xiao et al. 2023 (arXiv:2309.17453), StreamingLLM.

        >>> import torch, undivided
        >>> from undivided import masks
        >>> cache = undivided.PagedKVCache(8, page_size=4, kv_heads=1, head_dim=8, batch=1, dtype=torch.float32)
        >>> streaming = masks.window(7, 0) | masks.sinks(4)
        >>> for _ in range(100):
        ...     cache.append(torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8))
        ...     out = cache.attend(torch.randn(1, 1, 1, 8), streaming)
        ...     released = cache.evict(streaming)
        >>> cache.lengths, cache.free_pages
        ((100,), 5)
        """
        return eviction.evict(self._ledger, mask, range(self.batch))

    def _cached_sequences(self) -> CachedSequences:
        ledger = self._ledger
        evicted = ledger.evicted_places if any(ledger.evicted) else None
        digest = 0 if self._ranks is None else ledger.digest()
        return CachedSequences(self._storage.pools, ledger.lengths, self.block_table, evicted, digest)


@functools.partial(checked_call, other_names=SIZE_NAMES)
class PagedKVCache(SequencesOnPages):
    """A cache whose sequences take pages from one pool as they grow, and share the pages of a common prefix.

    A sequence is a list of pages; its length is limited by the pool only. `fork` shares pages. A shared page is copied
    before a sequence writes to it, and a page that no sequence uses is free again.

    Args:
        num_pages: pages of the pool.
        page_size: tokens per page.
        kv_heads: key/value heads, N.
        head_dim: head size of queries and keys, Dk.
        batch: number of sequences, B; may exceed the number of pages.
        value_dim: head size of values, Dv; Dk if None.
        dtype: float16, bfloat16, float32 or float64.
        device: device of keys and values.
        layout: layout of the arguments and results of `append` and `attend`: "bshd", "sbhd", "bhsd" or "thd". The
            memory is always [num_pages, page_size, N, D].
        quantize: format in which keys and values are stored, as in `KVCache`. Shared, copied and evicted pages have
            their scales beside them.
        mesh: the ranks that the heads are divided over, a `DeviceMesh` with one axis: kv_heads then counts those of all
            ranks, and this cache holds the heads of one. None: kv_heads are those of this cache.

    Raises:
        InputError: an argument is wrong.

    Source: Kwon et al. 2023 (arXiv:2309.06180), PagedAttention.

    >>> import torch, undivided
    >>> cache = undivided.PagedKVCache(8, page_size=4, kv_heads=2, head_dim=16, batch=2, dtype=torch.float32)
    >>> prompt = torch.randn(2, 6, 2, 16)
    >>> cache.append(prompt, prompt, lengths=[6, 0])             # two pages for the first sequence
    >>> cache.fork(0, 1)                                         # the second shares both: no copy
    >>> cache.lengths, cache.free_pages
    ((6, 6), 6)
    >>> cache.append(prompt[:, :1], prompt[:, 1:2])              # they differ now: one copies its last page
    >>> cache.attend(torch.randn(2, 1, 8, 16)).shape, cache.free_pages
    (torch.Size([2, 1, 8, 16]), 5)
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        *,
        batch: int,
        value_dim: int | None = None,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        layout: Layout = "bshd",
        quantize: str | None = None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        spec = TokenSpec.checked(kv_heads, head_dim, value_dim, dtype, quantize=quantize, mesh=mesh)
        super().__init__(spec, num_pages, page_size, batch, device, layout)

    @property
    def free_pages(self) -> int:
        """The number of pages that no sequence uses."""
        return self._ledger.free_pages[0]

    def __repr__(self) -> str:
        spec = self._storage.spec
        return (
            f"PagedKVCache(num_pages={self.num_pages}, page_size={self.page_size}, kv_heads={spec.kv_heads}, "
            f"head_dim={spec.head_dim}, lengths={list(self.lengths)}, free_pages={self.free_pages}, "
            f"{self._storage.description})"
        )

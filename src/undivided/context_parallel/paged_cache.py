"""`ContextPagedKVCache`: a paged cache whose pages are spread over ranks, for contexts that one rank cannot hold.

Every rank has the new tokens and the queries; each page is on one rank. A rank writes the tokens of its own pages and
attends to these, and the partial results are merged by their log-sum-exps, as `ContextParallel.decode` does. No keys
are sent.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from undivided.arguments.checks import check_type
from undivided.arguments.layout import Layout
from undivided.arguments.signature import checked_call
from undivided.cache._cache import Lengths
from undivided.cache._checks import SIZE_NAMES, attends
from undivided.cache._storage import TokenSpec
from undivided.cache.paged import SequencesOnPages
from undivided.context_parallel.context import ContextParallel
from undivided.context_parallel.decode import MergeMethod
from undivided.context_parallel.pages.attend import held_tokens
from undivided.context_parallel.pages.ranks import RanksOfPages
from undivided.masks import Mask

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@functools.partial(checked_call, other_names=SIZE_NAMES)
class ContextPagedKVCache(SequencesOnPages):
    """A paged cache of one layer whose pages are spread over the ranks of a context, for generation.

    Page p of every sequence is on rank ``p % world``, so that all ranks hold equally much of a long sequence. All ranks
    make the same calls with the same new tokens and queries. In `attend`, every rank attends to its own pages; the
    partial results are merged exactly, and all ranks return the result of one process, bit for bit the same.

    Args:
        context: the ranks.
        num_pages: pages of each rank's pool.
        page_size: tokens per page.
        kv_heads, head_dim, value_dim, dtype, device, layout, quantize, mesh: as in `undivided.PagedKVCache`.
        batch: number of sequences, B.

    Raises:
        InputError: an argument is wrong.

    Source: Kwon et al. 2023 (arXiv:2309.06180), pages; Dao et al. 2023, Flash-Decoding, the merge of partial results.

    >>> import torch, undivided
    >>> from undivided.context_parallel import ContextPagedKVCache, simulate
    >>> q, k, v = torch.randn(1, 1, 4, 8), torch.randn(1, 10, 2, 8), torch.randn(1, 10, 2, 8)
    >>> def generate(group):
    ...     context = undivided.ContextParallel(group)
    ...     cache = ContextPagedKVCache(context, 4, page_size=2, kv_heads=2, head_dim=8, batch=1, dtype=torch.float32)
    ...     cache.append(k, v)
    ...     return cache.attend(q), cache.held
    >>> alone = undivided.attention(q, k, v, layout="bshd")
    >>> [(bool((out - alone).abs().max() < 1e-5), held) for out, held in simulate(2, generate)]
    [(True, (6,)), (True, (4,))]
    """

    _ranks: RanksOfPages

    def __init__(
        self,
        context: ContextParallel,
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
        check_type("context", context, ContextParallel, "an undivided.ContextParallel")
        self.context, self._ranks = context, context.page_ranks()
        spec = TokenSpec.checked(kv_heads, head_dim, value_dim, dtype, quantize=quantize, mesh=mesh)
        super().__init__(spec, num_pages, page_size, batch, device, layout)

    @property
    def held(self) -> tuple[int, ...]:
        """The number of tokens of each sequence that this rank holds; those on evicted pages count too."""
        return tuple([held_tokens(n, self.page_size, self.context.rank, self.context.world) for n in self.lengths])

    @property
    def free_pages(self) -> tuple[int, ...]:
        """The number of unused pages of each rank."""
        return self._ledger.free_pages

    @attends
    def attend(  # type: ignore[override]  # `by`
        self,
        q: Tensor,
        mask: Mask | None = None,
        q_lengths: Lengths | None = None,
        *,
        bias: Tensor | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        alibi_slopes: Tensor | None = None,
        sinks: Tensor | None = None,
        backend: str | None = None,
        deterministic: bool | None = None,
        batch_invariant: bool | None = None,
        return_lse: bool = False,
        by: MergeMethod = "all_gather",
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of q over all cached tokens of all ranks.

        Args:
            q: queries in the cache's layout, the same on every rank; the last tokens of their sequence.
            mask, q_lengths, bias, scale, softcap, alibi_slopes, sinks, backend, deterministic, return_lse: as
                `PagedKVCache.attend`, of the whole sequences, the same on every rank. The query index of predicate,
                blocks and dense counts the rows of this call.
            batch_invariant: must not be True: results are merged in the order of the ranks.
            by: how partial results are merged, as in `ContextParallel.decode`.

        Returns:
            The output in q's layout and dtype, [.., H, Dv], bitwise the same on every rank; with return_lse, (output,
            lse). Not differentiable.

        Raises:
            InputError: an argument is wrong, or differs between ranks.
            NoBackendError: no allowed backend can run this rank's part.
            RankError: another rank refused its arguments, or failed.
        """
        options = {
            "bias": bias,
            "scale": scale,
            "softcap": softcap,
            "alibi_slopes": alibi_slopes,
            "sinks": sinks,
            "backend": backend,
            "deterministic": deterministic,
            "batch_invariant": batch_invariant,
            "return_lse": return_lse,
            "by": by,
        }
        return self._ranks.attend(lambda: self._call(q, mask, q_lengths, options))

    def __repr__(self) -> str:
        spec = self._storage.spec
        return (
            f"ContextPagedKVCache(rank {self.context.rank} of {self.context.world}, num_pages={self.num_pages}, "
            f"page_size={self.page_size}, kv_heads={spec.kv_heads}, head_dim={spec.head_dim}, "
            f"lengths={list(self.lengths)}, {self._storage.description})"
        )

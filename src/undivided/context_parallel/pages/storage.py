"""`RankStorage`: the pools of one rank, for a ledger that numbers the pages of all ranks.

Page n is page ``n // world`` of rank ``n % world``, as `undivided.cache._ledger.Pages` numbers them; rows follow from
that. A request names the pages of all ranks, the same on every rank, and each rank does its own part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from undivided.cache._storage import Storage, TargetRows, TokenSpec
from undivided.context_parallel.exchange.collectives import Communicator, gather_rows


class RankStorage(Storage):
    """This rank's pools of one layer."""

    def __init__(
        self,
        axes: Sequence[Communicator],
        rank: int,
        world: int,
        pages: int,
        page_size: int,
        spec: TokenSpec,
        device: torch.device,
    ) -> None:
        super().__init__(pages, page_size, spec, device)
        self._axes, self._rank, self._world = axes, rank, world

    def rows(self, rows: Sequence[int]) -> TargetRows:
        """Those of the rows that this rank has, and which tokens they hold."""
        owners, local = self._split(rows)
        own = (owners == self._rank).nonzero().squeeze(1)
        return TargetRows(local[own].to(self.k.device), own.to(self.k.device))

    def prepared_copy(self, pages: Sequence[tuple[int, int]], rows: int) -> Callable[[], None]:
        """`Storage.prepared_copy` of this rank's pages; both pages of a pair are on the same rank."""
        world = self._world
        own = [(a // world, b // world) for a, b in pages if a % world == self._rank]
        return super().prepared_copy(own, rows)

    def prepared_move(
        self, source: Sequence[int], target: Sequence[int], copies: Sequence[tuple[int, int]]
    ) -> Callable[[], None]:
        """`Storage.prepared_move`. Tokens are sent if some of them move between ranks, so all ranks must call it."""
        (owners, read), (to, write) = self._split(source), self._split(target)
        if not torch.equal(owners, to):
            tokens = self._tokens(owners, read)[to == self._rank]
        else:
            tokens = self._bytes(read[owners == self._rank])
        pools, write_pages = self._rows, self.prepared_copy(copies, self.k.shape[1])
        rows = write[to == self._rank].to(self.k.device)
        parts = tokens.split([pool[0].numel() * pool.itemsize for pool in pools], 1)
        moved = [
            part.contiguous().view(pool.dtype).view(-1, *pool.shape[1:])
            for pool, part in zip(pools, parts, strict=True)
        ]

        def write_all() -> None:
            write_pages()
            for pool, pool_tokens in zip(pools, moved, strict=True):
                pool.index_copy_(0, rows, pool_tokens)

        return write_all

    def _split(self, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The rank of each row, and its number there, int64 on the host."""
        size = self.k.shape[1]
        numbers = torch.tensor(rows, dtype=torch.int64, device="cpu")
        pages = numbers // size
        return pages % self._world, pages // self._world * size + numbers % size

    def _bytes(self, rows: Tensor) -> Tensor:
        """The tokens in these rows of this rank, uint8 [n, bytes of all pools]."""
        rows = rows.to(self.k.device)
        return torch.cat([pool.index_select(0, rows).flatten(1).view(torch.uint8) for pool in self._rows], 1)

    def _tokens(self, owners: Tensor, rows: Tensor) -> Tensor:
        """The tokens in these rows of these ranks, uint8 [n, bytes], gathered from all ranks."""
        counts = torch.bincount(owners, minlength=self._world).tolist()
        gathered = gather_rows(self._axes, self._bytes(rows[owners == self._rank]), counts)
        return torch.cat(gathered)[owners.argsort(stable=True).argsort().to(self.k.device)]

"""`PageRanks`: the interface of the ranks that pages are spread over. This package imports no process groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

from undivided.arguments.layout import Layout
from undivided.cache._attend import CachedCall
from undivided.cache._ledger.compaction import Compaction
from undivided.cache._ledger.ledger import Ledger
from undivided.cache._storage import Storage, TokenSpec
from undivided.errors import InputError
from undivided.request.result import Output

T = TypeVar("T")
L = TypeVar("L", bound=Ledger)


class PageRanks(Protocol):
    """What `undivided.ContextParallel.page_ranks` returns. Page p of every sequence is on rank ``p % world``."""

    @property
    def rank(self) -> int:
        """The number of this rank."""

    @property
    def world(self) -> int:
        """The number of ranks."""

    def storage(self, pages: int, page_size: int, spec: TokenSpec, device: torch.device) -> Storage:
        """This rank's pools of one layer, which accept the page numbers of all ranks."""

    def agree(self, prepare: Callable[[], T], shared: Callable[[T], Mapping[str, object]]) -> T:
        """What `prepare` returns, after all ranks have prepared the same shared arguments; raises on all or none."""

    def attend(self, prepare: Callable[[], CachedCall], sharded: int | None = None) -> Output:
        """Attention over the pages of all ranks, the same on every rank; of this rank's queries if `sharded`, the
        number of all queries along their axis, is given."""

    def gather(self, tensors: Mapping[str, Tensor], layout: Layout, length: int) -> list[Tensor]:
        """The tensors with the tokens of all ranks, which `shard` has divided."""

    def shard(self, tensor: Tensor, dim: int, length: int) -> Tensor:
        """This rank's tokens of a tensor with this many tokens along an axis."""

    def unshard(self, tensor: Tensor, dim: int, length: int) -> Tensor:
        """The inverse of `shard`."""

    def positions(self, length: int) -> Tensor:
        """Which of this many tokens this rank has in `shard`, int64, ascending."""


def compact_on_all_ranks(ranks: PageRanks | None, prepare: Callable[[], Compaction[L]]) -> Compaction[L]:
    """The compaction that `prepare` returns, after all ranks have prepared the same."""
    if ranks is None:
        return prepare()
    return ranks.agree(prepare, lambda compaction: {"indices": (compaction.source, compaction.target)})


def checked_ranks(context_parallel: object) -> PageRanks | None:
    """The ranks of an `undivided.ContextParallel`, or None; InputError for something else or without a group."""
    if context_parallel is None:
        return None
    if not hasattr(context_parallel, "page_ranks"):
        must, hint = "be an undivided.ContextParallel or None", "undivided.ContextParallel(group)"
        raise InputError("context_parallel", must, type(context_parallel).__name__, hint=hint)
    return cast(PageRanks, cast(Any, context_parallel).page_ranks())

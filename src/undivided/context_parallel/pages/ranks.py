"""`RanksOfPages`: the ranks of a context as owners of pages, which the caches of `undivided.cache` call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from undivided.arguments import layout as _layout
from undivided.arguments.layout import SEQUENCE_AXIS, Layout
from undivided.cache._attend import CachedCall
from undivided.cache._storage import TokenSpec
from undivided.context_parallel._sharded_tokens import ShardedTokens
from undivided.context_parallel.exchange.collectives import Communicator
from undivided.context_parallel.exchange.handshake import SharedArguments, prepare_on_all_ranks
from undivided.context_parallel.pages.attend import attend
from undivided.context_parallel.pages.storage import RankStorage
from undivided.errors import InputError
from undivided.request.result import Output

T = TypeVar("T")


class RanksOfPages:
    """The ranks of a context, for `undivided.cache._ranks.PageRanks`.

    tokens: the placement of the tokens of a step that is divided over the ranks. check: as in `ContextParallel`.
    """

    def __init__(self, tokens: ShardedTokens, axes: Sequence[Communicator], check: bool) -> None:
        self.rank, self.world = tokens.rank, tokens.world
        self._tokens, self._axes, self._check = tokens, axes, check

    def storage(self, pages: int, page_size: int, spec: TokenSpec, device: torch.device) -> RankStorage:
        """See `PageRanks.storage`."""
        return RankStorage(self._axes, self.rank, self.world, pages, page_size, spec, device)

    def agree(self, prepare: Callable[[], T], shared: Callable[[T], Mapping[str, object]]) -> T:
        """See `PageRanks.agree`."""

        def prepare_with_shared() -> tuple[T, SharedArguments]:
            value = prepare()
            return value, shared(value)

        return prepare_on_all_ranks(self._axes, self._check, prepare_with_shared)

    def attend(self, prepare: Callable[[], CachedCall], sharded: int | None = None) -> Output:
        """See `PageRanks.attend`."""
        rows = None if sharded is None else self._bind(sharded).placed(0, 0).q
        return attend(self._axes, self._check, self.rank, self.world, prepare, rows)

    def gather(self, tensors: Mapping[str, Tensor], layout: Layout, length: int) -> list[Tensor]:
        """See `PageRanks.gather`."""
        axis = SEQUENCE_AXIS[layout]
        count = self.positions(length).numel()

        def check() -> list[Tensor]:
            for name, tensor in tensors.items():
                if tensor.dim() != _layout.axis_count(layout) or tensor.shape[axis] != count:
                    must = f"have this rank's {count} of the step's {length} tokens at axis {axis} in {layout!r}"
                    hint = "inference_params.shard(hidden_states)"
                    raise InputError(name, must, list(tensor.shape), hint=hint)
            return list(tensors.values())

        def shared(checked: list[Tensor]) -> dict[str, object]:
            sizes = [(*t.shape[:axis], *t.shape[axis + 1 :], t.dtype) for t in checked]
            return {name: (layout, length, *size) for name, size in zip(tensors, sizes, strict=True)}

        return [self.unshard(tensor, axis, length) for tensor in self.agree(check, shared)]

    def shard(self, tensor: Tensor, dim: int, length: int) -> Tensor:
        """See `PageRanks.shard`."""
        return self._bind(length).shard(tensor, dim=dim)

    def unshard(self, tensor: Tensor, dim: int, length: int) -> Tensor:
        """See `PageRanks.unshard`."""
        return self._bind(length).unshard(tensor, dim=dim)

    def positions(self, length: int) -> Tensor:
        """See `PageRanks.positions`."""
        return self._bind(length).positions()

    def _bind(self, length: int) -> ShardedTokens:
        """The tokens, bound to steps of this length."""
        bound = self._tokens.bound
        if bound is None or bound.length("q") != length:
            self._tokens = self._tokens.bind(length)
        return self._tokens

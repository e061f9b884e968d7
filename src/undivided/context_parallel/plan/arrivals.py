"""How many keys every ring position needs from every other one, by arithmetic on ranges.

The rows of a ring position may attend to some disjoint ranges of keys. The keys form runs: maximal ranges with one
owner. The overlap of ranges and runs is counted, so the cost depends on their number and not on their length. If a
range covers many runs (tokens that are assigned one by one), a table of prefix sums over blocks of runs covers most of
them.

Legend: R ring positions, K keys, n runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from undivided.context_parallel._schedule import MeshRanks
from undivided.context_parallel.sharding import Placement
from undivided.masks import NormalForm


def count_arrivals(form: NormalForm, placement: Placement, ranks: MeshRanks) -> Tensor:
    """The keys that each ring position needs from every other, int64 [R, R] (receiver, sender); 0 on the diagonal."""
    owner = placement.kv_owner.div(ranks.group_size, rounding_mode="floor")
    arrivals = torch.zeros((ranks.ring_world, ranks.ring_world), dtype=torch.int64)
    if ranks.ring_world == 1:
        return arrivals
    runs = OwnerRuns(owner, ranks.ring_world) if form.exact else None
    for place, rows in enumerate(ranks.group_rows):
        if runs is None:
            needed = form.shard(rows, torch.arange(form.kv_len)).keys_allowed
            arrivals[place] = torch.bincount(owner[needed], minlength=ranks.ring_world)
        else:
            arrivals[place] = runs.count(*disjoint_ranges(form.ranges.index_select(1, rows)))
    return arrivals.fill_diagonal_(0)


def disjoint_ranges(ranges: Tensor) -> tuple[Tensor, Tensor]:
    """The union of the ranges [.., 2] as disjoint ascending ranges: int64 (starts, stops).

    >>> [ends.tolist() for ends in disjoint_ranges(torch.tensor([[4, 6], [0, 2], [1, 3], [5, 5]]))]
    [[0, 4], [3, 6]]
    """
    ranges = ranges.reshape(-1, 2).to(torch.int64)
    ranges = ranges[ranges[:, 1] > ranges[:, 0]]
    if bool((ranges[1:, 0] < ranges[:-1, 0]).any()):
        ranges = ranges[ranges[:, 0].argsort()]
    reach = ranges[:, 1].cummax(0).values if len(ranges) else ranges[:, 1]
    first = torch.ones(len(ranges), dtype=torch.bool)
    first[1:] = ranges[1:, 0] > reach[:-1]
    return ranges[first, 0], reach[first.roll(-1)]


MIN_MEAN_RUN = 4
"""Mean length of a run below which every key is a run of its own: runs without lengths cost half as much."""


class OwnerRuns:
    """The keys as runs with one owner: run i is [edges[i], edges[i + 1]) and belongs to owner[i]."""

    def __init__(self, owner: Tensor, world: int) -> None:
        keys = owner.numel()
        first = torch.ones(keys, dtype=torch.bool)
        first[1:] = owner.diff() != 0
        is_per_key = int(first.sum()) * MIN_MEAN_RUN > keys
        starts = torch.arange(keys) if is_per_key else first.nonzero().squeeze(1)
        self._world = world
        self._edges = torch.cat([starts, torch.tensor([keys])])
        self._owner = owner[starts].to(torch.int32)
        self._sizes = None if is_per_key else self._edges.diff().to(torch.float64)
        # One row of the table per `world` runs: reading a row then costs no more than going through its runs.
        self._block = world
        blocks = torch.arange(starts.numel()).div(self._block, rounding_mode="floor")
        counts = torch.bincount(blocks * world + self._owner, self._sizes, (int(blocks[-1]) + 1) * world)
        prefix = torch.nn.functional.pad(counts.view(-1, world).cumsum(0), (0, 0, 1, 0))
        self._prefix = prefix.to(torch.int64)

    def count(self, starts: Tensor, stops: Tensor) -> Tensor:
        """The keys of every owner in disjoint, non-empty ranges [starts, stops), int64 [R]."""
        first = torch.searchsorted(self._edges, starts, right=True) - 1
        last = torch.searchsorted(self._edges, stops)
        counts = self._count_runs(first, last)
        # the first run may start before its range, and the last run may end after it
        counts.index_add_(0, self._owner[first], self._edges[first] - starts)
        counts.index_add_(0, self._owner[last - 1], stops - self._edges[last])
        return counts

    def _count_runs(self, first: Tensor, last: Tensor) -> Tensor:
        """The keys of every owner in the runs [first, last), int64 [R]."""
        up, down = -(-first // self._block), last // self._block
        has_blocks = down > up
        in_blocks = self._prefix[down[has_blocks]].sum(0) - self._prefix[up[has_blocks]].sum(0)
        begin = torch.cat([first, down[has_blocks] * self._block])
        end = torch.cat([torch.where(has_blocks, up * self._block, last), last[has_blocks]])
        return in_blocks + self._count_one_by_one(begin, end - begin)

    def _count_one_by_one(self, begin: Tensor, size: Tensor) -> Tensor:
        """The keys of every owner in ``size`` runs from ``begin`` on, int64 [R]; in 32 bits, because it dominates."""
        total = int(size.sum())
        index = (begin - size.cumsum(0) + size).to(torch.int32).repeat_interleave(size, output_size=total)
        index += torch.arange(total, dtype=torch.int32)
        owner = self._owner.index_select(0, index)
        if self._sizes is None:
            return torch.bincount(owner, minlength=self._world)
        return torch.bincount(owner, self._sizes.index_select(0, index), self._world).to(torch.int64)

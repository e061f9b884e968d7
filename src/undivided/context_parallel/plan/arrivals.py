"""How many keys every rank asks of every other, by arithmetic on ranges.

The rows of a place on the ring may attend to some disjoint stretches of keys; the keys lie in runs, stretches with one
owner. What is counted is where the two overlap, so the cost follows the stretches and the runs in them, whatever their
length. Where a stretch is of many runs (tokens that are dealt out singly), tables of what lies before every so many
runs say most of it.

Legend: R places on the ring, K keys, n runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from undivided.context_parallel._schedule import Ranks
from undivided.context_parallel.sharding import Placement
from undivided.masks import NormalForm


def arriving(form: NormalForm, placement: Placement, ranks: Ranks) -> Tensor:
    """Keys that the rows of each place on the ring need of every place, int64 [R, R] (who asks, whom); none of its
    own."""
    owner = placement.kv_owner.div(ranks.members, rounding_mode="floor")
    found = torch.zeros((ranks.ring, ranks.ring), dtype=torch.int64)
    if ranks.ring == 1:
        return found
    runs = _Runs(owner, ranks.ring) if form.exact else None
    for place, rows in enumerate(ranks.lines):
        if runs is None:
            needed = form.shard(rows, torch.arange(form.kv_len)).keys_allowed
            found[place] = torch.bincount(owner[needed], minlength=ranks.ring)
        else:
            found[place] = runs.counted(*stretches(form.ranges.index_select(1, rows)))
    return found.fill_diagonal_(0)


def stretches(ranges: Tensor) -> tuple[Tensor, Tensor]:
    """The keys in any of the ranges [.., 2] as disjoint ascending stretches: int64 (starts, stops).

    >>> [ends.tolist() for ends in stretches(torch.tensor([[4, 6], [0, 2], [1, 3], [5, 5]]))]
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


SHORT = 4
"""Keys in a run, on the mean, below which every key is counted for itself: a run costs about twice as much, for its
length."""


class _Runs:
    """Keys as runs of one owner: run i is [edges[i], edges[i + 1]) and of owner[i]."""

    def __init__(self, owner: Tensor, world: int) -> None:
        keys = owner.numel()
        first = torch.ones(keys, dtype=torch.bool)
        first[1:] = owner.diff() != 0
        singly = int(first.sum()) * SHORT > keys
        starts = torch.arange(keys) if singly else first.nonzero().squeeze(1)
        self._world = world
        self._edges = torch.cat([starts, torch.tensor([keys])])
        self._owner = owner[starts].to(torch.int32)
        self._sizes = None if singly else self._edges.diff().to(torch.float64)
        # as many entries as runs, so that to add up a row of the table is no more than to go through a step
        self._step = world
        blocks = torch.arange(starts.numel()).div(self._step, rounding_mode="floor")
        cells = torch.bincount(blocks * world + self._owner, self._sizes, (int(blocks[-1]) + 1) * world)
        before = torch.nn.functional.pad(cells.view(-1, world).cumsum(0), (0, 0, 1, 0))
        self._before = before.to(torch.int64)

    def counted(self, starts: Tensor, stops: Tensor) -> Tensor:
        """Keys of every owner in disjoint stretches that are not empty, int64 [R]."""
        first = torch.searchsorted(self._edges, starts, right=True) - 1
        last = torch.searchsorted(self._edges, stops)
        found = self._in_runs(first, last)
        # the first and the last run may begin before the stretch, and end after it
        found.index_add_(0, self._owner[first], self._edges[first] - starts)
        found.index_add_(0, self._owner[last - 1], stops - self._edges[last])
        return found

    def _in_runs(self, first: Tensor, last: Tensor) -> Tensor:
        """Keys of every owner in the runs [first, last), int64 [R]."""
        up, down = -(-first // self._step), last // self._step
        many = down > up
        tabled = self._before[down[many]].sum(0) - self._before[up[many]].sum(0)
        begin = torch.cat([first, down[many] * self._step])
        end = torch.cat([torch.where(many, up * self._step, last), last[many]])
        return tabled + self._one_by_one(begin, end - begin)

    def _one_by_one(self, begin: Tensor, size: Tensor) -> Tensor:
        """The same of ``size`` runs from ``begin`` on. 32 bits: this is where the time goes."""
        total = int(size.sum())
        index = (begin - size.cumsum(0) + size).to(torch.int32).repeat_interleave(size, output_size=total)
        index += torch.arange(total, dtype=torch.int32)
        owner = self._owner.index_select(0, index)
        if self._sizes is None:
            return torch.bincount(owner, minlength=self._world)
        return torch.bincount(owner, self._sizes.index_select(0, index), self._world).to(torch.int64)

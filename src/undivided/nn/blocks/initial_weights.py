"""How a weight is drawn of which ranks have parts: other numbers in each part, the same ones in each copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed

from undivided.context_parallel.exchange.failures import rank_errors
from undivided.nn.blocks.tensor_ranks import TensorRanks, Tracker, forked
from undivided.request.seed import draw_number

Init = Callable[[Tensor], object]


class DividedInit:
    """Initialises the part of a weight that a tensor parallel rank has as a plain tensor.

    Numbers are drawn in the context of the tracker if there is one, else from a seed that torch's generator and the
    rank give. If the ranks are unknown, their number is assumed to be that of this process modulo `size`, as in a mesh
    whose last axis has the tensor ranks; without `torch.distributed` the seed is that of torch's generator.

    Args:
        init: initialises a weight.
        size: the number of ranks.
        ranks: the ranks; None if they are unknown.
        tracker: `get_rng_state_tracker` of a layer, or None.
    """

    def __init__(self, init: Init, size: int, ranks: TensorRanks | None, tracker: Tracker | None) -> None:
        self.init, self.size, self.ranks, self.tracker = init, size, ranks, tracker
        self._assumed: int | None = None
        self._is_assumption = False

    def __call__(self, weight: Tensor, ranks: TensorRanks | None = None) -> None:
        """Initialise a weight.

        Args:
            weight: any tensor with memory.
            ranks: the ranks, if they became known after construction.
        """
        if self.tracker is not None:
            with forked(self.tracker):
                self.init(weight)
            return
        ranks = self.ranks if ranks is None else ranks
        number = _process_number(self.size) if ranks is None else ranks.rank
        self._is_assumption, self._assumed = ranks is None and self.size > 1, number
        if number is None:
            self.init(weight)
        else:
            _draw_by_number(self.init, number, weight)

    def may_be_equal(self, group: distributed.ProcessGroup) -> bool:
        """Whether ranks of a group whose generators agree have drawn equal parts, because the group was unknown."""
        if not self._is_assumption:
            return False
        assumed = {process % self.size for process in distributed.get_process_group_ranks(group)}
        return self._assumed is None or len(assumed) < self.size


def draw_dtensor(init: Init, weight: Any) -> None:
    """Initialise a DTensor: ranks draw other numbers for other shards, and have the same copies.

    On a GPU, DTensor's own operators do this. On a CPU every rank would draw from its own generator: equal shards from
    equal seeds, different copies from others.

    Args:
        init: initialises a weight.
        weight: a DTensor with memory.
    """
    mesh = weight.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None or hasattr(torch.get_device_module(mesh.device_type), "set_rng_state"):
        init(weight)
        return
    copied = [axis for axis, placement in enumerate(weight.placements) if placement.is_replicate()]
    number = 0
    for axis in sorted(set(range(mesh.ndim)) - set(copied)):
        number = number * mesh.size(axis) + coordinate[axis]
    _draw_by_number(init, number, weight)
    for axis in copied:
        group = mesh.get_group(axis)
        with rank_errors("the broadcast of an initial weight", group):
            distributed.broadcast(weight.to_local(), group=group, group_src=0)


def _process_number(size: int) -> int | None:
    """The assumed number of a tensor parallel rank; None without `torch.distributed`."""
    is_parallel = distributed.is_available() and distributed.is_initialized()
    return distributed.get_rank() % size if is_parallel else None


def _draw_by_number(init: Init, number: int, weight: Tensor) -> None:
    seed = draw_number()
    devices = [] if weight.device.type == "cpu" else [weight.device]
    with torch.random.fork_rng(devices, device_type=weight.device.type if devices else "cuda"):
        torch.manual_seed(seed + number)
        init(weight)

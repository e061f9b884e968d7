"""The bytes of the collectives of torch.distributed in a ``with`` block, as ring algorithms send them."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


class CountedBytes(TorchDispatchMode):
    """Counts what this rank sends: (n - 1) / n of the whole tensor per gather or scatter, twice that per all-reduce.

    `sent` has the bytes, `calls` the names of the collectives, without the comparison of arguments, 16 bytes per
    layer and other rank, which no plan counts. Every group has all ranks.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.sent = 0.0
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its collectives come as calls with plain tensors
        name = func.name().split("::")[-1]
        if "c10d" in func.namespace and "wait" not in name and not name.startswith("_wrap"):
            given = [x for argument in args for x in (argument if isinstance(argument, list) else [argument])]
            self._count(name, [x for x in given if isinstance(x, torch.Tensor)])
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, tensors: list[torch.Tensor]) -> None:
        ranks = distributed.get_world_size()
        sizes = [x.numel() * x.element_size() for x in tensors]
        if name in ("recv_", "alltoall_base_"):  # the latter of nn.blocks.rank_calls
            return
        if name == "send":
            self.sent += sizes[0]
            return
        if name == "all_reduce":
            whole, passes = sizes[0], 2
        elif name == "all_gather_into_tensor":
            whole, passes = sizes[0] * ranks, 1
        elif name in ("reduce_scatter_tensor", "_allgather_base_", "_reduce_scatter_base_"):
            whole, passes = max(sizes), 1
        else:
            raise NotImplementedError(name)
        self.calls.append(name)
        self.sent += passes * whole * (ranks - 1) / ranks

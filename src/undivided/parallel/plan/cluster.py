"""A described cluster, and the units in which it is described."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from undivided.arguments.checks import as_integer
from undivided.errors import InputError
from undivided.parallel.plan.model import check_count

__all__ = ["Cluster", "AxisGroup", "bytes_in", "bytes_per_second"]

_SCALES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30, "ti": 2.0**40}
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?(?:[eE][0-9]+)?)\s*([kmgtKMGT]?i?)(bit|B)(/s|ps)?\s*")


def bytes_per_second(argument: str, text: str) -> float:
    """The rate in a text, in bytes per second.

    Raises:
        InputError: it is not a positive number with a unit; naming `argument`.

    >>> bytes_per_second("link", "400gbit"), bytes_per_second("intra", "900GB/s")
    (50000000000.0, 900000000000.0)
    """
    quantity = _QUANTITY.fullmatch(text) if isinstance(text, str) else None
    rate = _amount(quantity) if quantity else 0.0
    if not 0 < rate < math.inf:
        raise InputError(argument, "be a rate in bits or bytes per second, such as 400gbit or 50GB/s", repr(text))
    return rate


def bytes_in(argument: str, text: str) -> int:
    """The size in a text, in bytes.

    Raises:
        InputError: it is not a positive number with a unit of bytes; naming `argument`.

    >>> bytes_in("memory", "80GiB")
    85899345920
    """
    quantity = _QUANTITY.fullmatch(text) if isinstance(text, str) else None
    size = _amount(quantity) if quantity and quantity[3] == "B" and not quantity[4] else 0.0
    if not 1 <= size < math.inf:
        raise InputError(argument, "be a size in bytes, such as 141GB or 80GiB", repr(text))
    return int(size)


def _amount(quantity: re.Match[str]) -> float:
    scale = _SCALES.get(quantity[2].lower(), 0.0)
    return float(quantity[1]) * scale / (8 if quantity[3] == "bit" else 1)


@dataclass(frozen=True)
class AxisGroup:
    """The ranks of one axis of a mesh.

    size: number of ranks. per_node: how many of them are on the same node. Ranks on one node are consecutive.
    """

    size: int
    per_node: int

    @property
    def nodes(self) -> int:
        """The number of nodes over which it is spread."""
        return -(-self.size // self.per_node)

    def ring_share(self) -> float:
        """The part of the bytes of a ring that crosses the network, as a mean over its ranks.

        A ring that visits the ranks of a node one after the other leaves each node once. NCCL builds several such
        rings, so that all network ports of a node carry the same.
        """
        return 0.0 if self.nodes == 1 else 1 / self.per_node

    def peer_share(self) -> float:
        """The part of the bytes that crosses the network if a rank sends as much to every other one."""
        return 0.0 if self.nodes == 1 else (self.size - self.per_node) / (self.size - 1)


@dataclass(frozen=True)
class Cluster:
    """Equal nodes with equal GPUs.

    Attributes:
        nodes, gpus: number of nodes, and of GPUs per node.
        link: bytes per second that one GPU sends over the network.
        intra: bytes per second that one GPU sends within its node.
        memory: bytes of one GPU.
        flops: FLOP per second that one GPU reaches in matrix products and in attention.
        reserve: bytes per GPU that are not available: driver, communication buffers, fragmentation.

    Raises:
        InputError: a number is not positive, or the reserve is not smaller than the memory.

    >>> Cluster(16, 8).ranks
    128
    """

    nodes: int
    gpus: int
    link: float = 50e9
    intra: float = 450e9
    memory: int = 80_000_000_000
    flops: float = 4e14
    reserve: int = 6_000_000_000

    def __post_init__(self) -> None:
        for name in ("nodes", "gpus"):
            check_count(name, getattr(self, name), 1 << 20)
        for name in ("link", "intra", "memory", "flops"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise InputError(name, "be a positive number", repr(value))
        for name in ("memory", "reserve"):
            as_integer(name, getattr(self, name), 0)
        if not self.reserve < self.memory:
            raise InputError("reserve", f"be at least 0 and less than memory ({self.memory} bytes)", repr(self.reserve))

    @property
    def ranks(self) -> int:
        """The number of GPUs."""
        return self.nodes * self.gpus

    def group(self, size: int, stride: int) -> AxisGroup:
        """The group of an axis; `stride` is the product of the sizes of the axes inside it, which divides `gpus` or is
        a multiple of it."""
        size, stride = as_integer("size", size, 1), as_integer("stride", stride, 1)
        return AxisGroup(size, min(size, max(self.gpus // stride, 1)))

    def seconds(self, sent: float, share: float) -> float:
        """The time in which a rank sends this number of bytes, of which a share crosses the network; both links at
        once."""
        return max(sent * share / self.link, sent * (1 - share) / self.intra)

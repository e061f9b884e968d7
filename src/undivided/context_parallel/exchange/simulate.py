"""All ranks in one process: a thread each, with mailboxes in place of a network.

The code that runs is the same; only the communicator differs. For tests, for debugging, and for trying a placement on a
laptop.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from undivided.context_parallel.exchange.collectives import Communicator, Messages, RankError, Wait
from undivided.errors import InputError

T = TypeVar("T")


def simulate(
    world: int | tuple[int, int], function: Callable[[SimulatedGroup], T], *, timeout: float = 60.0
) -> list[T]:
    """Run ``function(group)`` for every rank, each in a thread, and return their results in order.

    Args:
        world: number of ranks, or (ring, heads) for the two axes of "ring+all_to_all".
        function: called once for each rank with its group, to be passed to `undivided.ContextParallel`.
        timeout: seconds a rank waits for another before it gives up.

    Returns:
        What the calls returned, by rank.

    Raises:
        InputError: world is not a positive number, or a pair of them.
        Exception: the first that a rank raised; the others are told that it died.

    >>> import torch, undivided
    >>> from undivided import masks
    >>> q = torch.randn(1, 10, 2, 8)
    >>> def step(group):
    ...     cp = undivided.ContextParallel(group).bind(10)
    ...     mine = cp.shard(q, layout="bshd")
    ...     out = undivided.attention(mine, mine, mine, layout="bshd", mask=masks.causal(), context_parallel=cp)
    ...     return cp.unshard(out, layout="bshd")
    >>> alone = undivided.attention(q, q, q, layout="bshd", mask=masks.causal())
    >>> [bool((out - alone).abs().max() < 1e-5) for out in simulate(3, step)]
    [True, True, True]
    """
    rows, columns = _sizes(world)
    office = _Office(rows * columns, timeout)
    results: list[Any] = [None] * (rows * columns)

    def work(rank: int) -> None:
        try:
            results[rank] = function(SimulatedGroup(office, rank, (rows, columns), isinstance(world, tuple)))
        except BaseException as error:
            office.die(rank, error)

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(rows * columns)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if office.deaths:
        raise office.deaths[0][1]
    return results


def _sizes(world: object) -> tuple[int, int]:
    sizes = world if isinstance(world, tuple) else (world, 1)
    if len(sizes) != 2 or not all(isinstance(n, int) and n >= 1 for n in sizes):
        raise InputError("world", "be a positive number of ranks, or a pair of them", repr(world))
    return sizes[0], sizes[1]


class _Office:
    """The mailboxes, one for every ordered pair of ranks, and who has died."""

    def __init__(self, world: int, timeout: float) -> None:
        self.boxes: dict[tuple[int, int], queue.SimpleQueue[Tensor]] = {
            (a, b): queue.SimpleQueue() for a in range(world) for b in range(world)
        }
        self.timeout = timeout
        self.deaths: list[tuple[int, BaseException]] = []
        self._lock = threading.Lock()

    def die(self, rank: int, error: BaseException) -> None:
        """Remember that a rank has raised."""
        with self._lock:
            self.deaths.append((rank, error))

    def collect(self, source: int, target: int) -> Tensor:
        """The next message, unless its sender has died or is late."""
        waited = 0.0
        while True:
            try:
                return self.boxes[source, target].get(timeout=_PATIENCE)
            except queue.Empty:
                waited += _PATIENCE
            dead = [rank for rank, _ in self.deaths]
            if (source in dead and self.boxes[source, target].empty()) or waited >= self.timeout:
                why = f"rank {source} died" if source in dead else f"no message within {self.timeout:g} s"
                raise RankError(f"rank {target}: an exchange with rank {source} failed: {why}")


_PATIENCE = 0.05
"""Seconds between two looks at whether a peer has died."""


class SimulatedGroup:
    """One rank's view of a simulated group: a communicator, and with two axes one for each."""

    def __init__(self, office: _Office, rank: int, shape: tuple[int, int], is_mesh: bool) -> None:
        self.rank, self.world = rank, shape[0] * shape[1]
        row, column = divmod(rank, shape[1])
        self.is_mesh = is_mesh
        self._office, self._members = office, list(range(self.world))
        self._lines = [[r * shape[1] + column for r in range(shape[0])], [row * shape[1] + c for c in range(shape[1])]]

    def axis(self, dim: int) -> Communicator:
        """The ranks along one axis of the mesh: 0 the ring, 1 the heads."""
        line = object.__new__(SimulatedGroup)
        line._office, line._members, line.is_mesh = self._office, self._lines[dim], False
        line.rank, line.world = line._members.index(self.rank), len(line._members)
        return line

    def exchange(self, sends: Messages, receives: Messages) -> Wait:
        """Letters are copies, as they are on a network."""
        me = self._members[self.rank]
        for peer, tensors in sends.items():
            for tensor in tensors:
                self._office.boxes[me, self._members[peer]].put(tensor.detach().clone())

        awaited = [(peer, buffer) for peer, buffers in receives.items() for buffer in buffers]

        def wait() -> None:
            while awaited:
                peer, buffer = awaited.pop(0)
                letter = self._office.collect(self._members[peer], me)
                if (letter.shape, letter.dtype) != (buffer.shape, buffer.dtype):
                    raise RankError(
                        f"rank {self.rank}: rank {peer} sent {list(letter.shape)} {letter.dtype}, and "
                        f"{list(buffer.shape)} {buffer.dtype} was expected"
                    )
                buffer.copy_(letter)

        return wait

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor."""
        others = [rank for rank in range(self.world) if rank != self.rank]
        found = [tensor if rank == self.rank else tensor.new_empty(tensor.shape) for rank in range(self.world)]
        self.exchange({rank: [tensor] for rank in others}, {rank: [found[rank]] for rank in others})()
        return found

"""All ranks in one process: one thread per rank, with queues instead of a network.

The code is that of real ranks; only the communicator differs. It is for tests, for debugging, and for trying out a
placement without a cluster.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from undivided.arguments.signature import checked_call
from undivided.context_parallel.exchange.collectives import (
    EXCHANGE,
    GATHER,
    Communicator,
    Messages,
    RankError,
    Wait,
    gather_uneven,
)
from undivided.errors import InputError

T = TypeVar("T")

MAX_RANKS = 1024
"""Each rank is a thread, and each pair of ranks has a queue."""


@checked_call
def simulate(
    world: int | tuple[int, int], function: Callable[[SimulatedGroup], T], *, timeout: float = 60.0
) -> list[T]:
    """The results of ``function(group)`` on every rank, in order; each rank is a thread of this process.

    Args:
        world: number of ranks, or (ring, heads) for the two axes of "ring+all_to_all".
        function: called once per rank with its group, which it passes to `undivided.ContextParallel`.
        timeout: seconds that a rank waits for a message before it raises RankError.

    Returns:
        A list of what the calls returned, by rank.

    Raises:
        InputError: world is neither a positive number nor a pair of positive numbers, or another argument is wrong.
        Exception: the first exception of any rank; ranks that wait for that rank raise RankError.

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
    if not callable(function):
        raise InputError("function", "be a function of a group", repr(function))
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
        raise InputError("timeout", "be a positive number of seconds", repr(timeout))
    ranks = range(rows * columns)
    mailboxes = _Mailboxes(len(ranks), timeout)
    results: list[Any] = [None] * len(ranks)

    def work(rank: int) -> None:
        try:
            shape = (rows, columns) if isinstance(world, tuple) else None
            results[rank] = function(SimulatedGroup(mailboxes, ranks, rank, shape))
        except BaseException as error:
            mailboxes.failures.append((rank, error))

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if mailboxes.failures:
        raise mailboxes.failures[0][1]
    return results


def _sizes(world: object) -> tuple[int, int]:
    sizes = world if isinstance(world, tuple) else (world, 1)
    if len(sizes) != 2 or not all(type(n) is int and 1 <= n <= MAX_RANKS for n in sizes):
        raise InputError("world", f"be a positive number of ranks, at most {MAX_RANKS}, or a pair of them", repr(world))
    return sizes[0], sizes[1]


class _Mailboxes:
    """One queue for every ordered pair of ranks, and the failures of ranks."""

    def __init__(self, world: int, timeout: float) -> None:
        self.queues: dict[tuple[int, int], queue.SimpleQueue[Tensor]] = {
            (a, b): queue.SimpleQueue() for a in range(world) for b in range(world)
        }
        self.timeout = timeout
        self.failures: list[tuple[int, BaseException]] = []

    def receive(self, source: int, target: int, step: str) -> Tensor:
        """The next message; raises RankError if its sender has failed or the timeout has passed."""
        waited = 0.0
        while True:
            try:
                return self.queues[source, target].get(timeout=_POLL_SECONDS)
            except queue.Empty:
                waited += _POLL_SECONDS
            failed = [rank for rank, _ in self.failures]
            if (source in failed and self.queues[source, target].empty()) or waited >= self.timeout:
                why = f"rank {source} failed" if source in failed else f"no message within {self.timeout:g} s"
                raise RankError(f"rank {target}: {step} with rank {source} failed: {why}")


_POLL_SECONDS = 0.05
"""How often a rank that waits for a message checks whether the sender has failed."""


class SimulatedGroup:
    """One rank's communicator of a simulated group.

    members: the threads of the group. own: the thread of this rank. shape: [ring, heads] of a group with two axes.
    """

    def __init__(self, mailboxes: _Mailboxes, members: range, own: int, shape: tuple[int, int] | None = None) -> None:
        self.rank, self.world, self.is_mesh = members.index(own), len(members), shape is not None
        self._mailboxes, self._members, self._own, self._shape = mailboxes, members, own, shape or (len(members), 1)

    def axis(self, dim: int) -> Communicator:
        """The communicator of the ranks along one axis of the mesh: 0 the ring, 1 the heads."""
        columns = self._shape[1]
        row, column = divmod(self.rank, columns)
        ring, heads = slice(column, None, columns), slice(row * columns, (row + 1) * columns)
        return SimulatedGroup(self._mailboxes, self._members[heads if dim else ring], self._own)

    def exchange(self, sends: Messages, receives: Messages, step: str = EXCHANGE) -> Wait:
        """See `Communicator.exchange`; messages are copies, as on a network."""
        for peer, tensors in sends.items():
            for tensor in tensors:
                self._mailboxes.queues[self._own, self._members[peer]].put(tensor.detach().clone())

        pending = [(peer, buffer) for peer, buffers in receives.items() for buffer in buffers]

        def wait() -> None:
            while pending:
                peer, buffer = pending.pop(0)
                message = self._mailboxes.receive(self._members[peer], self._own, step)
                if (message.shape, message.dtype) != (buffer.shape, buffer.dtype):
                    raise RankError(
                        f"rank {self.rank}: rank {peer} sent {list(message.shape)} {message.dtype}, expected "
                        f"{list(buffer.shape)} {buffer.dtype}"
                    )
                buffer.copy_(message)

        return wait

    def gather(self, tensor: Tensor, step: str = GATHER) -> list[Tensor]:
        """The tensor of every rank, in order."""
        return [rows[0] for rows in gather_uneven(self, tensor[None], [1] * self.world, step)]

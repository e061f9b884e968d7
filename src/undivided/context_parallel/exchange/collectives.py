"""How ranks talk: one primitive, `exchange`, over torch.distributed or over mailboxes between threads.

Everything that context parallelism sends, it sends by `exchange`: to each peer a list of tensors, from each peer a list
of buffers, all posted at once and waited for later, while something is computed. Ring steps, gathers with uneven
shards, all-to-all with uneven heads and the return of gradients differ only in who sends what; nothing is padded, and
what a peer does not need is not sent. Bytes are counted in `Traffic`.

Messages between two ranks are matched by order alone, so both must post the same ones in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

Wait = Callable[[], None]
Messages = Mapping[int, Sequence[Tensor]]


class RankError(RuntimeError):
    """Ranks could not work together: one died, refused its arguments, was called differently, or did not answer in
    time."""


@dataclass
class Traffic:
    """What this rank has done since `reset`.

    bytes_sent, messages: sent to other ranks, handshakes not counted.
    steps: exchanges in which it sent or got something.
    pairs: (query row, key) pairs allowed by the mask that it computed in forward passes, over batch elements and heads.
    """

    bytes_sent: int = 0
    messages: int = 0
    steps: int = 0
    pairs: int = 0

    def reset(self) -> None:
        """Back to zero."""
        self.bytes_sent = self.messages = self.steps = self.pairs = 0


class Communicator(Protocol):
    """A rank's view of its group."""

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        ...

    @property
    def world(self) -> int:
        """How many ranks there are."""
        ...

    def exchange(self, sends: Messages, receives: Messages) -> Wait:
        """Post contiguous tensors to peers and buffers from peers; the result waits until all have arrived."""
        ...

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensor of every rank, in order; all of one shape."""
        ...


@dataclass(frozen=True)
class Counted:
    """A communicator that leaves out empty tensors and counts the others."""

    comm: Communicator
    traffic: Traffic

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return self.comm.rank

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return self.comm.world

    def exchange(self, sends: Messages, receives: Messages) -> Wait:
        """As the communicator's; tensors without elements are not sent."""
        sends, receives = _not_empty(sends), _not_empty(receives)
        self.traffic.steps += bool(sends or receives)
        for tensors in sends.values():
            self.traffic.messages += len(tensors)
            self.traffic.bytes_sent += sum(t.numel() * t.element_size() for t in tensors)
        return self.comm.exchange(sends, receives)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """As the communicator's; not counted."""
        return self.comm.gather(tensor)


def _not_empty(messages: Messages) -> Messages:
    kept = {peer: [t for t in tensors if t.numel()] for peer, tensors in messages.items()}
    return {peer: tensors for peer, tensors in kept.items() if tensors}


class Alone:
    """A group of one."""

    rank, world = 0, 1

    def exchange(self, sends: Messages, receives: Messages) -> Wait:
        """There is nobody to talk to."""
        assert not sends and not receives
        return lambda: None

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Its own."""
        return [tensor]


class ProcessGroup:
    """A group of torch.distributed: gloo on CPUs, NCCL on GPUs."""

    def __init__(self, group: Any = None) -> None:
        import torch.distributed as dist

        self._dist = dist
        self._group: Any = dist.group.WORLD if group is None else group
        self.rank, self.world = dist.get_rank(self._group), dist.get_world_size(self._group)
        self._global = dist.get_process_group_ranks(self._group)
        self._on_cpu = "gloo" in str(dist.get_backend(self._group))

    def exchange(self, sends: Messages, receives: Messages) -> Wait:
        """Non-blocking sends and receives, posted as one batch."""
        dist = self._dist
        ops, peers = [], []
        for function, messages in ((dist.irecv, receives), (dist.isend, sends)):
            for peer, tensors in messages.items():
                ops += [dist.P2POp(function, t, self._global[peer], self._group) for t in tensors]
                peers += [peer] * len(tensors)
        if not ops:
            return lambda: None
        with self._explained(f"an exchange with ranks {sorted(set(peers))}"):
            works = dist.batch_isend_irecv(ops)

        def wait() -> None:
            with self._explained(f"an exchange with ranks {sorted(set(peers))}"):
                for work in works:
                    work.wait()
            ops.clear()  # until here: gloo keeps no reference to what is still being sent
            works.clear()

        return wait

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """All-gather, through the device where the group cannot reach the CPU."""
        on = tensor if self._on_cpu else tensor.cuda()
        found = [torch.empty_like(on) for _ in range(self.world)]
        with self._explained("a gathering of all ranks"):
            self._dist.all_gather(found, on, group=self._group)
        return [t.cpu() for t in found]

    def _explained(self, what: str) -> _Explained:
        return _Explained(f"rank {self.rank} of {self.world}: {what} failed")


class _Explained:
    """Turns a failure of torch.distributed into a RankError that says what it means."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, RankError):
            raise RankError(
                f"{self._what}: {str(error).splitlines()[0] if str(error) else error!r}\n"
                "  HINT: a rank died, or did not make the same call within the group's timeout"
            ) from error


def gather_all(axes: Sequence[Communicator], tensor: Tensor) -> list[Tensor]:
    """The tensor of every rank of a mesh [ring, heads], by rank; all of one shape."""
    ring, heads = axes
    line = torch.stack(heads.gather(tensor))
    return list(torch.cat(ring.gather(line)))


def gather_rows(axes: Sequence[Communicator], tensor: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """The tensor of every rank of a mesh [ring, heads], by rank; the first dimension of rank r's is ``counts[r]``."""
    ring, heads = axes
    lines = [counts[start : start + heads.world] for start in range(0, len(counts), heads.world)]
    line = torch.cat(gather_uneven(heads, tensor, lines[ring.rank]))
    found = gather_uneven(ring, line, [sum(sizes) for sizes in lines])
    return [part for line, sizes in zip(found, lines, strict=True) for part in line.split(list(sizes))]


def gather_uneven(comm: Communicator, tensor: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """The tensor of every rank, in order; the first dimension of rank r's is ``counts[r]``."""
    found = [tensor if rank == comm.rank else tensor.new_empty((n, *tensor.shape[1:])) for rank, n in enumerate(counts)]
    others = [rank for rank in range(comm.world) if rank != comm.rank]
    comm.exchange({rank: [tensor] for rank in others}, {rank: [found[rank]] for rank in others})()
    return found

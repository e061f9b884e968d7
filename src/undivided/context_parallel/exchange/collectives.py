"""Communication between ranks: one primitive, `exchange`, over torch.distributed or over queues between threads.

Context parallelism sends everything by `exchange`: a list of tensors to each peer and a list of buffers for what each
peer sends, all posted at once and waited for later, after some computation. Ring steps, gathers of uneven shards,
all-to-all with uneven heads and the return of gradients differ only in which rank sends what. Nothing is padded, and
nothing is sent that the receiver does not need. Bytes are counted in `Traffic`.

Messages between two ranks are matched by order alone, so both must post the same messages in the same order.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from undivided.context_parallel.exchange.groups import check_exists
from undivided.context_parallel.exchange.reports import failed_ranks, find_cause, find_process, rank_names
from undivided.context_parallel.exchange.timeouts import adopt_timeout

Wait = Callable[[], None]
Messages = Mapping[int, Sequence[Tensor]]
EXCHANGE, GATHER = "an exchange", "an all-gather"
"""Names of steps that the caller does not name."""


class RankError(RuntimeError):
    """A call that needs all ranks failed: one of them ended, refused its arguments, made another call or timed out.

    >>> issubclass(RankError, RuntimeError)
    True
    """


@dataclass
class Traffic:
    """What this rank has sent and computed since the last `reset`.

    Attributes:
        bytes_sent, messages: bytes and tensors sent to other ranks; the comparison of arguments is not counted.
        steps: exchanges in which it sent or received something.
        pairs: allowed (query, key) pairs that it computed in forward passes, summed over batch elements and heads.

    >>> import torch, undivided
    >>> from undivided.context_parallel import simulate
    >>> def step(group):
    ...     cp = undivided.ContextParallel(group)
    ...     q = k = v = torch.zeros(1, 4, 2, 8)  # 4 of 8 tokens
    ...     undivided.attention(q, k, v, layout="bshd", context_parallel=cp)
    ...     return cp.traffic
    >>> simulate(2, step)[0]
    Traffic(bytes_sent=512, messages=2, steps=1, pairs=64)
    """

    bytes_sent: int = 0
    messages: int = 0
    steps: int = 0
    pairs: int = 0

    def reset(self) -> None:
        """Set all counts to zero."""
        self.bytes_sent = self.messages = self.steps = self.pairs = 0


class Communicator(Protocol):
    """One rank's access to its group."""

    @property
    def rank(self) -> int:
        """The number of this rank in the group."""
        ...

    @property
    def world(self) -> int:
        """The number of ranks."""
        ...

    def exchange(self, sends: Messages, receives: Messages, step: str = EXCHANGE) -> Wait:
        """Post contiguous tensors to peers and buffers for what they send; the result waits until all have arrived.

        step: what is exchanged, for errors.
        """
        ...

    def gather(self, tensor: Tensor, step: str = GATHER) -> list[Tensor]:
        """The tensor of every rank, in order; all have the same shape. step: as for `exchange`."""
        ...


@dataclass(frozen=True)
class CountingCommunicator:
    """A communicator that skips empty tensors and counts the others.

    strategy: errors name it before the step; empty if there is none.
    """

    comm: Communicator
    traffic: Traffic
    strategy: str = ""

    def __deepcopy__(self, memo: object) -> CountingCommunicator:
        return self  # copies send through the same group

    @property
    def rank(self) -> int:
        """The number of this rank in the group."""
        return self.comm.rank

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.comm.world

    def exchange(self, sends: Messages, receives: Messages, step: str = EXCHANGE) -> Wait:
        """`Communicator.exchange`; tensors without elements are not sent."""
        sends, receives = _not_empty(sends), _not_empty(receives)
        self.traffic.steps += bool(sends or receives)
        for tensors in sends.values():
            self.traffic.messages += len(tensors)
            self.traffic.bytes_sent += sum(t.numel() * t.element_size() for t in tensors)
        return self.comm.exchange(sends, receives, self._step_name(step))

    def gather(self, tensor: Tensor, step: str = GATHER) -> list[Tensor]:
        """`Communicator.gather`, which is not counted."""
        return self.comm.gather(tensor, self._step_name(step))

    def _step_name(self, step: str) -> str:
        return f"strategy {self.strategy!r}: {step}" if self.strategy else step


def _not_empty(messages: Messages) -> Messages:
    kept = {peer: [t for t in tensors if t.numel()] for peer, tensors in messages.items()}
    return {peer: tensors for peer, tensors in kept.items() if tensors}


class SingleRank:
    """A group of one rank."""

    rank, world = 0, 1

    def exchange(self, sends: Messages, receives: Messages, step: str = EXCHANGE) -> Wait:
        """Nothing: there is no peer."""
        assert not sends and not receives
        return lambda: None

    def gather(self, tensor: Tensor, step: str = GATHER) -> list[Tensor]:
        """The rank's own tensor."""
        return [tensor]


class ProcessGroup:
    """A process group of torch.distributed: gloo on CPUs, NCCL on GPUs."""

    def __init__(self, group: Any = None) -> None:
        import torch.distributed as dist

        self._dist = dist
        self._group: Any = dist.group.WORLD if group is None else group
        check_exists(self._group)
        self.rank, self.world = dist.get_rank(self._group), dist.get_world_size(self._group)
        self.ranks: list[int] = dist.get_process_group_ranks(self._group)
        self._on_cpu = "gloo" in str(dist.get_backend(self._group))
        timeout = adopt_timeout(self._group)
        # without it, gloo's receives wait for the timeout with which the group was created; on NCCL, a wait with a
        # timeout blocks the host
        self._wait_arguments = (timeout,) if self._on_cpu and timeout is not None else ()

    def exchange(self, sends: Messages, receives: Messages, step: str = EXCHANGE) -> Wait:
        """Non-blocking sends and receives, posted as one batch."""
        check_exists(self._group)
        dist = self._dist
        ops, peers = [], []
        for function, messages in ((dist.irecv, receives), (dist.isend, sends)):
            for peer, tensors in messages.items():
                ops += [dist.P2POp(function, t, self.ranks[peer], self._group) for t in tensors]
                peers += [peer] * len(tensors)
        if not ops:
            return lambda: None
        with self._rank_errors(step, peers):
            works = dist.batch_isend_irecv(ops)
        shared = len(works) < len(ops)  # NCCL has one work for the whole batch

        def wait() -> None:
            for number, work in enumerate(works):
                with self._rank_errors(step, peers if shared else peers[number : number + 1]):
                    work.wait(*self._wait_arguments)
            ops.clear()  # not earlier: gloo does not keep tensors alive while it sends them
            works.clear()

        return wait

    def gather(self, tensor: Tensor, step: str = GATHER) -> list[Tensor]:
        """All-gather; through the GPU if the group has no CPU backend.

        On gloo it is an all-to-all, which takes a fraction of the time of `exchange` if ranks share a core. gloo's
        all-gather is as fast, but would end the process if another rank is in an all-gather of more bytes, such as one
        of FSDP2.
        """
        others = [rank for rank in range(self.world) if rank != self.rank]
        if not others or not tensor.numel():
            return [tensor for _ in range(self.world)]
        check_exists(self._group)
        own = (tensor if self._on_cpu else tensor.cuda()).contiguous()
        gathered = own.new_empty((self.world, *own.shape))
        with self._rank_errors(step, others, is_collective=True):
            if self._on_cpu:
                sent = own.reshape(-1).view(torch.uint8).repeat(self.world)
                self._dist.all_to_all_single(gathered.view(-1).view(torch.uint8), sent, group=self._group)
            else:
                self._dist.all_gather(list(gathered), own, group=self._group)
        return list(gathered if self._on_cpu else gathered.cpu())

    @contextlib.contextmanager
    def _rank_errors(self, step: str, peers: Sequence[int], is_collective: bool = False) -> Iterator[None]:
        """A context that raises failures of torch.distributed as RankError.

        is_collective: all ranks take part, and the error of torch.distributed does not say which one failed.
        """
        try:
            yield
        except RuntimeError as error:
            raise self._rank_error(step, sorted(set(peers)), is_collective, first_line(error)) from error

    def _rank_error(self, step: str, peers: list[int], is_collective: bool, why: str) -> RankError:
        """The error of this rank, with the rank that the others wait for, as far as it can be found."""
        start, reported = f"rank {self.rank} of {self.world}: {step}", None
        if is_collective:
            peers = failed_ranks(self._group, self.rank, self.world, f"{start} failed: {why}") or peers
        text = f"{start} with {rank_names(peers, self.rank)} failed: {why}"
        if not is_collective:
            reported = find_cause(self._group, self.rank, peers, text)
        cause = "" if reported is None else _cause("rank", *reported)
        waited_for = peers if reported is None else [reported[0]]
        process, *others = (self.ranks[peer] for peer in (self.rank, *waited_for))
        if (further := find_process(process, others, text)) is not None:
            cause = _cause("process", *further)
        return RankError(
            f"{text}{cause}\n"
            "  HINT: a rank ended, or did not make the same call within the group's timeout; the ranks of the group "
            f"are the processes {self.ranks}"
        )


def _cause(kind: str, number: int, report: str) -> str:
    return f"\n  CAUSE: {kind} {number}, by the report of another {kind}: {report}"


def first_line(error: RuntimeError) -> str:
    """The first line of an error's text, without gloo's source line and advice; the repr if there is no text."""
    line = str(error).splitlines()[0] if str(error) else repr(error)
    return re.sub(r"^\[[^]]*/gloo/[^]]*\] ", "", line).partition(". This is typically caused")[0]


def process_groups(axes: Sequence[Communicator]) -> list[list[int]]:
    """The processes of each axis that is a group of torch.distributed, by rank; none of simulated and single ranks."""
    communicators = [axis.comm if isinstance(axis, CountingCommunicator) else axis for axis in axes]
    return [comm.ranks for comm in communicators if isinstance(comm, ProcessGroup)]


def gather_all(axes: Sequence[Communicator], tensor: Tensor, step: str = GATHER) -> list[Tensor]:
    """The tensor of every rank of a mesh [ring, heads], by rank; all have the same shape."""
    ring, heads = axes
    group = torch.stack(heads.gather(tensor, step))
    return list(torch.cat(ring.gather(group, step)))


def gather_rows(axes: Sequence[Communicator], tensor: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """The tensor of every rank of a mesh [ring, heads], by rank; rank r has ``counts[r]`` rows."""
    ring, heads = axes
    group_counts = [counts[start : start + heads.world] for start in range(0, len(counts), heads.world)]
    group = torch.cat(gather_uneven(heads, tensor, group_counts[ring.rank]))
    groups = gather_uneven(ring, group, [sum(sizes) for sizes in group_counts])
    return [chunk for rows, sizes in zip(groups, group_counts, strict=True) for chunk in rows.split(list(sizes))]


def gather_uneven(comm: Communicator, tensor: Tensor, counts: Sequence[int], step: str = GATHER) -> list[Tensor]:
    """The tensor of every rank, in order; rank r has ``counts[r]`` rows."""
    gathered = [
        tensor if rank == comm.rank else tensor.new_empty((n, *tensor.shape[1:])) for rank, n in enumerate(counts)
    ]
    swap(comm, [tensor] * comm.world, gathered, step)
    return gathered


def swap(comm: Communicator, sent: Sequence[Tensor], received: Sequence[Tensor], step: str) -> None:
    """Send ``sent[r]`` to every other rank r, and wait until ``received[r]`` has what that rank sends."""
    others = [rank for rank in range(comm.world) if rank != comm.rank]
    comm.exchange({rank: [sent[rank]] for rank in others}, {rank: [received[rank]] for rank in others}, step)()

"""Work in processes that may die: a kernel that faults, hangs or breaks its CUDA context costs one task, not the run.

After an illegal address every later CUDA call of a process fails, so a process that has broken its context ends itself,
and the next task is given to a fresh one. The parent never touches the device.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import Any, Generic, TypeVar

import torch

__all__ = ["Done", "work"]

T = TypeVar("T")
R = TypeVar("R")

START = 120.0
"""Seconds that a process has to import torch and take its first task; a busy machine needs a tenth of that."""


END = 5.0
"""Seconds that an idle process has to end by itself."""


@dataclass(frozen=True)
class Done(Generic[T, R]):
    """A task and what became of it: its value, or the failure in words. `broken`: its process ended with it."""

    task: T
    value: R | None
    failure: str = ""
    broken: bool = False


@dataclass(eq=False)
class _Worker(Generic[T]):
    """One process, the pipe to it, and what it is doing until when."""

    process: Any
    pipe: connection.Connection
    task: T | None = None
    until: float = field(default=0.0)

    def end(self, patience: float = 0.0) -> None:
        """Ask it to end by closing the pipe, and end it when the patience is over."""
        self.pipe.close()
        self.process.join(patience)
        self.process.kill()
        self.process.join()


def work(
    tasks: Iterable[T], function: Callable[[T], R], *, jobs: int = 1, patience: float = 120.0, seconds: float = 3600.0
) -> Iterator[Done[T, R]]:
    """Run `function` on every task, in `jobs` processes; yields each as it is done.

    Args:
        tasks: picklable. function: importable by its name, as a fresh process must find it.
        jobs: processes at a time.
        patience: seconds that one task may take before its process is ended.
        seconds: after these no further task begins and those that run are ended; neither is yielded.

    >>> [done.value for done in work([4, 9], abs)]
    [4, 9]
    """
    waiting, until = deque(tasks), time.monotonic() + seconds
    workers: list[_Worker[T]] = []
    try:
        while waiting or any(worker.task is not None for worker in workers):
            if time.monotonic() >= until:
                return
            while waiting and len(workers) < jobs:
                workers.append(_started(function))
            for worker in workers:
                if worker.task is None and waiting:
                    _give(worker, waiting.popleft(), patience)
            yield from _collected(workers, until)
    finally:
        for worker in workers:
            worker.end(END if worker.task is None else 0.0)


def _started(function: Callable[[T], R]) -> _Worker[T]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, function), daemon=True)
    process.start()
    theirs.close()
    worker: _Worker[T] = _Worker(process, ours)
    worker.until = time.monotonic() + START
    return worker


def _give(worker: _Worker[T], task: T, patience: float) -> None:
    worker.task, worker.until = task, max(worker.until, time.monotonic()) + patience
    with contextlib.suppress(OSError):  # a process that is gone is found out when it is asked
        worker.pipe.send(task)


def _collected(workers: list[_Worker[T]], until: float) -> Iterator[Done[T, Any]]:
    """What is there now, or after a wait; processes that died or took too long are taken out."""
    first = min([until, *(worker.until for worker in workers if worker.task is not None)])
    connection.wait([worker.pipe for worker in workers], timeout=max(first - time.monotonic(), 0.0) + 0.01)
    for worker in list(workers):
        task, done = worker.task, None
        if worker.pipe.poll():
            try:
                value, failure, broken = worker.pipe.recv()
            except (EOFError, OSError):
                worker.process.join(1.0)
                code = worker.process.exitcode
                value, failure, broken = None, f"its process ended (exit code {code})", True
            done = None if task is None else Done(task, value, failure, broken)
            worker.task, worker.until = None, 0.0
        elif task is not None and time.monotonic() >= worker.until:
            done, broken = Done(task, None, "it took too long, and its process was ended", True), True
        else:
            continue
        if broken:
            workers.remove(worker)
            worker.end()
        if done is not None:
            yield done


def _serve(pipe: connection.Connection, function: Callable[[Any], Any]) -> None:
    """What a process does: tasks, one after the other, until the pipe closes or the device is broken."""
    torch.set_num_threads(1)
    while True:
        try:
            task = pipe.recv()
        except (EOFError, OSError):
            return
        value, failure = None, ""
        try:
            value = function(task)
        except Exception:  # whatever a kernel raises is a finding
            failure = traceback.format_exc()
        broken = _broken()
        pipe.send((value, failure, broken))
        if broken:
            return


def _broken() -> bool:
    """Whether this process' CUDA context no longer serves."""
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
        torch.zeros(1, device="cuda").add_(1)
        torch.cuda.synchronize()
    except Exception:
        return True
    return False

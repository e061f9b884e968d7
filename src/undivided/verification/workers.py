"""Work in separate processes: a kernel that faults, hangs or breaks its CUDA context loses one task, not the run.

After an illegal address all later CUDA calls of a process fail, so a process with a broken context ends, and a new one
gets the next task. The parent process never uses the device.
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

__all__ = ["TaskResult", "work"]

T = TypeVar("T")
R = TypeVar("R")

START_SECONDS = 120.0
"""Time limit for a process to import torch and take its first task; a busy machine needs a tenth of that."""

END_SECONDS = 5.0
"""Time limit for an idle process to end by itself."""


@dataclass(frozen=True)
class TaskResult(Generic[T, R]):
    """The result of a task: its value, or a text that describes the failure. `broken`: its process ended."""

    task: T
    value: R | None
    failure: str = ""
    broken: bool = False


@dataclass(eq=False)
class _Worker(Generic[T]):
    """One process, the pipe to it, its task and the deadline of the task."""

    process: Any
    pipe: connection.Connection
    task: T | None = None
    deadline: float = field(default=0.0)

    def end(self, seconds: float = 0.0) -> None:
        """Close the pipe, so that the process ends, and kill it after this time."""
        self.pipe.close()
        self.process.join(seconds)
        self.process.kill()
        self.process.join()


def work(
    tasks: Iterable[T],
    function: Callable[[T], R],
    *,
    jobs: int = 1,
    task_seconds: float = 120.0,
    seconds: float = 3600.0,
) -> Iterator[TaskResult[T, R]]:
    """The results of `function` on every task, computed in `jobs` processes, as they arrive.

    Args:
        tasks: picklable values.
        function: importable by its name, because a new process imports it.
        jobs: number of processes.
        task_seconds: time limit of one task, after which its process is killed.
        seconds: time limit of the whole: then no further task starts, running tasks are killed, and neither is yielded.

    >>> [done.value for done in work([4, 9], abs)]
    [4, 9]
    """
    waiting, deadline = deque(tasks), time.monotonic() + seconds
    workers: list[_Worker[T]] = []
    try:
        while waiting or any(worker.task is not None for worker in workers):
            if time.monotonic() >= deadline:
                return
            while waiting and len(workers) < jobs:
                workers.append(_start(function))
            for worker in workers:
                if worker.task is None and waiting:
                    _assign(worker, waiting.popleft(), task_seconds)
            yield from _collect(workers, deadline)
    finally:
        for worker in workers:
            worker.end(END_SECONDS if worker.task is None else 0.0)


def _start(function: Callable[[T], R]) -> _Worker[T]:
    """A new process that serves tasks."""
    context = multiprocessing.get_context("spawn")
    parent_end, child_end = context.Pipe()
    process = context.Process(target=_serve, args=(child_end, function), daemon=True)
    process.start()
    child_end.close()
    worker: _Worker[T] = _Worker(process, parent_end)
    worker.deadline = time.monotonic() + START_SECONDS
    return worker


def _assign(worker: _Worker[T], task: T, seconds: float) -> None:
    """Send a task to a process."""
    worker.task, worker.deadline = task, max(worker.deadline, time.monotonic()) + seconds
    with contextlib.suppress(OSError):  # `_collect` finds that the process has ended
        worker.pipe.send(task)


def _collect(workers: list[_Worker[T]], deadline: float) -> Iterator[TaskResult[T, Any]]:
    """The results that have arrived, after a wait if there are none; removes processes that ended or took too long."""
    first = min([deadline, *(worker.deadline for worker in workers if worker.task is not None)])
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
            done = None if task is None else TaskResult(task, value, failure, broken)
            worker.task, worker.deadline = None, 0.0
        elif task is not None and time.monotonic() >= worker.deadline:
            done, broken = TaskResult(task, None, "it took too long, and its process was ended", True), True
        else:
            continue
        if broken:
            workers.remove(worker)
            worker.end()
        if done is not None:
            yield done


def _serve(pipe: connection.Connection, function: Callable[[Any], Any]) -> None:
    """The loop of a process: it runs tasks until the pipe closes or its CUDA context is broken."""
    torch.set_num_threads(1)
    while True:
        try:
            task = pipe.recv()
        except (EOFError, OSError):
            return
        value, failure = None, ""
        try:
            value = function(task)
        except Exception:  # whatever a kernel raises is reported
            failure = traceback.format_exc()
        broken = _context_is_broken()
        pipe.send((value, failure, broken))
        if broken:
            return


def _context_is_broken() -> bool:
    """Whether the CUDA context of this process no longer works."""
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
        torch.zeros(1, device="cuda").add_(1)
        torch.cuda.synchronize()
    except Exception:
        return True
    return False

"""What is checked on a device, as lines: a case, a dtype, a backend, a verdict. Run in processes, written as they
come."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from undivided.verification import workers

__all__ = ["Line", "Lines", "Task", "in_processes", "pending"]

WRITE_EVERY = 2.0
"""Seconds between two versions of the file."""


class Line(NamedTuple):
    """One case in one dtype with one backend: verdict "right", "wrong" or "refused", and what was wrong or why
    refused."""

    case: str
    dtype: str
    backend: str
    verdict: str
    detail: tuple[str, ...]


class Task(NamedTuple):
    """One case in one dtype on a device, with these backends: what a process is given."""

    device: str
    case: str
    dtype: str
    backends: tuple[str, ...]


def in_processes(
    planned: Sequence[Task], lines_of: Callable[[Task], list[Line]], *, jobs: int, seconds: float, patience: float
) -> Iterator[Line]:
    """The lines of all tasks, as they come. A task whose process ended is run again with each backend alone, to find
    which.

    Args:
        lines_of: a line for each backend of a task; importable, as `workers.work` wants it.
        jobs: processes at a time. seconds, patience: of the whole, and of one task.
    """
    until = time.monotonic() + seconds
    again: list[Task] = []
    for turn in (planned, again):
        left = max(until - time.monotonic(), 0.0)
        for done in workers.work(turn, lines_of, jobs=jobs, patience=patience, seconds=left):
            task = done.task
            if done.broken and len(task.backends) > 1:
                again += [task._replace(backends=(name,)) for name in task.backends]
            elif done.value is not None:
                yield from done.value
            else:
                yield from (Line(task.case, task.dtype, name, "wrong", (done.failure,)) for name in task.backends)


def pending(planned: Iterable[Task], known: Iterable[Line]) -> list[Task]:
    """What is left to do when these lines are known."""
    have = {line[:3] for line in known}
    left = (
        task._replace(backends=tuple(name for name in task.backends if (task.case, task.dtype, name) not in have))
        for task in planned
    )
    return [task for task in left if task.backends]


class Lines:
    """The lines so far: wrong ones are printed as they come, all are in the file."""

    def __init__(self, path: Path | None = None, resume: bool = False) -> None:
        self.path, self._written = path, 0.0
        rows = json.loads(path.read_text()) if resume and path is not None and path.exists() else []
        self.lines = [Line(**{**row, "detail": tuple(row["detail"])}) for row in rows]

    def add(self, line: Line) -> None:
        """Print and keep one more."""
        self.lines.append(line)
        if line.verdict == "wrong":
            words = " ".join("; ".join(line.detail).split())
            print(f"WRONG {line.backend} {line.case} {line.dtype}: {words[:600]}", flush=True)
        if time.monotonic() > self._written + WRITE_EVERY:
            self.write()

    def write(self) -> None:
        """The file, as a whole or not at all."""
        self._written = time.monotonic()
        if self.path is not None:
            fresh = self.path.with_suffix(".new")
            fresh.write_text(json.dumps([line._asdict() for line in self.lines], indent=1) + "\n")
            fresh.replace(self.path)

    def end(self, planned: Iterable[Task]) -> int:
        """Write, print a count for each backend; 1 where anything was wrong, 2 where some of what was planned was not
        run."""
        self.write()
        counts = Counter((line.backend, line.verdict) for line in self.lines)
        for name in sorted({line.backend for line in self.lines}):
            print(f"{name}: " + ", ".join(f"{counts[name, word]} {word}" for word in ("right", "wrong", "refused")))
        left = sum(len(task.backends) for task in pending(planned, self.lines))
        if left:
            print(f"not run: {left} (the time was over; --resume runs the rest)", flush=True)
        return 1 if any(line.verdict == "wrong" for line in self.lines) else 2 if left else 0

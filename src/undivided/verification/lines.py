"""Checks on a device, as lines: a case, a dtype, a backend and a verdict. They run in processes and are written as they
arrive."""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from undivided._files import read_json, replace_text
from undivided.verification import workers

__all__ = ["Line", "Lines", "Task", "command_parser", "in_processes", "pending", "run"]

WRITE_EVERY = 2.0
"""Seconds between two writes of the file."""


class Line(NamedTuple):
    """The verdict on one case in one dtype on one backend: "right", "wrong", "undecided" or "refused", with details."""

    case: str
    dtype: str
    backend: str
    verdict: str
    detail: tuple[str, ...]


class Task(NamedTuple):
    """One case in one dtype on a device, for some backends: the unit of work of a process."""

    device: str
    case: str
    dtype: str
    backends: tuple[str, ...]


def in_processes(
    planned: Sequence[Task], task_lines: Callable[[Task], list[Line]], *, jobs: int, seconds: float, task_seconds: float
) -> Iterator[Line]:
    """The lines of all tasks, as they arrive.

    If the process of a task ends, the task is repeated with each backend alone, to find the one that ended it.

    Args:
        planned: the tasks.
        task_lines: returns one line for each backend of a task; importable by name, as `workers.work` requires.
        jobs: number of processes.
        seconds, task_seconds: time limits of the whole and of one task.
    """
    deadline = time.monotonic() + seconds
    repeated: list[Task] = []
    for tasks in (planned, repeated):
        left = max(deadline - time.monotonic(), 0.0)
        for done in workers.work(tasks, task_lines, jobs=jobs, task_seconds=task_seconds, seconds=left):
            task = done.task
            if done.broken and len(task.backends) > 1:
                repeated += [task._replace(backends=(name,)) for name in task.backends]
            elif done.value is not None:
                yield from done.value
            else:
                yield from (Line(task.case, task.dtype, name, "wrong", (done.failure,)) for name in task.backends)


def pending(planned: Iterable[Task], finished: Iterable[Line]) -> list[Task]:
    """The tasks without the backends that have a line already."""
    done = {line[:3] for line in finished}
    left = (
        task._replace(backends=tuple(name for name in task.backends if (task.case, task.dtype, name) not in done))
        for task in planned
    )
    return [task for task in left if task.backends]


def command_parser(description: str | None, filter_help: str) -> argparse.ArgumentParser:
    """A parser with the options of every command that writes lines; each adds its own ``--jobs``."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--filter", default="", help=filter_help)
    parser.add_argument("--seconds", type=float, default=3600.0, help="time limit of the processes")
    parser.add_argument("--json", type=Path, help="write every line to this file as it arrives")
    parser.add_argument("--resume", action="store_true", help="keep the lines of the file and run the rest")
    return parser


class Lines:
    """The lines so far: wrong and undecided ones are printed as they arrive, all are written to a file."""

    def __init__(self, path: Path | None = None, resume: bool = False) -> None:
        self.path, self._written = path, 0.0
        rows = read_json(path) if resume and path is not None and path.exists() else []
        self.lines = [Line(**{**row, "detail": tuple(row["detail"])}) for row in rows]

    def add(self, line: Line) -> None:
        """Add a line, and print it if it is wrong or undecided."""
        self.lines.append(line)
        if line.verdict in ("wrong", "undecided"):
            text = " ".join("; ".join(line.detail).split())
            print(f"{line.verdict.upper()} {line.backend} {line.case} {line.dtype}: {text[:600]}", flush=True)
        if time.monotonic() > self._written + WRITE_EVERY:
            self.write()

    def add_all(self, lines: Iterable[Line]) -> None:
        """Add lines as they arrive; if an interrupt or an error ends them, the file has those before it."""
        try:
            for line in lines:
                self.add(line)
        finally:
            self.write()

    def write(self) -> None:
        """Replace the file."""
        self._written = time.monotonic()
        if self.path is not None:
            replace_text(self.path, json.dumps([line._asdict() for line in self.lines], indent=1) + "\n")

    def end(self, planned: Iterable[Task]) -> int:
        """The exit code: 1 if anything was wrong, 2 if something was not run or is undecided. Prints the counts."""
        counts = Counter((line.backend, line.verdict) for line in self.lines)
        words = ["right", "wrong", "refused"]
        words += ["undecided"] if any(line.verdict == "undecided" for line in self.lines) else []
        for name in sorted({line.backend for line in self.lines}):
            print(f"{name}: " + ", ".join(f"{counts[name, word]} {word}" for word in words))
        left = sum(len(task.backends) for task in pending(planned, self.lines))
        if left:
            print(f"not run: {left} (time limit; --resume runs the rest)", flush=True)
        if any(line.verdict == "wrong" for line in self.lines):
            return 1
        return 2 if left or "undecided" in words else 0


def run(
    planned: Sequence[Task], task_lines: Callable[[Task], list[Line]], options: argparse.Namespace, task_seconds: float
) -> int:
    """The exit code (`Lines.end`), after the tasks whose lines the file lacks were run and their lines printed.

    options: of `command_parser`, and the number of processes as `jobs`; 0 runs in this one, without limits.
    """
    report = Lines(options.json, options.resume)
    left = pending(planned, report.lines)
    if options.jobs:
        lines = in_processes(left, task_lines, jobs=options.jobs, seconds=options.seconds, task_seconds=task_seconds)
    else:
        lines = (line for task in left for line in task_lines(task))
    report.add_all(lines)
    return report.end(planned)

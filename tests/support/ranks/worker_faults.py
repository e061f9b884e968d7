"""Faults in worker processes, as functions that a new process finds by name."""

from __future__ import annotations

import os
import signal
import time

from undivided.verification.lines import Line, Task


def misbehave(task: str) -> str:
    """Die, hang or raise by the task's name; else answer."""
    if task == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if task == "hangs":
        time.sleep(60)
    if task == "raises":
        raise ArithmeticError("of its own")
    return f"{task} in {os.getpid()}"


def one_backend_kills(task: Task) -> list[Line]:
    """Every backend is right, but one ends the process."""
    if "bad" in task.backends:
        os.kill(os.getpid(), signal.SIGKILL)
    return [Line(task.case, task.dtype, name, "right", ()) for name in task.backends]

"""Tests in forked processes, one per mutant: each starts with the tests collected and torch imported."""

from __future__ import annotations

import os
import resource
import select
import signal
import time
from collections.abc import Callable

import pytest
from _pytest.runner import runtestprotocol

NO_TIME = "?"
DEADLOCK = 3600
"""Seconds after which a mutant counts as undecided, whatever it waits for."""
STALLED = 300
"""Seconds without use of the processor after which a process counts as one that never ends."""


def in_a_child(work: Callable[[], str], seconds: float) -> str | None:
    """The text that `work` returns in a forked process; None if it dies, or needs too much of the processor or none."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, 1), os.dup2(devnull, 2)
        resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds) + 1))
        signal.alarm(DEADLOCK)
        text = work().encode()
        while text:
            text = text[os.write(write, text) :]
        os._exit(0)
    os.close(write)
    content = _read(read, child)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM:
        return NO_TIME
    return content.decode() if status == 0 else None


def _read(pipe: int, child: int) -> bytes:
    """All that the process writes; it is ended if it stands still."""
    content, last_ticks, since = b"", 0, time.monotonic()
    while True:
        if select.select([pipe], [], [], 10)[0]:
            chunk = os.read(pipe, 1 << 16)
            if not chunk:
                os.close(pipe)
                return content
            content += chunk
        with open(f"/proc/{child}/stat") as stat:
            ticks = sum(map(int, stat.read().rpartition(")")[2].split()[11:13]))
        if ticks > last_ticks:
            last_ticks, since = ticks, time.monotonic()
        elif time.monotonic() > since + STALLED:
            os.kill(child, signal.SIGKILL)


def failing_test(items: list[pytest.Item], seconds: float) -> str:
    """The first test that fails; "" if none does, NO_TIME if there is no time for all."""
    end = time.process_time() + seconds
    for n, item in enumerate(items):
        if time.process_time() > end:
            return NO_TIME
        for report in runtestprotocol(item, log=False, nextitem=items[n + 1] if n + 1 < len(items) else None):
            if report.failed:
                return item.nodeid
    return ""

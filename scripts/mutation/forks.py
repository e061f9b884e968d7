"""Tests in forked processes, one per mutant: each starts with the tests collected and torch imported."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable

import pytest
from _pytest.runner import runtestprotocol

NO_TIME = "?"
DEADLOCK = 3600
"""Seconds after which a mutant counts as undecided, whatever it waits for."""


def in_a_child(work: Callable[[], str], seconds: float) -> str | None:
    """The text that `work` returns in a forked process; None if the process dies, or needs more of the processor."""
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
    with open(read, "rb") as pipe:
        content = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM:
        return NO_TIME
    return content.decode() if status == 0 else None


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

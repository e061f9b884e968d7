"""The native library in forked processes: children have threads, and compute."""

from __future__ import annotations

import os
import subprocess
import sys

import forked_processes
import pytest

from undivided.kernels import cpu

needs_library = pytest.mark.skipif(isinstance(cpu.load(), str), reason="the native kernel is not built")
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


def fresh(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-W", "ignore", "-c", program], timeout=120, capture_output=True, text=True)


def beside_torch(program: str) -> subprocess.CompletedProcess[str]:
    """The same in a process that has imported torch, which takes seconds, and has started no thread."""
    return forked_processes.run(f"import warnings; warnings.simplefilter('ignore')\n{program}", timeout=120)


FORK = """
import os, sys, threading, torch
torch.set_num_threads(2)
{imported}
torch.manual_seed(0)
q = torch.randn(1, 4, 300, 64)  # on one thread

def attention():
    import undivided
    return undivided.attention(q, q, q, layout="bhsd", backend="native")

def threads():
    return len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 0

def state():
    from undivided.backends import native
    before = threads()
    result = attention().numpy().tobytes()
    again = attention().numpy().tobytes()
    assert result == again
    return threads() > before, "forked" in native.status(), result

def in_child(function):
    reading, writing = os.pipe()
    if os.fork() == 0:
        threaded, forked, result = function()
        os.write(writing, bytes([threaded, forked]) + result[:4096])
        os._exit(0)
    os.close(writing)
    found = os.read(reading, 5000)
    os.wait()
    assert found, "the child failed"
    return bool(found[0]), bool(found[1]), found[2:]

{parent}
threaded, forked, result = in_child({function})
assert threaded or not threads(), "the child worked on one thread"
assert forked == {forked}, forked
assert attention().numpy().tobytes()[:4096] == result
assert not os.path.isdir("/proc/self/task") or threads() > 1
"""
PARENTS = {
    "nothing-computed": "",
    "attention-on-one-thread": "torch.set_num_threads(1); attention(); torch.set_num_threads(2)",
    "attention-on-two-threads": "attention()",
    "torch-on-two-threads": "torch.ones(2000000).exp()",
    "threads-of-another-thread": "t = threading.Thread(target=attention); t.start(); t.join()",
    "fork-in-another-thread": (
        "attention(); from concurrent.futures import ThreadPoolExecutor; fork = in_child\n"
        "in_child = lambda function: ThreadPoolExecutor(1).submit(fork, function).result()"
    ),
}


@needs_library
@needs_fork
@pytest.mark.parametrize("parent", PARENTS)
def test_a_forked_child_has_threads(parent: str) -> None:
    """Every child once ran on one thread, because a child that waits for the threads of its parent never returns."""
    run = fresh if parent == "attention-on-two-threads" else beside_torch
    done = run(FORK.format(imported="import undivided", parent=PARENTS[parent], function="state", forked=True))
    assert done.returncode == 0, done.stderr


@needs_library
@needs_fork
def test_a_child_that_imports_the_package_first_has_threads() -> None:
    done = fresh(FORK.format(imported="", parent="", function="state", forked=False))
    assert done.returncode == 0, done.stderr


@needs_library
@needs_fork
@pytest.mark.parametrize("between", ["None", "attention()"])
def test_a_child_of_a_forked_child_has_threads(between: str) -> None:
    function = f"lambda: ({between}, in_child(state))[1]"
    done = beside_torch(FORK.format(imported="import undivided", parent="attention()", function=function, forked=True))
    assert done.returncode == 0, done.stderr


@needs_library
@needs_fork
def test_threads_of_a_forked_child_call_at_the_same_time() -> None:
    """One of them uses the team; meanwhile the others compute on their own."""
    parent = """
def at_once():
    calls = [threading.Thread(target=state) for _ in range(8)]
    result = state()
    for call in calls:
        call.start()
    for call in calls:
        call.join()
    return result

attention()
"""
    done = beside_torch(FORK.format(imported="import undivided", parent=parent, function="at_once", forked=True))
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr


@needs_library
@needs_fork
def test_a_pool_of_forked_processes_computes() -> None:
    program = FORK.format(imported="import undivided", parent="attention()", function="state", forked=True) + (
        "import multiprocessing\n"
        "with multiprocessing.get_context('fork').Pool(2) as pool:\n"
        "    found = [pool.apply_async(state) for _ in range(4)]\n"
        "    assert all(one.get(60)[2] == attention().numpy().tobytes() for one in found)\n"
    )
    done = fresh(program)
    assert done.returncode == 0, done.stderr


# Levels

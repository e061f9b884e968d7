"""Memory that runs out within a call of the native library: the call fails, and neither the process nor a thread."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from undivided.kernels import cpu

# `operator new` fails if it is told to: in all threads but the first (1), or in the first after some successes (2).
FAILING = """
#include <new>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>
static volatile int mode = 0, successes = 0;
extern "C" void fail(int new_mode, int after) { successes = after, mode = new_mode; }
void* operator new(size_t size) {
  const bool is_first = syscall(SYS_gettid) == getpid();
  if ((mode == 1 && !is_first) || (mode == 2 && is_first && __sync_fetch_and_sub(&successes, 1) <= 0))
    throw std::bad_alloc();
  if (void* memory = malloc(size)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { free(memory); }
void operator delete(void* memory, size_t) noexcept { free(memory); }
"""
PROGRAM = """
import ctypes, os, sys, torch
from undivided.kernels import cpu
import undivided
failing, options = ctypes.CDLL(sys.argv[1]), {}
for problem in sys.argv[2:]:  # one after another in a process of its own each, which has kept no memory and no thread
    child = os.fork()
    if not child:
        break
    _, status = os.waitpid(child, 0)
    print("status of", problem, status, flush=True)
else:
    sys.exit()
torch.set_num_threads(2)
torch.manual_seed(0)
if problem == "splits":  # few rows and many keys: the splits of the keys are merged
    q, k, v = torch.randn(1, 4, 16, 128), torch.randn(1, 4, 20000, 128), torch.randn(1, 4, 20000, 128)
elif problem == "chunks":  # decoding
    q, k, v = torch.randn(4, 32, 1, 128), torch.randn(4, 4, 8000, 128), torch.randn(4, 4, 8000, 128)
elif problem == "gradients":
    q, k, v = (torch.randn(1, 4, 300, 64).requires_grad_() for _ in range(3))
else:  # pieces
    q, k, v = torch.randn(1, 8, 600, 32), torch.randn(1, 8, 4200, 32), torch.randn(1, 8, 4200, 32)
    options["batch_invariant"] = True
library = cpu.load()
status = []

def out():
    out = undivided.attention(q, k, v, layout="bhsd", backend="native", **options)
    return torch.autograd.grad(out.sum(), (q, k, v))[1] if q.requires_grad else out

expected = out()
run = {name: getattr(library, name) for name in ("forward", "backward")}

def failing_call(name):
    def call(*arguments):
        failing.fail(*how)
        try:
            return run[name](*arguments)
        finally:
            failing.fail(0, 0)
    return call

for name in run:
    setattr(library, name, failing_call(name))
kinds = set()
for how in [(1, 0), *((2, n) for n in range(40))]:
    try:
        assert torch.equal(out(), expected)
        kinds.add("ran")
    except RuntimeError as error:
        assert "not enough memory" in str(error), error
        kinds.add("refused")
how = (0, 0)
assert torch.equal(out(), expected)
print(problem, *sorted(kinds), flush=True)
"""
PROBLEMS = ("splits", "chunks", "pieces", "gradients")


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """A run of all problems: the imports take seconds, and the loader has to put `operator new` before them."""
    folder = tmp_path_factory.mktemp("failing")
    source, library = folder / "failing.cc", folder / "failing.so"
    source.write_text(FAILING, encoding="utf-8")
    subprocess.run(["g++", "-O1", "-shared", "-fPIC", source, "-o", library], check=True, timeout=120)
    command = [sys.executable, "-c", PROGRAM, library, *PROBLEMS]
    environment = {**os.environ, "LD_PRELOAD": str(library)}
    return subprocess.run(command, env=environment, timeout=300, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux's loader has LD_PRELOAD")
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ in PATH")
@pytest.mark.skipif(isinstance(cpu.load(), str), reason="the native kernel is not built")
@pytest.mark.parametrize("problem", PROBLEMS)
def test_an_allocation_that_fails_anywhere_is_an_error_and_the_next_call_works(
    done: subprocess.CompletedProcess[str], problem: str
) -> None:
    """A list that grew within a team ended the process, or left threads at work on what the caller had destroyed."""
    printed = done.stdout.splitlines()
    assert f"status of {problem} 0" in printed, done.stderr[-2000:]
    assert f"{problem} ran refused" in printed, done.stderr[-2000:]

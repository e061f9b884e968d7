"""Processes, signals and limits: a call gives the right result or an error, and the next call works."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import undivided
from undivided import masks

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="of Linux")


def python(code: str, timeout: float = 600) -> subprocess.CompletedProcess[str]:  # against hangs, on a busy machine too
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout)


def result(n: int) -> torch.Tensor:
    q = torch.randn(1, 40 + n, 4, 32, generator=torch.Generator().manual_seed(n))
    return undivided.attention(q, q, q, layout="bshd", mask=masks.causal())


class Results(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, n: int) -> torch.Tensor:
        return result(n).sum(1)


@pytest.mark.filterwarnings("ignore:This DataLoader will create 2 worker:UserWarning")  # on one core
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")  # of xdist too
@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow), "forkserver"])
def test_the_workers_of_a_data_loader_compute_the_same_bits(start: str) -> None:
    if start not in multiprocessing.get_all_start_methods():
        pytest.skip(f"{start} is not available here")
    expected = torch.stack([result(n).sum(1) for n in range(12)])
    loader = DataLoader(Results(), batch_size=3, num_workers=2, multiprocessing_context=start)
    found = torch.cat(list(loader))
    assert torch.equal(found[:, 0], expected[:, 0])


@LINUX
def test_ctrl_c_in_a_long_call_interrupts_it_and_the_next_call_works() -> None:
    code = """
import signal, torch, undivided
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
q = torch.randn(1, 6000, 8, 64)
small = undivided.attention(q[:, :50], q[:, :50], q[:, :50], layout="bshd")
print("ready", flush=True)
try:
    while True:
        undivided.attention(q, q, q, layout="bshd")
except KeyboardInterrupt:
    again = undivided.attention(q[:, :50], q[:, :50], q[:, :50], layout="bshd")
    print("interrupted", torch.equal(again, small))
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.5)
        for _ in range(6):  # Python drops an interrupt that arrives in a finaliser
            process.send_signal(signal.SIGINT)
            try:
                process.wait(timeout=20)
                break
            except subprocess.TimeoutExpired:
                continue
        process.kill()  # if no interrupt ended it
        assert process.stdout.read() == "interrupted True\n"
    assert process.returncode == 0


@LINUX
def test_signal_handlers_run_between_calls_and_change_no_result() -> None:
    code = """
import signal, torch, undivided
ticks = []
signal.signal(signal.SIGALRM, lambda *_: ticks.append(1))
q = torch.randn(2, 400, 4, 64, requires_grad=True)
def step():
    out = undivided.attention(q, q, q, layout="bshd")
    return out.detach(), torch.autograd.grad(out.square().sum(), q)[0]
expected = step()
signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
same = all(torch.equal(a, b) for _ in range(100) for a, b in zip(step(), expected))
signal.setitimer(signal.ITIMER_REAL, 0)
print(same, len(ticks) > 20)
"""
    assert python(code).stdout == "True True\n"


@pytest.mark.slow
@LINUX
def test_too_little_memory_is_an_error_and_the_next_call_works() -> None:
    code = """
import gc, os, resource, torch, undivided
torch.set_num_threads(2)
q = torch.randn(1, 2000, 8, 128)
few = q[:, :64]
expected = undivided.attention(few, few, few, layout="bshd")
def forward():
    return undivided.attention(q, q, q, layout="bshd")
def backward():
    x = q.detach().requires_grad_()
    return torch.autograd.grad(undivided.attention(x, x, x, layout="bshd").sum(), x)
pages = lambda: int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
kinds = set()
free = resource.RLIM_INFINITY
for mib in [0, 1, 2, 4, 8, 12, 16, 20, 24, 32, 40, 48, 64]:
    for call in (forward, backward):
        gc.collect()
        resource.setrlimit(resource.RLIMIT_AS, (pages() + (mib << 20), free))
        try:
            call()
            kinds.add("ran")
        except (RuntimeError, MemoryError) as error:
            assert "memory" in str(error), error
            kinds.add("refused")
        resource.setrlimit(resource.RLIMIT_AS, (free, free))
        assert torch.equal(undivided.attention(few, few, few, layout="bshd"), expected)
assert call() is not None
print(sorted(kinds))
"""
    done = python(code)
    assert done.stdout == "['ran', 'refused']\n", done.stderr[-2000:]


@pytest.mark.skipif(
    not any(importlib.util.find_spec(name) for name in ("_interpreters", "_xxsubinterpreters")),
    reason="this Python has no module for subinterpreters",
)
def test_a_subinterpreter_is_refused_instead_of_waiting_forever() -> None:
    code = """
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters
code = '''
try:
    import undivided
except ImportError as error:
    assert "cannot be imported in a subinterpreter" in str(error), error
else:
    raise AssertionError("it was imported")
'''
one = interpreters.create()
failure = getattr(interpreters, "exec", interpreters.run_string)(one, code)
print(failure)
"""
    assert python(code).stdout == "None\n"


def test_a_process_leaves_nothing_behind(tmp_path: Path) -> None:
    """No output, no file in the temporary folder, and exit status 0."""
    code = "import torch, undivided; q = torch.randn(1, 99, 4, 32); undivided.attention(q, q, q, layout='bshd')"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not list(tmp_path.iterdir())

"""The native library's teams of threads, without an OpenMP runtime and with one."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from undivided.kernels import cpu

SOURCES = cpu.path().parent
PROGRAM = Path(__file__).with_name("thread_team.cc")
OPTIONS = {
    "built-without-openmp": ["-DUNDIVIDED_NO_OPENMP"],
    "no-runtime": [],
    "gnu-openmp": ["-Wl,--no-as-needed", "-lgomp"],
}


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ in PATH")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_unit_runs_once_on_all_threads_in_the_callers_float_mode_and_may_throw(
    options: list[str], tmp_path: Path
) -> None:
    program, source = tmp_path / "thread_team", SOURCES / "schedule" / "thread_team.cc"
    build = ["g++", "-O1", "-std=c++17", "-Wall", "-Wextra", "-pthread", f"-I{SOURCES}", PROGRAM, source]
    subprocess.run([*build, "-o", program, *options], check=True, timeout=120)
    done = subprocess.run([program], timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


HIDDEN_RUNTIME = """
import ctypes, os, sys
load = ctypes.CDLL.__init__

def hide(library, name, mode=ctypes.DEFAULT_MODE, **options):
    load(library, name, ctypes.DEFAULT_MODE if "libtorch_global_deps" in str(name) else mode, **options)

ctypes.CDLL.__init__ = hide
import torch
from undivided.kernels.cpu import _openmp
assert not _openmp._is_visible()
torch.set_num_threads(2)
x = torch.randn(1, 512, 2, 64)
torch.nn.functional.scaled_dot_product_attention(x, x, x)  # starts PyTorch's threads
before = len(os.listdir("/proc/self/task"))
import undivided
undivided.attention(x, x, x, layout="bshd", backend="native")
from undivided.kernels import cpu
print(cpu.load().has_openmp, len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a runtime that PyTorch may hide")
@pytest.mark.skipif(isinstance(cpu.load(), str), reason="the native kernel is not built")
def test_a_runtime_that_only_pytorch_sees_is_used() -> None:
    """As in PyTorch's wheels for 64-bit ARM: two teams of threads would compete for the cores."""
    done = subprocess.run([sys.executable, "-c", HIDDEN_RUNTIME], timeout=120, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("True 0\n", 0), done.stderr

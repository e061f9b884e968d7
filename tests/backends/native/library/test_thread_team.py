"""The native library's teams of threads, without an OpenMP runtime and with one."""

from __future__ import annotations

import shutil
import subprocess
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
def test_every_unit_runs_once_on_all_threads(options: list[str], tmp_path: Path) -> None:
    program, source = tmp_path / "thread_team", SOURCES / "schedule" / "thread_team.cc"
    build = ["g++", "-O1", "-std=c++17", "-Wall", "-Wextra", "-pthread", f"-I{SOURCES}", PROGRAM, source]
    subprocess.run([*build, "-o", program, *options], check=True, timeout=120)
    done = subprocess.run([program], timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout

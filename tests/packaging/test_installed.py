"""The installed package, wherever it comes from. The wheel builds run this file alone, without the repository."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest

DISTRIBUTION = importlib.metadata.distribution("undivided")


def _run(code: str) -> str:
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_attention_runs() -> None:
    code = (
        "import torch, undivided; q = torch.randn(1, 8, 2, 16, requires_grad=True)\n"
        "undivided.attention(q, q, q, layout='bshd').sum().backward(); print(q.grad.shape)"
    )
    assert _run(code) == "torch.Size([1, 8, 2, 16])\n"


def test_a_wheel_for_a_platform_has_a_library_that_loads() -> None:
    if "-none-any" in (DISTRIBUTION.read_text("WHEEL") or "") or _is_editable():
        pytest.skip("not installed from a wheel for a platform")
    code = "from undivided.kernels import cpu; found = cpu.load(); print(getattr(found, 'level', found))"
    x86 = ("avx2", "avx512", "avx512_bf16", "amx_bf16", "amx")
    assert _run(code).strip() in ("generic", *x86, "neon", "neon_bf16")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_process_has_one_openmp_runtime() -> None:
    """The library uses the OpenMP threads of torch: two runtimes in one process would compete for the cores."""
    code = (
        "import torch, undivided; torch.set_num_threads(2); q = torch.randn(8, 64, 8, 64)\n"
        "undivided.attention(q, q, q, layout='bshd'); print(open('/proc/self/maps').read())"
    )
    files = {line.split()[-1] for line in _run(code).splitlines() if "/" in line}
    runtimes = [name for name in files if Path(name).name.startswith(("libgomp", "libomp", "libiomp"))]
    assert len(runtimes) <= 1, runtimes


def _is_editable() -> bool:
    origin = json.loads(DISTRIBUTION.read_text("direct_url.json") or "{}")
    return bool(origin.get("dir_info", {}).get("editable"))

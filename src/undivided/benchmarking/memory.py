"""Peak resident memory of a forward and a backward over long sequences, each in a separate process; Linux only.

A sample of the rows of the output is compared with the fp64 oracle before the figure counts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from undivided import masks
from undivided.functional import attention, explain
from undivided.request.normalise import normalise
from undivided.request.request import Request
from undivided.verification.sample import build_sample

__all__ = ["LENGTHS", "memory"]

LENGTHS = (16 * 1024, 64 * 1024)
QUICK_LENGTHS = (4 * 1024, 16 * 1024)
HEAD_SIZE = 32
GROWTH = 1.25
"""Largest growth of the memory relative to that of the length: 1 is proportional."""

_PROGRAM = """
import json, sys
from undivided.benchmarking.memory import measure
print(json.dumps(measure(int(sys.argv[1]), sys.argv[2])))
"""


def memory(
    lengths: Sequence[int] = LENGTHS, dtype: str = "float32", step: Callable[[str], None] = lambda _: None
) -> list[dict[str, Any]]:
    """The resident memory that causal self-attention of one head adds, for each length, and its growth with the length.

    Raises:
        RuntimeError: a process failed, its output was wrong, or this is not Linux.
    """
    if sys.platform != "linux":
        raise RuntimeError("peak memory is read from /proc, which only Linux has")
    rows: list[dict[str, Any]] = []
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    for length in lengths:
        step(f"memory: {length} tokens")
        command = [sys.executable, "-c", _PROGRAM, str(length), dtype]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if done.returncode:
            raise RuntimeError(f"{length} tokens: {done.stderr.strip().splitlines()[-1]}")
        row = json.loads(done.stdout)
        if rows:
            growth = row["bytes"] / rows[0]["bytes"] * rows[0]["tokens"] / length
            row |= {"growth": growth, "met": growth <= GROWTH}
        rows.append(row)
    return rows


def measure(length: int, dtype: str) -> dict[str, Any]:
    """The figures of one length, measured in this process, which should do nothing else."""

    def once(length: int) -> tuple[int, list[Tensor], Tensor]:
        q, k, v, grad = (torch.randn(1, 1, length, HEAD_SIZE).to(getattr(torch, dtype)) for _ in range(4))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        before = _reset_peak()
        out = attention(*leaves, layout="bhsd", mask=masks.causal())
        gradients = torch.autograd.grad(out, leaves, grad)
        assert len(gradients) == 3  # kept until the peak is read
        return _peak() - before, leaves, out.detach()

    once(64)  # loads libraries and starts threads
    added, leaves, out = once(length)
    with torch.no_grad():
        call, inputs = normalise(Request.from_keywords(*leaves, layout="bhsd", mask=masks.causal()))
    sample = build_sample(call, inputs, None)
    error, budget = sample.error("out", out), sample.max_errors["out"]
    if not sample.met("out", out):
        raise RuntimeError(f"the output is wrong: error {error:.1e}, allowed {budget:.1e}")
    tensors = 4 * length * HEAD_SIZE * out.element_size()
    backend = explain(*leaves, layout="bhsd", mask=masks.causal()).backend.name
    return {
        "tokens": length,
        "dtype": dtype,
        "backend": backend,
        "bytes": added,
        "bytes_a_token": added / length,
        "tensors": tensors,
        "error": error,
        "budget": budget,
    }


def _reset_peak() -> int:
    """Reset the peak of the resident bytes to their present number, and return that.

    Source: proc_pid_clear_refs(5): writing 5 resets the peak to the resident size.
    """
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _status("VmRSS")


def _peak() -> int:
    """The peak of the resident bytes since `_reset_peak`."""
    return _status("VmHWM")


def _status(name: str) -> int:
    """A number of bytes that Linux reports about this process."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith(f"{name}:"))

"""Peak resident memory of a forward and a backward over long sequences, each in a process of its own.

The output is checked against the fp64 oracle on a sample of its rows before the figure counts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from undivided import masks
from undivided._problem import normalise
from undivided.functional import attention, explain
from undivided.verification.sample import sample_of

__all__ = ["LENGTHS", "memory"]

LENGTHS = (16 * 1024, 64 * 1024)
QUICK_LENGTHS = (4 * 1024, 16 * 1024)
HEAD_SIZE = 32
GROWTH = 1.25
"""Memory of the longer sequence over that of the shorter, relative to the lengths, at most: 1 is proportional."""


def memory(
    lengths: Sequence[int] = LENGTHS, dtype: str = "float32", step: Callable[[str], None] = lambda _: None
) -> list[dict[str, Any]]:
    """What causal self-attention of one head adds to the resident memory, for each length, and whether that grows with it.

    Raises:
        RuntimeError: a process failed, or its output was wrong.
    """
    rows: list[dict[str, Any]] = []
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    for length in lengths:
        step(f"memory: {length} tokens")
        command = [sys.executable, "-m", "undivided.benchmarking.memory", str(length), dtype]
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
    """Run once in this process, which should do nothing else."""
    import resource  # not on Windows

    def once(length: int) -> tuple[Any, ...]:
        q, k, v, grad = (torch.randn(1, 1, length, HEAD_SIZE).to(getattr(torch, dtype)) for _ in range(4))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        out = attention(*leaves, layout="bhsd", mask=masks.causal())
        found = torch.autograd.grad(out, leaves, grad)
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return before, after, leaves, out.detach(), found

    once(64)  # what is loaded and started once
    before, after, leaves, out, _ = once(length)
    with torch.no_grad():
        problem, operands = normalise(*leaves, layout="bhsd", mask=masks.causal())
    sample = sample_of(problem, operands, None)
    error, budget = sample.error("out", out), sample.allowed["out"]
    if not error <= budget:
        raise RuntimeError(f"the output is wrong: error {error:.1e} where {budget:.1e} is allowed")
    tensors = 8 * length * HEAD_SIZE * out.element_size()
    backend = explain(*leaves, layout="bhsd", mask=masks.causal()).backend.name
    return {"tokens": length, "dtype": dtype, "backend": backend, "bytes": (after - before) * 1024,
            "bytes_a_token": (after - before) * 1024 / length, "tensors": tensors,
            "error": error, "budget": budget}  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]), sys.argv[2])))

"""`Benchmark`, one problem to time, `Goal`, its targets, and `Absent`, why a competitor does not take part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from undivided.verification.cases import Case

FLOAT, BFLOAT, HALF = torch.float32, torch.bfloat16, torch.float16
DTYPES: Mapping[str, torch.dtype] = MappingProxyType({"fp32": FLOAT, "bf16": BFLOAT, "fp16": HALF})
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Absent(Exception):
    """The reason why a competitor does not take part in a benchmark."""


@dataclass(frozen=True)
class Goal:
    """The targets of a benchmark; None is no target.

    Attributes:
        fraction: of the peak, or of the read rate.
        faster: (competitor, speedup over it). It counts only on machines where it needs no more than the peak: the
            speedups were set with AVX-512, and with AVX2 PyTorch is nearer to its peak.
        within: largest ratio to the time of the same problem without its feature.
        allowance: (largest ratio to PyTorch's time, seconds on top).
        pairs: largest ratio to the time of the problem without its mask, scaled by the pairs that the mask allows.
        best: largest ratio to the time of the fastest competitor.
        kernel: fraction of the peak that our own kernel reaches, even if another backend was chosen.
        kernel_faster: (competitor, speedup over it) of our own kernel.
    """

    fraction: float | None = None
    faster: tuple[tuple[str, float], ...] = ()
    within: float | None = None
    allowance: tuple[float, float] | None = None
    pairs: float | None = None
    best: float | None = None
    kernel: float | None = None
    kernel_faster: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Benchmark:
    """One problem to time.

    Attributes:
        suite, case, dtype: the problem.
        backward: time the backward alone, instead of the forward alone.
        without: the same problem without the feature of the case, timed in the same run.
        goal: the targets.
        reads: `Goal.fraction` is of the read rate, not of the arithmetic peak.
        quick: whether ``--quick`` runs it.
        batch_invariant: the results must not depend on the batch.
    """

    suite: str
    case: Case
    dtype: torch.dtype
    backward: bool = False
    without: Case | None = None
    goal: Goal = Goal()
    reads: bool = False
    quick: bool = False
    batch_invariant: bool = False

    @property
    def name(self) -> str:
        """The dtype and the name of the case, such as ``bf16-d128-2048-causal``."""
        return f"{_NAMES[self.dtype]}-{self.case.name}"


BACKWARD = "-backward"
"""The suffix of the names of cases that time a backward alone."""


def backward_of(case: Case) -> Case:
    """The same problem, named as a backward, in which every tensor that can have a gradient needs one."""
    return replace(case, name=f"{case.name}{BACKWARD}", needs=None)


def decoding(name: str, batch: int, keys: int, **rest: Any) -> Case:
    """One query per sequence over a cache, with 32 heads on 8, of size 128, if `rest` does not change them."""
    sizes: dict[str, Any] = {"batch": batch, "q_len": 1, "kv_len": keys, "heads": 32, "kv_heads": 8, "qk_dim": 128}
    return Case(name, needs=(), **{**sizes, **rest})

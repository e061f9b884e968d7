"""Limits and reasons that several backends for GPUs share."""

from __future__ import annotations

import torch

from undivided.machine import Machine, format_version
from undivided.request.problem import Problem

HALF = frozenset({torch.float16, torch.bfloat16})

Capability = tuple[int, int]


def capability_name(capability: Capability) -> str:
    """``(9, 0)`` -> ``"compute capability 9.0"``."""
    return f"compute capability {format_version(capability)}"


def no_gpu(machine: Machine) -> str | None:
    """Why no CUDA kernel runs on this machine; None if one may."""
    if machine.hip:
        return "an AMD GPU (these limits are NVIDIA's; the triton backend runs there)"
    if machine.compute_capability is None:
        return "no CUDA device"
    return None


def hip_reasons(problem: Problem, machine: Machine) -> list[str]:
    """The reason against an AMD GPU, as a list."""
    return [reason] if machine.hip and problem.device == "cuda" and (reason := no_gpu(machine)) else []


def size_reasons(problem: Problem) -> list[str]:
    """Reasons against sizes of 0, which GPU kernels do not support and the reference does."""
    sizes = {"batch": problem.batch, "query length": problem.q_len, "key length": problem.kv_len}
    if problem.documents is not None:
        sizes["number of documents"] = problem.documents[0]
    return [f"{name} 0 (min 1)" for name, size in sizes.items() if size == 0]

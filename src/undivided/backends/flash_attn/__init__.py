"""`flash_attn`: Tri Dao's FlashAttention packages, versions 2, 3 and 4.

Versions 2 (`flash-attn`), 3 (`flash-attn-3`, Hopper) and 4 (`flash-attn-4`) are separate packages with separate limits;
each is a `_Version` below. `_in_order` has the order of preference on each GPU; the first version that has no reason
against the problem runs.

All three align causal masks and windows bottom-right (FlashAttention's changelog, 2.1). Limits: `flash_attn_rules`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

from torch import Tensor

from undivided.arguments.tensors import materialise
from undivided.backends._base import Backend, Gradients, Limits, limit_reasons
from undivided.backends.flash_attn import version_2, version_3, version_4
from undivided.backends.shared import flash_attn_rules, gpu_rules
from undivided.machine import Machine
from undivided.request.call import Call
from undivided.request.problem import Problem
from undivided.request.request import Tensors
from undivided.request.result import Result


@dataclass(frozen=True, eq=False)
class _Version:
    """One of the packages: its limits, the rules that they cannot express, and the module that calls it."""

    number: int
    limits: Limits
    extra_reasons: Callable[[Problem, Machine], list[str]]
    calls: ModuleType

    def reasons(self, problem: Problem, machine: Machine) -> list[str]:
        """The limits, then the rules that they cannot express."""
        reasons = limit_reasons(self.limits, problem, machine)
        if machine.compute_capability is not None:
            reasons += self.extra_reasons(problem, machine)
        return reasons


_VERSION_2 = _Version(2, flash_attn_rules.LIMITS_2, flash_attn_rules.extra_reasons_2, version_2)
_VERSION_3 = _Version(3, flash_attn_rules.LIMITS_3, flash_attn_rules.extra_reasons_3, version_3)
_VERSION_4 = _Version(4, flash_attn_rules.LIMITS_4, flash_attn_rules.extra_reasons_4, version_4)


def _in_order(machine: Machine) -> tuple[_Version, ...]:
    """The versions to try on this GPU, the one written for it first."""
    major = (machine.compute_capability or (0, 0))[0]
    return {9: (_VERSION_3, _VERSION_4, _VERSION_2), 10: (_VERSION_4, _VERSION_2), 11: (_VERSION_4, _VERSION_2)}.get(
        major, (_VERSION_2, _VERSION_4)
    )


class FlashAttn(Backend):
    """The flash-attn packages."""

    name = "flash_attn"
    family = "flash"
    summary = "FlashAttention 2, 3 and 4, if the packages are installed"
    how_to_get = "pip install flash-attn (Ampere and later), flash-attn-3 (Hopper) or flash-attn-4 (Hopper, Blackwell)"
    limits = _VERSION_2.limits

    def unavailable(self, machine: Machine) -> str | None:
        """The reason if there is no GPU or none of the packages; otherwise None."""
        installed = any(
            machine.version(name)
            for version in (_VERSION_2, _VERSION_3, _VERSION_4)
            for name, *_ in version.limits.packages
        )
        return gpu_rules.no_gpu(machine) or (
            None if installed else "none of flash-attn, flash-attn-3 and flash-attn-4 is installed"
        )

    def reasons(self, problem: Problem, machine: Machine) -> list[str]:
        """No reason if one version can run it; else those of each installed version, or of the preferred one if none is
        installed."""
        common = gpu_rules.hip_reasons(problem, machine) + gpu_rules.size_reasons(problem)
        if problem.device != "cuda":
            return [f"device={problem.device} (runs on cuda)"]
        reasons_by_version = {version: version.reasons(problem, machine) for version in _in_order(machine)}
        if not common and any(not reasons for reasons in reasons_by_version.values()):
            return []
        installed = [v for v in reasons_by_version if any(machine.version(name) for name, *_ in v.limits.packages)]
        shown = installed or list(reasons_by_version)[:1]
        return common + [f"flash-attn {v.number}: {reason}" for v in shown for reason in reasons_by_version[v]]

    def forward(self, call: Call, tensors: Tensors) -> Result:
        """Attention by the version that fits."""
        return self._pick(call, tensors).calls.forward(call, tensors.materialised())  # type: ignore[no-any-return]

    def backward(
        self, call: Call, tensors: Tensors, result: Result, grad_out: Tensor, grad_lse: Tensor | None
    ) -> Gradients:
        """Gradients by the version that fits."""
        calls = self._pick(call, tensors).calls
        return calls.backward(call, tensors.materialised(), result, materialise(grad_out), grad_lse)  # type: ignore[no-any-return]

    def _pick(self, call: Call, tensors: Tensors) -> _Version:
        """The version that runs; the same for forward and backward, which have the same problem."""
        return _first_that_fits(call.problem, Machine.this(tensors.q.device))


@functools.lru_cache(1024)
def _first_that_fits(problem: Problem, machine: Machine) -> _Version:
    """The version that runs a problem which has no reason against all of them."""
    return next(version for version in _in_order(machine) if not version.reasons(problem, machine))


BACKEND = FlashAttn()

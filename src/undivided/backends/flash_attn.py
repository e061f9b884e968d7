"""`flash_attn`: Tri Dao's FlashAttention packages, versions 2, 3 and 4, whichever is installed and fits.

Versions 2 (`flash-attn`), 3 (`flash-attn-3`, Hopper) and 4 (`flash-attn-4`) are separate packages with separate limits;
each is a `_Version` below. The first one, in the order that suits the GPU, without a reason against it runs.

All three align causal masks and windows bottom-right (FlashAttention's changelog, 2.1). Source of the limits:
Dao-AILab/flash-attention (csrc/flash_attn/flash_api.cpp, hopper/flash_api.cpp, flash_attn/cute/interface.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

from torch import Tensor

from undivided._machine import Machine
from undivided._problem import Operands, Problem
from undivided._result import Result
from undivided.backends import _flash_attn_2, _flash_attn_3, _flash_attn_4, _gpu
from undivided.backends._base import Backend, Gradients, Limits, limit_reasons

_NO_DROPOUT = {"dropout": "it draws its own pattern"}


@dataclass(frozen=True, eq=False)
class _Version:
    """One of the packages: its limits, what they cannot say, and the module that calls it."""

    number: int
    limits: Limits
    more: Callable[[Problem, Machine], list[str]]
    calls: ModuleType

    def reasons(self, problem: Problem, machine: Machine) -> list[str]:
        """The limits, then what they cannot say."""
        found = limit_reasons(self.limits, problem, machine)
        if machine.compute_capability is not None:
            found += self.more(problem, machine)
        return found


def _more_2(problem: Problem, machine: Machine) -> list[str]:
    found = _gpu.large_head_reasons(problem, machine)
    version, capability = machine.version("flash_attn"), machine.compute_capability
    if capability is not None and capability >= (10, 0) and version is not None and version < (2, 8):
        found.append(
            f"compute capability {_gpu.capability_text(machine)} (flash_attn before 2.8 is built for 8.x and 9.0)"
        )
    cached = problem.mask.kinds & {"lengths"} or "paged" in problem.features
    if cached and "backward" in problem.features:
        found.append(
            "gradients with per-sequence lengths (its backward has no argument for them; pack them as documents)"
        )
    if problem.page_size is not None and problem.page_size % 256:
        found.append(f"page_size={problem.page_size} (must be a multiple of 256)")
    if "paged" in problem.features and problem.packed:
        found.append("paged keys with packed queries (dense queries only)")
    return found


def _more_3(problem: Problem, machine: Machine) -> list[str]:
    found = []
    qk, v = problem.qk_dim, problem.v_dim
    if qk != v and not ((128 < qk <= 192 and 96 < v <= 128) or (qk <= 64 and v <= 512)):
        found.append(
            f"head_dim={qk} with value_dim={v} (129 to 192 with 97 to 128, or up to 64 with up to 512)"
        )
    if qk > 256 or qk == v > 256:
        found.append(f"head_dim={qk} (max 256)")
    if qk != v and "backward" in problem.features:
        found.append(f"gradients for head_dim={qk} with value_dim={v} (equal sizes only)")
    if problem.deterministic and "backward" in problem.features and max(qk, v) > 192:
        found.append(f"deterministic gradients for head_dim={max(qk, v)} (max 192)")
    return found


def _more_4(problem: Problem, machine: Machine) -> list[str]:
    found = _sizes_4(problem, machine)
    major = (machine.compute_capability or (0, 0))[0]
    backward = "backward" in problem.features
    on = _gpu.capability_text(machine)
    if backward and major == 8:
        found.append(f"gradients on compute capability {on} (min 9.0)")
    if backward and problem.deterministic and major == 12:
        found.append(f"deterministic gradients on compute capability {on} (below 12.0)")
    if "sinks" in problem.features:
        if backward and major == 12:
            found.append(f"gradients with sinks on compute capability {on} (9.x, 10.x and 11.x)")
        if problem.features & {"lse", "lse_grad"}:
            found.append("the log-sum-exp returned with sinks (its own contains them)")
    return found


def _sizes_4(problem: Problem, machine: Machine) -> list[str]:
    """Head sizes of version 4 by architecture (`_validate_head_dims`); 8.x and 12.x are held to the standard range."""
    major, sizes = (machine.compute_capability or (0, 0))[0], (problem.qk_dim, problem.v_dim)
    text = f"head_dim={sizes[0]}" + (f", value_dim={sizes[1]}" if sizes[0] != sizes[1] else "")
    on = _gpu.capability_text(machine)
    if major == 9:
        return [f"{text} (max 256 on compute capability {on})"] if max(sizes) > 256 else []
    special = {(192, 128), (256, 256)} if major in (10, 11) else set()
    if max(sizes) <= 128 or sizes in special:
        if sizes == (256, 256) and (unfit := problem.features & {"softcap", "sinks", "lse_grad"}):
            return [f"{text} with {', '.join(sorted(unfit))} on compute capability {on}"]
        return []
    return [f"{text} (max 128{', or 192/128 or 256' if special else ''} on compute capability {on})"]


_2 = _Version(
    2,
    Limits(
        devices=frozenset({"cuda"}),
        dtypes=_gpu.HALF,
        max_head_dim=256,
        head_dim_multiple=8,
        masks=frozenset({"causal", "window", "documents", "lengths"}),
        alignments=frozenset({"bottom_right"}),
        features=frozenset({"backward", "gqa", "lse", "alibi", "softcap", "paged"}),
        compute_capability=((8, 0), (12, 1)),
        # 2.7.3: the functions below it take the window as two arguments and return four results
        packages=(("flash_attn", (2, 7, 3), (3,)),),
        notes=_NO_DROPOUT
        | {"lse_grad": "it returns lse as a constant", "value_dim": "flash-attn 3 and 4 have some"},
    ),
    _more_2,
    _flash_attn_2,
)
_3 = _Version(
    3,
    Limits(
        devices=frozenset({"cuda"}),
        dtypes=_gpu.HALF,
        head_dim_multiple=8,
        masks=frozenset({"causal", "window", "documents"}),
        alignments=frozenset({"bottom_right"}),
        features=frozenset({"backward", "gqa", "lse", "softcap", "value_dim"}),
        compute_capability=((9, 0), (9, 0)),
        packages=(("flash_attn_3", (3,), (4,)),),
        notes=_NO_DROPOUT | {"lse_grad": "it returns lse as a constant"},
    ),
    _more_3,
    _flash_attn_3,
)
_4 = _Version(
    4,
    Limits(
        devices=frozenset({"cuda"}),
        dtypes=_gpu.HALF,
        head_dim_multiple=8,
        masks=frozenset({"causal", "window", "documents"}),
        alignments=frozenset({"bottom_right"}),
        features=frozenset(
            {"backward", "gqa", "lse", "lse_grad", "softcap", "sinks", "sinks_grad", "value_dim"}
        ),
        compute_capability=((8, 0), (12, 1)),
        packages=(("flash_attn_4", (4,), (5,)),),
        notes=_NO_DROPOUT,
    ),
    _more_4,
    _flash_attn_4,
)


def _in_order(machine: Machine) -> tuple[_Version, ...]:
    """The versions to try on this GPU: each where it was written for first."""
    major = (machine.compute_capability or (0, 0))[0]
    return {9: (_3, _4, _2), 10: (_4, _2), 11: (_4, _2)}.get(major, (_2, _4))


class FlashAttn(Backend):
    """The flash-attn packages."""

    name = "flash_attn"
    family = "flash"
    summary = "FlashAttention 2, 3 and 4, where the packages are installed"
    how_to_get = (
        "pip install flash-attn (Ampere and later), flash-attn-3 (Hopper) or flash-attn-4 (Hopper, Blackwell)"
    )
    limits = _2.limits

    def rank(self, problem: Problem, machine: Machine) -> float:
        """By the table in `_gpu`."""
        return _gpu.rank(self.name, machine)

    def unavailable(self, machine: Machine) -> str | None:
        """No GPU, no package, or neither."""
        installed = any(
            machine.version(name) for version in (_2, _3, _4) for name, *_ in version.limits.packages
        )
        return _gpu.no_gpu(machine) or (
            None if installed else "none of flash-attn, flash-attn-3 and flash-attn-4 is installed"
        )

    def reasons(self, problem: Problem, machine: Machine) -> list[str]:
        """None where one version has none; otherwise each installed version's, or what there is to install."""
        common = _gpu.hip_reasons(problem, machine) + _gpu.size_reasons(problem)
        if problem.device != "cuda":
            return [f"device={problem.device} (runs on cuda)"]
        against = {version: version.reasons(problem, machine) for version in _in_order(machine)}
        if not common and any(not reasons for reasons in against.values()):
            return []
        installed = [v for v in against if any(machine.version(name) for name, *_ in v.limits.packages)]
        shown = installed or list(against)[:1]
        return common + [f"flash-attn {v.number}: {reason}" for v in shown for reason in against[v]]

    def forward(self, problem: Problem, operands: Operands) -> Result:
        """Attention by the version that fits."""
        return self._pick(problem, operands).calls.forward(problem, operands)  # type: ignore[no-any-return]

    def backward(
        self, problem: Problem, operands: Operands, result: Result, grad_out: Tensor, grad_lse: Tensor | None
    ) -> Gradients:
        """Gradients by the version that fits."""
        calls = self._pick(problem, operands).calls
        return calls.backward(problem, operands, result, grad_out, grad_lse)  # type: ignore[no-any-return]

    def _pick(self, problem: Problem, operands: Operands) -> _Version:
        """The version that runs here: the same for forward and backward, because both ask with the same problem."""
        machine = Machine.this(operands.q.device)
        return next(version for version in _in_order(machine) if not version.reasons(problem, machine))


BACKEND = FlashAttn()

"""What FlashAttention 2, 3 and 4 can run, as limits and reasons: as packages, and 3 and 4 activated in PyTorch.

Source: Dao-AILab/flash-attention (csrc/flash_attn/flash_api.cpp, hopper/flash_api.cpp, flash_attn/cute/interface.py);
TransformerEngine 2.20 (pytorch/attention/dot_product_attention/utils.py) for windows with head size 256 in version 4.
"""

from __future__ import annotations

from undivided.backends._base import Limits
from undivided.backends.shared.gpu_rules import HALF, capability_name
from undivided.machine import Machine
from undivided.request.problem import Problem

_NO_DROPOUT = {"dropout": "it draws its own pattern"}


def large_head_reasons(problem: Problem, machine: Machine) -> list[str]:
    """FlashAttention-2's backward runs out of shared memory on sm86-sm89 and sm12x for head sizes in (192, 224]."""
    capability = machine.compute_capability
    if capability is None or "backward" not in problem.features or not 192 < problem.qk_dim <= 224:
        return []
    if not ((8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1)):
        return []
    text = f"gradients on {capability_name(capability)} only up to 192 or above 224"
    return [f"head_dim={problem.qk_dim} ({text})"]


def extra_reasons_2(problem: Problem, machine: Machine) -> list[str]:
    """The rules of version 2 that `LIMITS_2` cannot express."""
    reasons = large_head_reasons(problem, machine)
    version, capability = machine.version("flash_attn"), machine.compute_capability
    if capability is not None and capability >= (10, 0) and version is not None and version < (2, 8):
        reasons.append(f"{capability_name(capability)} (flash_attn before 2.8 is built for 8.x and 9.0)")
    cached = problem.mask.kinds & {"lengths"} or "paged" in problem.features
    if cached and "backward" in problem.features:
        reasons.append(
            "gradients with per-sequence lengths (its backward has no argument for them; pack them as documents)"
        )
    if {"alibi", "lse"} <= problem.features and problem.mask.right == 0:
        reasons.append("the log-sum-exp of ALiBi under a causal mask (it adds slope * j, and no term of the row)")
    if cached and problem.mask.left is not None:
        reasons.append("windows with per-sequence lengths or pages (a NaN in a key before the window reaches results)")
    if problem.page_size is not None and problem.page_size % 256:
        reasons.append(f"page_size={problem.page_size} (must be a multiple of 256)")
    if "paged" in problem.features and problem.packed:
        reasons.append("paged keys with packed queries (dense queries only)")
    return reasons


def extra_reasons_3(problem: Problem, machine: Machine) -> list[str]:
    """The rules of version 3 that `LIMITS_3` cannot express."""
    reasons = []
    qk, v = problem.qk_dim, problem.v_dim
    if qk != v and not ((128 < qk <= 192 and 96 < v <= 128) or (qk <= 64 and v <= 512)):
        reasons.append(f"head_dim={qk} with value_dim={v} (129 to 192 with 97 to 128, or up to 64 with up to 512)")
    if qk > 256 or qk == v > 256:
        reasons.append(f"head_dim={qk} (max 256)")
    if qk != v and "backward" in problem.features:
        reasons.append(f"gradients for head_dim={qk} with value_dim={v} (equal sizes only)")
    if problem.deterministic and "backward" in problem.features and max(qk, v) > 192:
        reasons.append(f"deterministic gradients for head_dim={max(qk, v)} (max 192)")
    return reasons


def extra_reasons_4(problem: Problem, machine: Machine) -> list[str]:
    """The rules of version 4 that `LIMITS_4` cannot express."""
    reasons = _sizes_4(problem, machine)
    capability = machine.compute_capability or (0, 0)
    major, on = capability[0], f"on {capability_name(capability)}"
    backward = "backward" in problem.features
    if backward and major == 8:
        reasons.append(f"gradients {on} (min 9.0)")
    if backward and problem.deterministic and major == 12:
        reasons.append(f"deterministic gradients {on} (below 12.0)")
    if "sinks" in problem.features:
        if backward and major == 12:
            reasons.append(f"gradients with sinks {on} (9.x, 10.x and 11.x)")
        if problem.features & {"lse", "lse_grad"}:
            reasons.append("the log-sum-exp returned with sinks (its own contains them)")
    return reasons


def _sizes_4(problem: Problem, machine: Machine) -> list[str]:
    """Head sizes of version 4 by architecture (`_validate_head_dims`); on 8.x and 12.x only the standard range."""
    capability, sizes = machine.compute_capability or (0, 0), (problem.qk_dim, problem.v_dim)
    major, on = capability[0], f"on {capability_name(capability)}"
    text = f"head_dim={sizes[0]}" + (f", value_dim={sizes[1]}" if sizes[0] != sizes[1] else "")
    if major == 9:
        return [f"{text} (max 256 {on})"] if max(sizes) > 256 else []
    special = {(192, 128), (256, 256)} if major in (10, 11) else set()
    if max(sizes) <= 128 or sizes in special:
        unfit = (problem.features & {"softcap", "sinks", "lse_grad"}) | (problem.mask.kinds & {"window"})
        if sizes == (256, 256) and unfit:
            return [f"{text} with {', '.join(sorted(unfit))} {on}"]
        return []
    return [f"{text} (max 128{', or 192/128 or 256' if special else ''} {on})"]


LIMITS_2 = Limits(
    devices=frozenset({"cuda"}),
    dtypes=HALF,
    max_head_dim=256,
    head_dim_multiple=8,
    masks=frozenset({"causal", "window", "documents", "lengths"}),
    alignments=frozenset({"bottom_right"}),
    features=frozenset({"backward", "gqa", "lse", "alibi", "softcap", "paged"}),
    compute_capability=((8, 0), (12, 1)),
    # 2.7.3: the functions below it take the window as two arguments and return four results
    packages=(("flash_attn", (2, 7, 3), (3,)),),
    notes=_NO_DROPOUT | {"lse_grad": "it returns lse as a constant", "value_dim": "flash-attn 3 and 4 have some"},
)
LIMITS_3 = Limits(
    devices=frozenset({"cuda"}),
    dtypes=HALF,
    head_dim_multiple=8,
    masks=frozenset({"causal", "window", "documents"}),
    alignments=frozenset({"bottom_right"}),
    features=frozenset({"backward", "gqa", "lse", "softcap", "value_dim"}),
    compute_capability=((9, 0), (9, 0)),
    packages=(("flash_attn_3", (3,), (4,)),),
    notes=_NO_DROPOUT | {"lse_grad": "it returns lse as a constant"},
)
LIMITS_4 = Limits(
    devices=frozenset({"cuda"}),
    dtypes=HALF,
    head_dim_multiple=8,
    masks=frozenset({"causal", "window", "documents"}),
    alignments=frozenset({"bottom_right"}),
    features=frozenset({"backward", "gqa", "lse", "lse_grad", "softcap", "sinks", "sinks_grad", "value_dim"}),
    compute_capability=((8, 0), (12, 1)),
    packages=(("flash_attn_4", (4,), (5,)),),
    notes=_NO_DROPOUT,
)

"""What each version of cuDNN can run, as reasons; for the backends `torch_cudnn` and `cudnn`.

Sources: cudnn-frontend 1.23 (node/sdpa_support_surface.h, node/scaled_dot_product_flash_attention.h) and, for
combinations that the frontend leaves to the execution plans, TransformerEngine 2.20 (common/fused_attn/fused_attn.cpp).
If they differ, the stricter one applies.
"""

from __future__ import annotations

from undivided.backends.shared.gpu_rules import Capability, capability_name, no_gpu
from undivided.machine import Machine, Version, format_version
from undivided.request.problem import Problem

OLDEST: Version = (8, 9, 3)
_BROKEN: dict[Version, str] = {(9, 10, 0): "9.10.2", (9, 10, 1): "9.10.2"}


def unavailable(machine: Machine) -> str | None:
    """Why cuDNN does not run on this machine, whatever the problem; None if it may."""
    return no_gpu(machine) or ("cuDNN is not installed" if machine.version("cudnn") is None else None)


def reasons(problem: Problem, machine: Machine, oldest: Version = OLDEST, *, plain: bool = False) -> list[str]:
    """Every reason why this machine's cuDNN cannot run the problem.

    plain: the caller supports only top-left causal masks and documents, so that rules of other masks are skipped.
    """
    version, capability = machine.version("cudnn"), machine.compute_capability
    if version is None:
        return [f"cuDNN {format_version(oldest)} or later is not installed"]
    if capability is None:
        return []
    reasons = _version_reasons(version, capability, oldest)
    reasons += _length_reasons(problem, version) + _one_query_reasons(problem, version, capability)
    reasons += _head_dim_reasons(problem, version, capability)
    reasons += _packed_reasons(problem, version, capability)
    if plain:
        return reasons
    reasons += _mask_reasons(problem, version, capability)
    return reasons + _determinism_reasons(problem, version, capability)


def cudnn_name(version: Version) -> str:
    """``(9, 8, 0)`` -> ``"cuDNN 9.8.0"``."""
    return f"cuDNN {format_version(version)}"


def _version_reasons(version: Version, capability: Capability, oldest: Version) -> list[str]:
    reasons = []
    if version < oldest:
        reasons.append(f"{cudnn_name(version)} (min {format_version(oldest)})")
    if version[:3] in _BROKEN:
        reasons.append(f"{cudnn_name(version)} computes wrong attention ({_BROKEN[version[:3]]} fixes it)")
    if capability >= (10, 0) and version < (9, 7):
        reasons.append(f"{cudnn_name(version)} on {capability_name(capability)} (min 9.7)")
    elif capability >= (12, 0) and version < (9, 18, 1):
        reasons.append(f"{cudnn_name(version)} on {capability_name(capability)} (min 9.18.1)")
    return reasons


def _length_reasons(problem: Problem, version: Version) -> list[str]:
    reasons = []
    if version < (9, 0) and not problem.packed:
        for name, length in (("query", problem.q_len), ("key", problem.kv_len)):
            if length % 64:
                reasons.append(
                    f"{name} length {length} is not a multiple of 64 ({cudnn_name(version)}; any length from 9.0)"
                )
    if "gqa" in problem.features and version < (8, 9, 7):
        reasons.append(f"fewer key/value heads than query heads ({cudnn_name(version)}; from 8.9.7)")
    if problem.q_len == 1 and version <= (9, 9, 0) and problem.mask.right is not None:
        reasons.append(f"query length 1 under a causal mask or window ({cudnn_name(version)}; after 9.9.0)")
    if problem.q_len == 1 and problem.kv_len == 1 and "backward" in problem.features:
        reasons.append("gradients for query and key length 1 (min 2)")
    if problem.kv_len == 1 and not problem.packed:
        reasons.append("key length 1 (min 2)")
    return reasons


def _one_query_reasons(problem: Problem, version: Version, capability: Capability) -> list[str]:
    """Versions that compute a single query wrongly. Documents are not affected: their length is rounded up to 128.

    Source: PyTorch's guard (native/cudnn/MHA.cpp, `check_cudnn_sdpa_decode`).
    """
    wrong = (9, 19) <= version[:3] <= (9, 25, 0) and version[:3] != (9, 24, 1)
    if not wrong or capability[0] not in (10, 11) or problem.q_len != 1 or problem.documents is not None:
        return []
    return [
        f"one query on {capability_name(capability)} ({cudnn_name(version)} computes wrong attention, as do 9.19 "
        "to 9.25.0 except 9.24.1: pytorch issue 193893)"
    ]


def _head_dim_reasons(problem: Problem, version: Version, capability: Capability) -> list[str]:
    largest = max(problem.qk_dim, problem.v_dim)
    if largest <= 128:
        return []
    if "backward" in problem.features:
        limit = _training_limit(problem, version, capability)
    else:
        limit = _inference_limit(problem, version, capability)
    if limit is None:
        return []
    sizes = f"head_dim={problem.qk_dim}"
    if problem.v_dim != problem.qk_dim:
        sizes += f", value_dim={problem.v_dim}"
    return [f"{sizes} ({limit}; {cudnn_name(version)} on {capability_name(capability)})"]


def _training_limit(problem: Problem, version: Version, capability: Capability) -> str | None:
    sizes = (problem.qk_dim, problem.v_dim)
    if capability[0] == 9:
        if version < (9, 5):
            return "max 128 with gradients, 256 from 9.5"
        if max(sizes) > 256:
            return "max 256 with gradients"
        unequal = sizes[0] != sizes[1] and min(sizes) >= 128 and sizes != (192, 128)
        broken = unequal and version >= (9, 11)
        return "no gradients for unequal sizes of 128 and more except 192/128 from 9.11" if broken else None
    if capability[0] >= 10 and sizes == (192, 128):
        return None if version >= (9, 11) else "192/128 with gradients from 9.11"
    if capability[0] == 10 and sizes == (256, 256):
        needed = (9, 25) if problem.packed else (9, 23)
        return None if version >= needed else f"256 with gradients from {format_version(needed)}"
    return "max 128 with gradients"


def _inference_limit(problem: Problem, version: Version, capability: Capability) -> str | None:
    largest = max(problem.qk_dim, problem.v_dim)
    if version >= (9, 10, 2):
        top_left = problem.mask.right == 0 and problem.align == "top_left"
        return "max 128 for one query under a top-left causal mask" if problem.q_len == 1 and top_left else None
    if capability[0] == 9 and version >= (9, 1):
        return None if largest <= 256 else "max 256, any from 9.10.2"
    if capability[0] >= 10 and version >= (9, 9):
        return None if problem.q_len > 1 else "max 128 for one query, any from 9.10.2"
    return "max 128, any without gradients from 9.10.2"


def _mask_reasons(problem: Problem, version: Version, capability: Capability) -> list[str]:
    mask, reasons = problem.mask, []
    padded = bool(mask.kinds & {"lengths", "documents"})
    if problem.align == "bottom_right" and mask.right is not None:
        reasons += _bottom_right_reasons(problem, version, padded)
        is_refused = mask.left is not None and (problem.q_len == problem.kv_len or padded)
        if capability[0] == 9 and version <= (9, 9, 0) and is_refused:
            reasons.append(
                f"a bottom-right window on {capability_name(capability)} ({cudnn_name(version)}; after 9.9.0)"
            )
    if "window" not in mask.kinds:
        return reasons
    if version < (9, 2):
        reasons.append(f"a sliding window ({cudnn_name(version)}; from 9.2)")
    elif version < (9, 6) and padded:
        reasons.append(f"a sliding window with per-sequence lengths ({cudnn_name(version)}; from 9.6)")
    elif mask.right != 0 and version < (9, 10, 2):
        reasons.append(f"a window that is not causal ({cudnn_name(version)}; from 9.10.2)")
    if not padded and problem.q_len > problem.kv_len:
        reasons.append("a sliding window with more queries than keys (at most as many)")
    if version[:3] == (9, 14, 0) and mask.right != 0 and problem.kv_len > 1024:
        reasons.append("a window that is not causal over more than 1024 keys (cuDNN 9.14.0; 9.14.1 fixes it)")
    return reasons


def _bottom_right_reasons(problem: Problem, version: Version, padded: bool) -> list[str]:
    if version < (9, 3):
        return [f"bottom-right alignment ({cudnn_name(version)}; from 9.3)"]
    if padded and version < (9, 6):
        return [f"bottom-right alignment with per-sequence lengths ({cudnn_name(version)}; from 9.6)"]
    reasons = []
    q_len, kv_len = problem.q_len, problem.kv_len
    if problem.documents is not None and None not in problem.documents:
        q_len, kv_len = problem.documents[1] or 0, problem.documents[2] or 0
    if q_len > kv_len:
        reasons.append("bottom-right alignment with more queries than keys (at most as many)")
    if version < (9, 7):
        for name, length in (("query", q_len), ("key", kv_len)):
            if length % 64:
                reasons.append(
                    f"{name} length {length} is not a multiple of 64 under bottom-right alignment "
                    f"({cudnn_name(version)}; any length from 9.7)"
                )
    return reasons


def _packed_reasons(problem: Problem, version: Version, capability: Capability) -> list[str]:
    if not problem.mask.kinds & {"documents", "padded"}:
        if problem.mask.kinds & {"lengths", "q_lengths"} and version < (8, 9, 6):
            return [f"per-sequence lengths ({cudnn_name(version)}; from 8.9.6)"]
        return []
    reasons = []
    if capability < (9, 0):
        reasons.append(f"packed documents on {capability_name(capability)} (min 9.0)")
    if capability >= (12, 0):  # statistics cannot be packed there
        reasons.append(f"packed documents on {capability_name(capability)} (9.0 to 11.0)")
    if version < (9, 1):
        reasons.append(f"packed documents ({cudnn_name(version)}; from 9.1)")
    elif version < (9, 6):  # before 9.6 offsets and statistics have the layout of a padded batch
        reasons.append(f"packed documents ({cudnn_name(version)}; this library writes them for 9.6 and later)")
    return reasons


def _determinism_reasons(problem: Problem, version: Version, capability: Capability) -> list[str]:
    if not problem.deterministic or "backward" not in problem.features:
        return []
    if capability[0] == 8 or capability[0] >= 12:
        return [f"deterministic gradients on {capability_name(capability)} (9.x, and 10.x from cuDNN 9.18.1)"]
    if capability[0] >= 10 and version < (9, 18, 1):
        return [f"deterministic gradients on {capability_name(capability)} ({cudnn_name(version)}; from 9.18.1)"]
    return []

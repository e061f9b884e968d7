"""Which additions to the scores each cuDNN version supports, as reasons; for the `cudnn` backend.

Sources, as in `cudnn_rules`: cudnn-frontend 1.23 and 1.32, TransformerEngine 2.20 (common/fused_attn/fused_attn.cpp,
fused_attn_f16_arbitrary_seqlen.cu, pytorch/attention/dot_product_attention/utils.py). If they differ, the stricter one
applies.
"""

from __future__ import annotations

from undivided.arguments.tensors import dtype_name
from undivided.backends.shared.cudnn_rules import cudnn_name
from undivided.backends.shared.gpu_rules import Capability, capability_name
from undivided.machine import Machine, Version, format_version
from undivided.request.problem import Problem


def reasons(problem: Problem, machine: Machine) -> list[str]:
    """Every reason why this machine's cuDNN cannot add the problem's bias, ALiBi slopes or sinks to the scores."""
    version, capability = machine.version("cudnn"), machine.compute_capability
    if version is None or capability is None:
        return []
    reasons = []
    if "bias" in problem.features:
        reasons += _bias_reasons(problem, version, capability)
        reasons += _together_reasons("a bias", problem, capability)
    if "alibi" in problem.features:
        reasons += _alibi_reasons(problem, version, capability)
        reasons += _together_reasons("ALiBi slopes", problem, capability)
    if "sinks" in problem.features and "paged" not in problem.features:
        reasons += _sink_reasons(problem, version, machine.version("cudnn_frontend"), capability)
    return reasons


def _bias_reasons(problem: Problem, version: Version, capability: Capability) -> list[str]:
    reasons = []
    if problem.bias_dtype != problem.dtype:
        reasons.append(
            f"a {dtype_name(problem.bias_dtype)} bias with {dtype_name(problem.dtype)} operands (cuDNN takes one dtype)"
        )
    if problem.bias is not None and "1" in problem.bias[2:]:
        reasons.append("a bias broadcast over queries or keys (cuDNN reads one for every pair)")
    if version < (9, 0) and (version < (8, 9, 6) or capability < (9, 0)):
        reasons.append(f"a bias ({cudnn_name(version)} on {capability_name(capability)}; from 9.0)")
    if "bias_grad" in problem.features and version < (9, 5):
        reasons.append(f"the gradient of a bias ({cudnn_name(version)}; this library uses it from 9.5)")
    return reasons


def _alibi_reasons(problem: Problem, version: Version, capability: Capability) -> list[str]:
    reasons = []
    if not problem.usual_slopes:
        reasons.append(
            "ALiBi slopes that are not known to be the usual ones (cuDNN computes those; a bias would be rounded to "
            f"{dtype_name(problem.dtype)}; undivided.alibi_slopes(heads) gives them)"
        )
    if problem.mask.right != 0:
        reasons.append("ALiBi slopes without a causal mask (cuDNN's are signed)")
    if version < (8, 9, 6) or capability < (9, 0):
        reasons.append(f"ALiBi slopes ({cudnn_name(version)} on {capability_name(capability)}; from 8.9.6 on 9.0)")
    if "bias" in problem.features:
        reasons.append("ALiBi slopes together with a bias")
    return reasons


def _sink_reasons(problem: Problem, version: Version, frontend: Version | None, capability: Capability) -> list[str]:
    reasons = []
    oldest = (9, 18) if problem.mask.kinds & {"documents"} else (9, 13, 1)
    if version < oldest:
        packed = " with packed documents" if oldest == (9, 18) else ""
        reasons.append(f"sinks{packed} ({cudnn_name(version)}; from {format_version(oldest)})")
    if frontend is not None and frontend < (1, 19):
        reasons.append("sinks (nvidia-cudnn-frontend from 1.19)")
    if problem.q_len == 1 and not problem.packed:
        reasons.append("sinks for one query (min 2)")
    if problem.features & {"lse", "lse_grad"}:
        reasons.append("the log-sum-exp returned with sinks (cuDNN's contains them)")
    if "backward" in problem.features and capability[0] >= 10 and problem.qk_dim == problem.v_dim == 256:
        reasons.append(f"gradients for head_dim=256 with sinks on {capability_name(capability)}")
    return reasons


def _together_reasons(what: str, problem: Problem, capability: Capability) -> list[str]:
    """What cuDNN combines neither with a bias nor with ALiBi."""
    reasons = []
    if problem.mask.kinds & {"lengths", "q_lengths", "documents", "padded"}:
        reasons.append(f"{what} with per-sequence lengths or packed documents")
    if "window" in problem.mask.kinds:
        reasons.append(f"{what} with a sliding window")
    if problem.align == "bottom_right" and problem.mask.right is not None:
        reasons.append(f"{what} with bottom-right alignment")
    if "backward" in problem.features and capability[0] >= 10:
        if problem.deterministic:
            reasons.append(f"deterministic gradients with {what} on {capability_name(capability)}")
        if problem.qk_dim == problem.v_dim == 256:  # the frontend always runs these deterministically
            reasons.append(f"gradients for head_dim=256 with {what} on {capability_name(capability)}")
    return reasons

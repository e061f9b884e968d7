"""What the adapters of GPU kernels share: default ranks, bands, documents, rows without keys, garbage.

For a row without keys, kernels write a log-sum-exp of +inf, of -inf, or nothing; and in some a NaN in memory that they
mask reaches the result. The specification requires output 0, lse = -inf and no garbage; this file ensures it.

Legend: B batch, S sequence (Sq queries, Sk keys), H query heads, N key/value heads, D head size, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from undivided.arguments import layout
from undivided.machine import Machine, Version, format_version
from undivided.masks import NormalForm
from undivided.masks._parts import Documents
from undivided.request.call import Call
from undivided.request.problem import Problem
from undivided.request.request import Tensors

HALF = frozenset({torch.float16, torch.bfloat16})

# The default ranks, used if nothing was measured (`undivided.selection.measured`): lower first, the reference is 100.
# Sources:
# - sm90 and sm10x: PyTorch puts cuDNN before flash if cuDNN is later than 9.15.0 (aten, cuda/sdp_utils.cpp,
#   check_prefer_cudnn_attention), and TransformerEngine drops flash if cuDNN can run (get_attention_backend).
# - elsewhere flash first: PyTorch's default order, and TransformerEngine's below sm90.
# - the flash-attn package before PyTorch's copy of the same kernel, which is older; efficient after flash, which is
#   "universally faster" (sdp_utils.cpp).
# - flex last, because it is the most general.
_CUDNN_FIRST = {
    "cudnn": 10,
    "torch_cudnn": 12,
    "flash_attn": 14,
    "torch_flash": 16,
    "triton": 50,
    "torch_efficient": 40,
    "flex": 60,
}
_FLASH_FIRST = {
    "flash_attn": 10,
    "torch_flash": 12,
    "torch_cudnn": 16,
    "cudnn": 18,
    "triton": 50,
    "torch_efficient": 40,
    "flex": 60,
}
_CUDNN_FIRST_AFTER: Version = (9, 15, 0)
_RANK_TORCH_CUDNN_SMALL = 9
"""For small problems where cuDNN is first: PyTorch's operator calls the kernels that `cudnn` calls
from Python. A causal call of 128 tokens took the host 67 us, through `cudnn` 116, and 613 and 1089 with its gradient
(H200)."""
_RANK_TORCH_CUDNN_DOCUMENTS = 55
"""For packed documents: its host time is 48 ms per call with 3 of them; of torch_flash .17 ms (H200, PyTorch 2.11)."""
_SMALL = 2e10
"""Floating-point operations of a forward, without a mask, that takes the GPU less time than the host takes to call it:
about 40 us."""
_RANK_TRITON_PADDED = 8
"""On sm90, if tokens may lie outside all sequences: it neither copies inputs to clear them, as for cuDNN,
nor clears rows of the output. Measured on an H100, 16 causal documents of 1024 tokens, 16 heads of 128: 0.21 ms, with
cuDNN 0.77 ms (its kernel alone 0.17), with torch_flash 0.44 ms (0.33)."""


def rank(name: str, problem: Problem, machine: Machine) -> float:
    """The default rank of this backend for a problem on this machine."""
    capability, cudnn = machine.compute_capability, machine.version("cudnn")
    hopper = capability is not None and capability[0] == 9
    if name == "triton" and hopper and problem.q_len > 1 and problem.mask.kinds & _MAY_HOLD_GARBAGE:
        return _RANK_TRITON_PADDED
    prefer = capability is not None and capability[0] in (9, 10) and cudnn is not None and cudnn > _CUDNN_FIRST_AFTER
    if name == "torch_cudnn" and problem.documents is not None:
        return _RANK_TORCH_CUDNN_DOCUMENTS
    if name == "torch_cudnn" and prefer and _is_small(problem):
        return _RANK_TORCH_CUDNN_SMALL
    return (_CUDNN_FIRST if prefer else _FLASH_FIRST)[name]


def _is_small(problem: Problem) -> bool:
    """Whether the host's time decides: few pairs of queries and keys, not decoded."""
    # lengths are rounded up to powers of two: see `Backend.reasons`
    q_bits, kv_bits = (problem.q_len - 1).bit_length(), (problem.kv_len - 1).bit_length()
    pairs = problem.batch * problem.heads << q_bits << kv_bits
    return problem.q_len > 1 and 2 * pairs * (problem.qk_dim + problem.v_dim) < _SMALL


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


def large_head_reasons(problem: Problem, machine: Machine) -> list[str]:
    """FlashAttention-2's backward runs out of shared memory on sm86-sm89 and sm12x for head sizes in (192, 224]."""
    capability = machine.compute_capability
    small = capability is not None and ((8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1))
    if small and "backward" in problem.features and 192 < problem.qk_dim <= 224:
        text = f"gradients on compute capability {capability_text(machine)} only up to 192 or above 224"
        return [f"head_dim={problem.qk_dim} ({text})"]
    return []


def capability_text(machine: Machine) -> str:
    """The compute capability for a reason, "8.0"."""
    return format_version(machine.compute_capability or ())


def flash_band(call: Call) -> tuple[bool, int, int]:
    """(causal, left, right) in the convention of flash-attn: -1 is unbounded, causal is the window (-1, 0)."""
    left, right = call.mask.band
    return (left is None and right == 0), -1 if left is None else left, -1 if right is None else right


def documents(call: Call) -> Documents | None:
    """The packed documents of the mask; None if there are none."""
    return next((part for part in call.mask.parts if isinstance(part, Documents)), None)


def offsets(tensor: Tensor, like: Tensor) -> Tensor:
    """Lengths or cumulative lengths as kernels read them: int32, contiguous, on the device of `like`."""
    return tensor.to(device=like.device, dtype=torch.int32).contiguous()


def longest(problem: Problem) -> tuple[int, int]:
    """The longest query and key length of any document; an upper bound if only the device knows the lengths."""
    _, q, kv = problem.documents or (0, None, None)
    return min(q or problem.q_len, problem.q_len), min(kv or problem.kv_len, problem.kv_len)


def packing(call: Call, tensors: Tensors) -> dict[str, Any]:
    """Cumulative and longest lengths of packed documents, as flash-attn names them; empty for dense sequences."""
    problem = call.problem
    packed = documents(call)
    if packed is None:
        return {}
    max_q, max_k = longest(problem)
    cu_q, cu_k = offsets(packed.cu_seqlens_q, tensors.q), offsets(packed.cu_seqlens_kv, tensors.q)
    return {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": max_q, "max_seqlen_k": max_k}


def views(call: Call, tensors: Tensors) -> tuple[Tensor, ...]:
    """q, k, v as [B, S, H, D], or as [T, H, D] if documents are packed, with aligned rows (`align`)."""
    problem = call.problem
    tokens = tuple(align(layout.canonical(t, problem.layout)) for t in (tensors.q, tensors.k, tensors.v))
    return tokens if documents(call) is None else tuple(t[0] for t in tokens)


def clean_views(call: Call, tensors: Tensors) -> tuple[Tensor, ...]:
    """`views` with 0 where no pair reads them; see `clean_tensors`."""
    if documents(call) is None:
        return views(call, tensors)
    return tuple(t[0] for t in clean_tensors(call, tensors, call.normal_form(tensors.q)))


def has_rows_without_keys(problem: Problem) -> bool:
    """Whether a row may have no key: not under a full mask, nor under a causal mask that always allows one key."""
    if problem.mask.kinds - {"causal", "window"}:
        return True
    return (problem.align == "bottom_right" and problem.q_len > problem.kv_len) or "window" in problem.mask.kinds


_READ_LSE = frozenset({"lse", "backward"})


def fix_empty_rows(
    problem: Problem, out_BSHD: Tensor, lse_BHS: Tensor, form: NormalForm | None
) -> tuple[Tensor, Tensor]:
    """(out, lse) with output 0 and lse = -inf in rows without keys, whatever the kernel wrote there. In place for
    `out`. An lse that nobody reads stays as it is, if no mask leaves a row without keys (form: None)."""
    if form is None and not problem.features & _READ_LSE:
        return out_BSHD, lse_BHS
    lse = lse_BHS.masked_fill(lse_BHS == torch.inf, -torch.inf)
    return (out_BSHD, lse) if form is None else blank(out_BSHD, lse, rows_without_keys(form))


def rows_without_keys(form: NormalForm) -> Tensor:
    """Rows that may attend to nothing, bool [1|B, 1|H, Sq]."""
    empty = ~form.rows_allowed
    return empty if empty.dim() == 3 else empty.unsqueeze(1)


def blank(out_BSHD: Tensor, lse_BHS: Tensor, empty_BHS: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) with output 0 and lse = -inf in these rows, bool [1|B, 1|H, Sq]. In place for `out`."""
    out_BSHD.masked_fill_(_over_rows(empty_BHS), 0.0)
    return out_BSHD, lse_BHS.masked_fill(empty_BHS, -torch.inf)


def closed_rows(call: Call, tensors: Tensors) -> Tensor:
    """Rows whose bias is -inf for every key that the mask allows, bool [1|B, 1|H, Sq].

    For calls without a mask, and for masks whose ranges begin at key 0.
    """
    problem = call.problem
    assert tensors.bias is not None
    is_open = tensors.bias > -torch.inf
    first = torch.where(is_open.any(-1), is_open.to(torch.uint8).argmax(-1), problem.kv_len)
    if not problem.mask.kinds:
        return first == problem.kv_len
    return first >= call.normal_form(tensors.q).ranges[..., 1].unsqueeze(1)


def for_kernel(lse_BHS: Tensor) -> Tensor:
    """The lse as backward kernels need it: +inf if a row has no key, so that exp(score - lse) is 0 and never NaN."""
    return lse_BHS.masked_fill(lse_BHS == -torch.inf, torch.inf).contiguous()


def without_sinks(lse_BHS: Tensor, sinks: Tensor) -> Tensor:
    """The log-sum-exp over keys alone, computed from a kernel's log-sum-exp over keys and sinks [H].

    If the sink outweighs the keys, digits are lost. The round trip through `with_sinks` is exact to rounding, but the
    value itself must not be returned to the caller.
    """
    sink = sinks.to(lse_BHS.dtype).unsqueeze(-1)
    return lse_BHS + torch.log1p(-torch.exp((sink - lse_BHS).clamp(max=0.0)))


def with_sinks(lse_BHS: Tensor, sinks: Tensor) -> Tensor:
    """The log-sum-exp over keys and sinks [H]; rows without keys stay -inf."""
    total = torch.logaddexp(lse_BHS, sinks.to(lse_BHS.dtype).unsqueeze(-1))
    return total.masked_fill(lse_BHS == -torch.inf, -torch.inf)


_MAY_HOLD_GARBAGE = frozenset({"lengths", "q_lengths", "starts", "documents", "padded", "document_ids"})


def used_keys(form: NormalForm) -> Tensor:
    """Keys that lie in the ranges of at least one row, bool [B|1, Sk]; O(S)."""
    steps = torch.zeros(form.ranges.shape[0], form.kv_len + 1, dtype=torch.int32, device=form.ranges.device)
    for column in range(0, form.ranges.shape[-1], 2):
        start, stop = form.ranges[..., column].long(), form.ranges[..., column + 1].long()
        real = (stop > start).int()
        steps.scatter_add_(1, start, real).scatter_add_(1, stop, -real)
    return steps.cumsum(1)[:, :-1] > 0


def clean_tensors(call: Call, tensors: Tensors, form: NormalForm) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as [B, S, H, D], with 0 where no pair reads them, and aligned rows: for kernels that multiply what they
    mask by 0.

    Copies, unless the mask leaves no memory outside the real lengths.
    """
    problem = call.problem
    q, k, v = (align(layout.canonical(t, problem.layout)) for t in (tensors.q, tensors.k, tensors.v))
    if not problem.mask.kinds & _MAY_HOLD_GARBAGE or _nothing_to_clear(call):
        return q, k, v
    unused = ~used_keys(form)[..., None, None]
    return clear_rows(q, form), k.masked_fill(unused, 0.0), v.masked_fill(unused, 0.0)


def clear_rows(rows_BSHD: Tensor, form: NormalForm) -> Tensor:
    """A copy with 0 in the rows that have no key."""
    return rows_BSHD.masked_fill(_over_rows(rows_without_keys(form)), 0.0)


def clear_rows_(rows_BSHD: Tensor, form: NormalForm) -> Tensor:
    """0, in place, in the rows that have no key: kernels do not write their gradients."""
    return rows_BSHD.masked_fill_(_over_rows(rows_without_keys(form)), 0.0)


def _over_rows(marked_BHS: Tensor) -> Tensor:
    return marked_BHS.transpose(1, 2).unsqueeze(-1)


def clear_tail_(grad: Tensor, cu_seqlens: Tensor) -> Tensor:
    """0, in place, for tokens after the last document, which kernels do not write: [.., T, H, D]."""
    tail = torch.arange(grad.shape[-3], device=grad.device) >= cu_seqlens[-1]
    return grad.masked_fill_(tail[:, None, None], 0.0)


def _nothing_to_clear(call: Call) -> bool:
    """Whether every token is in a document with as many queries as keys; known only if the lengths are on the CPU.

    Otherwise a document may have queries and no keys; its rows may hold garbage and share a tile with other documents.
    """
    problem = call.problem
    packed = documents(call)
    if packed is None or problem.mask.kinds & (_MAY_HOLD_GARBAGE - {"documents"}):
        return False
    cu_q, cu_kv = packed.cu_seqlens_q, packed.cu_seqlens_kv
    if cu_q.device.type != "cpu" or cu_kv.device.type != "cpu":
        return False
    same = cu_q is cu_kv or torch.equal(cu_q, cu_kv)
    return same and int(cu_q[-1]) == problem.q_len == problem.kv_len


@contextmanager
def deterministic(problem: Problem) -> Iterator[None]:
    """Sets PyTorch's global determinism flag for one call: its kernels read nothing else."""
    previous = (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
    if not problem.deterministic or previous == (True, False):
        yield
        return
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(previous[0], warn_only=previous[1])


_LOAD_BYTES = 16
"""Bytes that the kernels of cuDNN and FlashAttention load at once, without checking strides or addresses (`align`)."""


def align(tensor: Tensor) -> Tensor:
    """The tensor, or a copy if its rows do not start at multiples of 16 bytes.

    For a misaligned tensor cuDNN returns wrong numbers on SM90 and SM100 and faults on SM80 and SM89. From 1.32 the
    frontend refuses misaligned strides (sdpa_support_surface.h, `validate_sdpa_operand_stride_alignment`), but not
    misaligned addresses.
    """
    numbers, strides = _LOAD_BYTES // tensor.element_size(), tensor.stride()
    aligned = tensor.data_ptr() % _LOAD_BYTES == 0
    if not aligned or any(stride % numbers and tensor.shape[axis] > 1 for axis, stride in enumerate(strides[:-1])):
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor

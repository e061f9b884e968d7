"""`torch_efficient`: PyTorch's memory-efficient kernel (CUTLASS), which also supports fp32, old GPUs and a bias.

Source of the limits: PyTorch, aten/src/ATen/native/transformers/cuda (sdp_utils.cpp, attention.cu,
attention_backward.cu) and mem_eff_attention/kernel_forward.h. Packed documents are in `packed`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from undivided.arguments import layout
from undivided.arguments.tensors import dtype_name
from undivided.backends._base import Backend, Gradients, Limits, limit_reasons
from undivided.backends.shared import gpu_rules
from undivided.backends.shared.empty_rows import blank_rows, clear_rows_, clear_tail_, closed_rows, fix_empty_rows
from undivided.backends.shared.kernel_inputs import align, clean_views
from undivided.backends.shared.log_sum_exp import lse_for_backward
from undivided.backends.torch_efficient.packed import LSE_ROWS, MAX_DOCUMENTS, Packing
from undivided.machine import Machine
from undivided.request.call import Call
from undivided.request.problem import Problem
from undivided.request.request import Tensors
from undivided.request.result import Result, lse_dtype

OPS = torch.ops.aten

_NO_MASK, _TOP_LEFT, _BOTTOM_RIGHT = 0, 1, 2
_OFFSETS = 1 << 31  # elements: kernel_forward.h multiplies a key's index by the row stride in 32 bits
_BIAS_ROW = 16  # elements: rows of the bias start at multiples of this, for vector loads and as PyTorch pads them


class TorchEfficient(Backend):
    """The memory-efficient CUTLASS kernel of PyTorch."""

    name = "torch_efficient"
    family = "efficient"
    summary = "PyTorch's memory-efficient kernel: fp32, old GPUs, packed documents, bias and its gradient"
    how_to_get = "part of PyTorch's CUDA builds: https://pytorch.org/get-started"
    limits = Limits(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.float16, torch.bfloat16, torch.float32}),
        masks=frozenset({"causal", "documents"}),
        alignments=frozenset({"top_left", "bottom_right"}),
        features=frozenset({"backward", "bias", "bias_grad", "lse", "value_dim"}),
        compute_capability=((5, 0), (12, 1)),
        packages=(("torch", (2, 5), None),),
        notes={
            "dropout": "it draws its own pattern",
            "gqa": "its kernel needs as many key/value heads as query heads, and K and V are never copied",
            "lse_grad": "PyTorch's operator returns lse as a constant",
            "padded": "its documents follow one another without gaps",
            "window": "its backward supports only causal windows in top-left alignment",
        },
    )

    def unavailable(self, machine: Machine) -> str | None:
        """The reason if there is no GPU or PyTorch is too old; otherwise None."""
        return gpu_rules.no_gpu(machine) or super().unavailable(machine)

    def reasons(self, problem: Problem, machine: Machine) -> list[str]:
        """The limits, then the rules that they cannot express."""
        reasons = limit_reasons(self.limits, problem, machine)
        reasons += gpu_rules.hip_reasons(problem, machine) + gpu_rules.size_reasons(problem)
        reasons += _alignment_reasons(problem, machine) + _size_reasons(problem)
        capability = machine.compute_capability
        if problem.dtype == torch.bfloat16 and capability is not None and capability < (8, 0):
            reasons.append(f"dtype=bfloat16 on {gpu_rules.capability_name(capability)} (min 8.0)")
        if problem.dtype == torch.float32 and problem.kv_len == 1 and "backward" in problem.features:
            reasons.append("float32 gradients with a single key (the products of its matrix units have 22 bits)")
        if problem.documents is None and problem.align == "bottom_right" and problem.q_len > problem.kv_len:
            reasons.append(
                "bottom-right alignment with more queries than keys (the kernel cannot start its diagonal below the "
                "first row)"
            )
        if "bias" in problem.features and problem.bias_dtype != problem.dtype:
            bias, q = map(dtype_name, (problem.bias_dtype, problem.dtype))
            reasons.append(f"a {bias} bias with {q} operands (the kernel rounds the bias to the dtype of q)")
        if "bias" in problem.features and problem.documents is not None:
            reasons.append("a bias with packed documents (PyTorch's operator takes one or the other)")
        return reasons

    def only_when_asked(self, problem: Problem, machine: Machine) -> str | None:
        """The reason for documents of unknown length: the padding to the longest one may need as much memory as all
        tokens for each."""
        if problem.documents is not None and problem.documents[1] is None:
            return (
                "pads the log-sum-exp of every document to the longest, whose length only the GPU knows "
                "(give it: masks.documents(..., max_q=, max_kv=))"
            )
        return None

    def forward(self, call: Call, tensors: Tensors) -> Result:
        """Attention by ``aten::_efficient_attention_forward``."""
        problem = call.problem
        q, k, v = _views(call, tensors)
        packing = Packing.from_call(call, tensors)
        cu_seqlens = (None,) * 4 if packing is None else packing[:4]
        out, lse, *_ = OPS._efficient_attention_forward(
            q,
            k,
            v,
            _bias(call, tensors),
            *cu_seqlens,
            0.0,
            _mask_type(problem),
            compute_log_sumexp=True,
            scale=call.scale,
        )
        lse = lse[..., : problem.q_len] if packing is None else packing.gather(lse, problem.q_len)
        result = fix_empty_rows(call, tensors, out, lse)
        if "bias" in problem.features and "lse" in problem.features:
            # the kernel returns lse = 0 for rows whose bias is -inf throughout; its backward needs no correction
            result = blank_rows(*result, closed_rows(call, tensors))
        return result.in_layout(problem.layout)

    def backward(
        self, call: Call, tensors: Tensors, result: Result, grad_out: Tensor, grad_lse: Tensor | None
    ) -> Gradients:
        """Gradients by ``aten::_efficient_attention_backward``."""
        problem = call.problem
        q, k, v = _views(call, tensors)
        packing = Packing.from_call(call, tensors)
        cu_seqlens = (None, None, problem.q_len, problem.kv_len) if packing is None else packing[:4]
        lse = lse_for_backward(result.lse)
        seed = torch.zeros((), dtype=torch.int64, device=q.device)  # not read without dropout
        needs_bias = "bias_grad" in problem.features
        # deterministic: if keys are not split, one block writes each dq in a fixed order of summation
        one_split = problem.deterministic or (packing is not None and packing.one_split)
        dq, dk, dv, dbias = OPS._efficient_attention_backward(
            _aligned(layout.canonical(grad_out, problem.layout)),
            q,
            k,
            v,
            _bias(call, tensors),
            layout.canonical(result.out, problem.layout).contiguous(),
            *cu_seqlens,
            _padded(lse) if packing is None else packing.scatter(lse),
            0.0,
            seed,
            seed,
            _mask_type(problem),
            needs_bias,
            scale=call.scale,
            num_splits_key=1 if one_split else None,
        )
        if packing is not None:  # the kernel does not write rows without keys and tokens after the last document
            dq = clear_rows_(dq, call.normal_form(tensors.q))
            dk, dv = (clear_tail_(grad, packing.cu_k) for grad in (dk, dv))
        grads = [layout.from_canonical(grad, problem.layout) for grad in (dq, dk, dv)]
        return *grads, _sum_bias_gradient(dbias, tensors.bias) if needs_bias else None, None, None


def _alignment_reasons(problem: Problem, machine: Machine) -> list[str]:
    """Reasons against head sizes that 128-bit loads cannot read (`minimum_gemm_alignment`)."""
    capability = machine.compute_capability or (8, 0)
    half = problem.dtype in gpu_rules.HALF
    tensor_cores = capability >= (8, 0) or (capability >= (7, 0) and half)
    multiple = max(4 if capability >= (8, 0) else 1, (8 if half else 4) if tensor_cores else 1)
    sizes = {"head_dim": problem.qk_dim} | ({"value_dim": problem.v_dim} if "value_dim" in problem.features else {})
    dtype = dtype_name(problem.dtype)
    return [
        f"{name}={size} (must be a multiple of {multiple} in {dtype})"
        for name, size in sizes.items()
        if size % multiple
    ]


def _size_reasons(problem: Problem) -> list[str]:
    """Reasons against sizes beyond the kernel's grid and offsets; larger batches are not split."""
    documents = (problem.documents or (0,))[0]
    heads = {"bhsd": 1, "sbhd": problem.heads * problem.batch}.get(problem.layout, problem.heads)
    most_keys = _OFFSETS >> (heads * max(problem.qk_dim, problem.v_dim) - 1).bit_length()
    keys = problem.longest_lengths[1]
    sizes = (
        ("batch", problem.batch, 65535),
        ("heads", problem.heads, 65535),
        ("documents", documents, MAX_DOCUMENTS),
        ("key length", keys, most_keys),
    )
    return [f"{name}={size} (max {most})" for name, size, most in sizes if size > most]


def _views(call: Call, tensors: Tensors) -> tuple[Tensor, ...]:
    """q, k, v as [B, S, H, D].

    Copied if their rows do not start at multiples of 16 bytes, because PyTorch has no kernel for that, or (k and v) if
    their strides are too large for the kernel's 32-bit offsets.
    """
    problem = call.problem
    views = clean_views(call, tensors, own_tokens=True)
    q, k, v = (_aligned(t if problem.documents is None else t[None]) for t in views)
    keys = problem.longest_lengths[1]
    return q, *(t if keys * t.stride(1) <= _OFFSETS else t.contiguous() for t in (k, v))


def _aligned(tensor_BSHD: Tensor) -> Tensor:
    """`align`; PyTorch also looks at the stride between heads if there is only one."""
    aligned = align(tensor_BSHD)
    if aligned.shape[2] > 1:
        return aligned
    batch, step, _, last = aligned.stride()
    return aligned.as_strided(aligned.shape, (batch, step, aligned.shape[3], last), aligned.storage_offset())


def _mask_type(problem: Problem) -> int:
    if "causal" not in problem.mask.kinds:
        return _NO_MASK
    return _BOTTOM_RIGHT if problem.align == "bottom_right" else _TOP_LEFT


def _bias(call: Call, tensors: Tensors) -> Tensor | None:
    """The bias as [B, H, Sq, Sk] in the dtype of q, with aligned rows; broadcast axes have stride 0."""
    problem = call.problem
    if tensors.bias is None:
        return None
    bias = tensors.bias.to(tensors.q.dtype).expand(*tensors.bias.shape[:3], problem.kv_len)
    if bias.stride(3) != 1 or any(bias.stride(axis) % _BIAS_ROW for axis in range(3)):
        room = torch.nn.functional.pad(bias, (0, -problem.kv_len % _BIAS_ROW))
        bias = room[..., : problem.kv_len]
    return bias.expand(problem.batch, problem.heads, problem.q_len, problem.kv_len)


def _padded(lse_BHS: Tensor) -> Tensor:
    """The lse padded to a multiple of 32 rows, as the forward writes it: the backward uses vector loads."""
    return torch.nn.functional.pad(lse_BHS, (0, -lse_BHS.shape[-1] % LSE_ROWS), value=torch.inf)


def _sum_bias_gradient(grad: Tensor, bias: Tensor | None) -> Tensor:
    """The gradient of the expanded bias, summed over its broadcast axes in at least fp32."""
    assert bias is not None
    return grad.to(lse_dtype(grad.dtype)).sum_to_size(bias.shape).to(bias.dtype)


BACKEND = TorchEfficient()

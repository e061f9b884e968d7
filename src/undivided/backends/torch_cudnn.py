"""`torch_cudnn`: cuDNN's attention as PyTorch calls it. The `cudnn` backend has the rest of cuDNN.

Packed documents run forward only: [T, H, D], int32 offsets, a log-sum-exp of [T, H, 1].

Source of the limits: PyTorch, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (can_use_cudnn_attention) and
native/cudnn/MHA.cpp, whose causal flag is top-left; for documents there ``run_cudnn_SDP_fprop_nestedtensor``, and
cuda/attention_backward.cu, as they were from 2.10 to 2.13; cuDNN's own by version in `cudnn_rules`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from undivided.arguments import layout
from undivided.backends._base import Backend, Gradients, Limits, limit_reasons
from undivided.backends.shared import cudnn_rules, gpu
from undivided.machine import Machine, format_version
from undivided.request.call import Call
from undivided.request.problem import Problem
from undivided.request.request import Tensors
from undivided.request.result import Result

OPS = torch.ops.aten

_TILE = 128
"""The longest document is rounded up to this: for one query cuDNN has kernels of their own, which were wrong
(`cudnn_rules`, and cudnn-frontend issue 1083: the log-sum-exp of one head in each group). Nothing is allocated by
it."""
_OFFSETS = 1 << 30  # elements: PyTorch multiplies int32 offsets by the size of a token, and 1 << 31 is one too many


class TorchCudnn(Backend):
    """cuDNN through PyTorch's operator."""

    name = "torch_cudnn"
    family = "fused"
    summary = "cuDNN's attention as PyTorch calls it"
    how_to_get = "part of PyTorch's CUDA builds: https://pytorch.org/get-started"
    limits = Limits(
        devices=frozenset({"cuda"}),
        dtypes=gpu.HALF,
        head_dim_multiple=8,
        masks=frozenset({"causal", "documents"}),
        alignments=frozenset({"top_left"}),
        features=frozenset({"backward", "gqa", "lse", "value_dim"}),
        compute_capability=((8, 0), (12, 1)),
        packages=(("torch", (2, 8), None),),
        notes={
            "dropout": "it draws its own pattern",
            "bias": "PyTorch's operator returns no gradient of it and leaves rows of -inf undefined",
            "window": "PyTorch's operator has no argument for it; the cudnn backend has",
            "padded": "PyTorch's offsets leave no room for it; the cudnn backend has it",
            "lengths": "the cudnn backend has them",
            "lse_grad": "cuDNN's backward has no input for it",
        },
    )

    def rank(self, problem: Problem, machine: Machine) -> float:
        """By the table in `gpu`."""
        return gpu.rank(self.name, machine)

    def unavailable(self, machine: Machine) -> str | None:
        """No GPU, no package, or neither."""
        if machine.version("cudnn") is None and gpu.no_gpu(machine) is None:
            return "cuDNN is not installed"
        return gpu.no_gpu(machine) or super().unavailable(machine)

    def reasons(self, problem: Problem, machine: Machine) -> list[str]:
        """The limits, then what they cannot say."""
        reasons = limit_reasons(self.limits, problem, machine)
        reasons += gpu.hip_reasons(problem, machine) + gpu.size_reasons(problem)
        if problem.device == "cuda":
            reasons += cudnn_rules.reasons(problem, machine, oldest=(9, 0), plain=True)
            reasons += _document_reasons(problem, machine)
        for name, size in (("batch", problem.batch), ("heads", problem.heads)):
            if size > 65535:
                reasons.append(f"{name}={size} (max 65535)")
        capability = machine.compute_capability
        if capability is not None and capability[0] == 9 and problem.q_len == 1 and "backward" in problem.features:
            reasons.append(
                "gradients for one query on compute capability 9.x (NaN where the log-sum-exp is "
                "far below 0: cudnn-frontend "
                "issue 1072; the cudnn backend passes a padding mask)"
            )
        if problem.deterministic and "backward" in problem.features:
            reasons.append(
                "deterministic gradients (PyTorch's operator does not ask cuDNN for them; the cudnn backend does)"
            )
        return reasons

    def only_when_asked(self, problem: Problem, machine: Machine) -> str | None:
        """Up to 2.13 PyTorch looks for a graph of such a call and never keeps one."""
        if problem.documents is not None:
            return "PyTorch builds cuDNN's graph anew at every call with documents; ask with backend='torch_cudnn'"
        return None

    def forward(self, call: Call, tensors: Tensors) -> Result:
        """Attention by ``aten::_cudnn_attention_forward``."""
        problem = call.problem
        if problem.documents is not None:
            return _packed_forward(call, tensors)
        q, k, v = (gpu.aligned(t) for t in tensors.heads_first(call.problem.layout))
        out, lse, *_ = OPS._cudnn_attention_forward(
            q,
            k,
            v,
            None,
            None,
            None,
            problem.q_len,
            problem.kv_len,
            True,
            0.0,
            "causal" in problem.mask.kinds,
            False,
            scale=call.scale,
        )
        lse = lse.reshape(problem.batch, problem.heads, problem.q_len)
        return Result(*gpu.settle(out.transpose(1, 2), lse, None)).in_layout(problem.layout)

    def backward(
        self, call: Call, tensors: Tensors, result: Result, grad_out: Tensor, grad_lse: Tensor | None
    ) -> Gradients:
        """Gradients by ``aten::_cudnn_attention_backward``."""
        problem = call.problem
        q, k, v = (gpu.aligned(t) for t in tensors.heads_first(call.problem.layout))
        grad = layout.heads_first(grad_out, problem.layout)
        out = gpu.aligned(layout.heads_first(result.out, problem.layout))
        if grad.stride() != out.stride() or gpu.aligned(grad) is not grad:  # cuDNN is told one layout for both
            grad = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device=out.device).copy_(grad)
        seed = torch.zeros((), dtype=torch.int64, device=q.device)  # not read without dropout
        grads = OPS._cudnn_attention_backward(
            grad,
            q,
            k,
            v,
            out,
            result.lse.contiguous(),
            seed,
            seed,
            None,
            None,
            None,
            problem.q_len,
            problem.kv_len,
            0.0,
            "causal" in problem.mask.kinds,
            scale=call.scale,
        )
        dq, dk, dv = (layout.restore(grad.transpose(1, 2), problem.layout) for grad in grads)
        return dq, dk, dv, None, None, None


def _packed_forward(call: Call, tensors: Tensors) -> Result:
    """Documents: packed tokens that lie one after another, their offsets, and what no pair reads cleared."""
    problem = call.problem
    packing = gpu.packing(call, tensors)
    q, k, v = (gpu.aligned(t.contiguous()) for t in gpu.cleaned_views(call, tensors))
    longest = (packing[name] + -packing[name] % _TILE for name in ("max_seqlen_q", "max_seqlen_k"))
    out, stats, *_ = OPS._cudnn_attention_forward(
        q,
        k,
        v,
        None,
        packing["cu_seqlens_q"],
        packing["cu_seqlens_k"],
        *longest,
        True,
        0.0,
        "causal" in problem.mask.kinds,
        False,
        scale=call.scale,
    )
    lse_HT = stats.squeeze(-1).T if stats.dim() == 3 else stats  # [T, H, 1]; [H, T] in builds after 2.13
    settled = gpu.settle(out.unsqueeze(0), lse_HT.unsqueeze(0).contiguous(), call.normal_form(tensors.q))
    return Result(*settled).in_layout(problem.layout)


def _document_reasons(problem: Problem, machine: Machine) -> list[str]:
    """What PyTorch's operator does not do for packed documents; lengths against powers of two."""
    if problem.documents is None:
        return []
    found, version = [], machine.version("torch")
    if version is not None and version >= (2, 14):
        found.append(f"packed documents with torch {format_version(version)} (its operator was read up to 2.13)")
    if "backward" in problem.features:
        found.append(
            "gradients of packed documents (PyTorch's operator takes the head size for the longest "
            "document: pytorch pull "
            "request 186142; the cudnn backend has them)"
        )
    if problem.documents[0] > 32768:
        found.append(f"documents={problem.documents[0]} (max 32768)")
    for name, tokens, heads in (("query", problem.q_len, problem.heads), ("key", problem.kv_len, problem.kv_heads)):
        most = _OFFSETS >> (heads * max(problem.qk_dim, problem.v_dim) - 1).bit_length()
        if tokens > most:
            found.append(f"{name} length {tokens} (max {most}: PyTorch's offsets are int32)")
    return found


BACKEND = TorchCudnn()

"""`torch_cudnn`: cuDNN's attention as PyTorch calls it. The `cudnn` backend has the rest of cuDNN.

Packed documents run forward only: [T, H, D], int32 offsets, a log-sum-exp of [T, H, 1].

Source of the limits: PyTorch 2.10 to 2.13, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp
(can_use_cudnn_attention) and native/cudnn/MHA.cpp, whose causal flag is top-left; for documents also
``run_cudnn_SDP_fprop_nestedtensor`` there and cuda/attention_backward.cu. The limits of each cuDNN version are in
`cudnn_rules`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from undivided.arguments import layout
from undivided.backends._base import Backend, Gradients, Limits, limit_reasons
from undivided.backends.shared import cudnn_rules, gpu_rules
from undivided.backends.shared.flash_attn_arguments import kernel_result, packing_arguments
from undivided.backends.shared.kernel_inputs import align, clean_views
from undivided.machine import Machine, format_version
from undivided.request.call import Call
from undivided.request.problem import Problem
from undivided.request.request import Tensors
from undivided.request.result import Result

OPS = torch.ops.aten

_TILE = 128
"""The longest document's length is passed rounded up to this, at no cost in memory. For a length of 1 cuDNN would use
its single-query kernels, some of which are wrong (`cudnn_rules`; cudnn-frontend issue 1083: the log-sum-exp of one head
in each group)."""
_OFFSETS = 1 << 30  # elements: PyTorch multiplies int32 offsets by the size of a token, and 1 << 31 is one too many


class TorchCudnn(Backend):
    """cuDNN through PyTorch's operator."""

    name = "torch_cudnn"
    family = "fused"
    summary = "cuDNN's attention as PyTorch calls it"
    how_to_get = "part of PyTorch's CUDA builds: https://pytorch.org/get-started"
    limits = Limits(
        devices=frozenset({"cuda"}),
        dtypes=gpu_rules.HALF,
        head_dim_multiple=8,
        masks=frozenset({"causal", "documents"}),
        alignments=frozenset({"top_left"}),
        features=frozenset({"backward", "gqa", "lse", "value_dim"}),
        compute_capability=((8, 0), (12, 1)),
        packages=(("torch", (2, 8), None),),
        notes={
            "dropout": "it draws its own pattern",
            "bias": "PyTorch's operator returns no gradient of it and leaves rows of -inf undefined",
            "window": "PyTorch's operator has no argument for it; the cudnn backend supports it",
            "padded": "PyTorch's offsets have no gaps; the cudnn backend supports it",
            "lengths": "the cudnn backend supports them",
            "lse_grad": "cuDNN's backward has no input for it",
        },
    )

    def unavailable(self, machine: Machine) -> str | None:
        """The reason if there is no GPU or no cuDNN, or PyTorch is too old; otherwise None."""
        return cudnn_rules.unavailable(machine) or super().unavailable(machine)

    def reasons(self, problem: Problem, machine: Machine) -> list[str]:
        """The limits, then the rules that they cannot express."""
        reasons = limit_reasons(self.limits, problem, machine)
        reasons += gpu_rules.hip_reasons(problem, machine) + gpu_rules.size_reasons(problem)
        if problem.device == "cuda":
            reasons += cudnn_rules.reasons(problem, machine, oldest=(9, 0), plain=True)
            reasons += _document_reasons(problem, machine)
        for name, size in (("batch", problem.batch), ("heads", problem.heads)):
            if size > 65535:
                reasons.append(f"{name}={size} (max 65535)")
        capability = machine.compute_capability
        if capability is not None and capability[0] == 9 and problem.q_len == 1 and "backward" in problem.features:
            reasons.append(
                "gradients for one query on compute capability 9.x (NaN if the log-sum-exp is far below 0: "
                "cudnn-frontend issue 1072; the cudnn backend avoids it by a padding mask)"
            )
        if problem.deterministic and "backward" in problem.features:
            reasons.append("deterministic gradients (PyTorch's operator does not request them; the cudnn backend does)")
        return reasons

    def only_when_asked(self, problem: Problem, machine: Machine) -> str | None:
        """The reason for documents: up to 2.13 PyTorch never caches the graph of such a call."""
        if problem.documents is not None:
            return (
                "PyTorch builds cuDNN's graph again at every call with documents; request it with backend='torch_cudnn'"
            )
        return None

    def forward(self, call: Call, tensors: Tensors) -> Result:
        """Attention by ``aten::_cudnn_attention_forward``."""
        problem = call.problem
        is_packed = problem.documents is not None
        sizes: tuple[object, ...]  # offsets and longest lengths, of queries and of keys
        if is_packed:
            q, k, v = (align(t.contiguous()) for t in clean_views(call, tensors))
            packing = packing_arguments(call, tensors)
            longest = (packing[name] + -packing[name] % _TILE for name in ("max_seqlen_q", "max_seqlen_k"))
            sizes = packing["cu_seqlens_q"], packing["cu_seqlens_k"], *longest
        else:
            q, k, v = (t.transpose(1, 2) for t in clean_views(call, tensors))
            sizes = None, None, problem.q_len, problem.kv_len
        is_causal = "causal" in problem.mask.kinds
        out, lse, *_ = OPS._cudnn_attention_forward(
            q, k, v, None, *sizes, True, 0.0, is_causal, False, scale=call.scale
        )
        if is_packed:
            lse_HT = lse.squeeze(-1).T if lse.dim() == 3 else lse  # [T, H, 1]; [H, T] in builds after 2.13
            return kernel_result(call, tensors, out, lse_HT.contiguous())
        lse = lse.reshape(problem.batch, problem.heads, problem.q_len)
        return kernel_result(call, tensors, out.transpose(1, 2), lse)

    def backward(
        self, call: Call, tensors: Tensors, result: Result, grad_out: Tensor, grad_lse: Tensor | None
    ) -> Gradients:
        """Gradients by ``aten::_cudnn_attention_backward``."""
        problem = call.problem
        q, k, v = (t.transpose(1, 2) for t in clean_views(call, tensors))
        grad = layout.heads_first(grad_out, problem.layout)
        out = align(layout.heads_first(result.out, problem.layout))
        if grad.stride() != out.stride() or align(grad) is not grad:  # cuDNN gets the strides of out for both
            grad = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device=out.device).copy_(grad)
        seed = torch.zeros((), dtype=torch.int64, device=q.device)  # not read without dropout
        grads = OPS._cudnn_attention_backward(
            grad,
            q,
            k,
            v,
            out,
            result.lse.contiguous().unsqueeze(-1),  # PyTorch passes its sizes to cuDNN
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
        dq, dk, dv = (layout.from_canonical(grad.transpose(1, 2), problem.layout) for grad in grads)
        return dq, dk, dv, None, None, None


def _document_reasons(problem: Problem, machine: Machine) -> list[str]:
    """What PyTorch's operator cannot do for packed documents; lengths are compared with powers of two."""
    if problem.documents is None:
        return []
    reasons, version = [], machine.version("torch")
    if version is not None and version >= (2, 14):
        reasons.append(f"packed documents with torch {format_version(version)} (its operator was read up to 2.13)")
    if "backward" in problem.features:
        reasons.append(
            "gradients of packed documents (PyTorch's operator uses the head size as the longest length: "
            "pytorch pull request 186142; the cudnn backend computes them)"
        )
    if problem.documents[0] > 32768:
        reasons.append(f"documents={problem.documents[0]} (max 32768)")
    for name, tokens, heads in (("query", problem.q_len, problem.heads), ("key", problem.kv_len, problem.kv_heads)):
        most = _OFFSETS >> (heads * max(problem.qk_dim, problem.v_dim) - 1).bit_length()
        if tokens > most:
            reasons.append(f"{name} length {tokens} (max {most}: PyTorch's offsets are int32)")
    return reasons


BACKEND = TorchCudnn()

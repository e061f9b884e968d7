"""`torch_cudnn`: cuDNN's attention as PyTorch calls it. Dense sequences; the `cudnn` backend has the rest of cuDNN.

Source of the limits: PyTorch, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (can_use_cudnn_attention) and
native/cudnn/MHA.cpp, whose causal flag is top-left; cuDNN's own by version in `_cudnn_rules`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from undivided import _layout
from undivided._machine import Machine
from undivided._problem import Operands, Problem
from undivided._result import Result
from undivided.backends import _cudnn_rules, _gpu
from undivided.backends._base import Backend, Gradients, Limits, limit_reasons

OPS = torch.ops.aten


class TorchCudnn(Backend):
    """cuDNN through PyTorch's operator."""

    name = "torch_cudnn"
    family = "fused"
    summary = "cuDNN's attention as PyTorch calls it"
    how_to_get = "part of PyTorch's CUDA builds: https://pytorch.org/get-started"
    limits = Limits(
        devices=frozenset({"cuda"}),
        dtypes=_gpu.HALF,
        head_dim_multiple=8,
        masks=frozenset({"causal"}),
        alignments=frozenset({"top_left"}),
        features=frozenset({"backward", "gqa", "lse", "value_dim"}),
        compute_capability=((8, 0), (12, 1)),
        packages=(("torch", (2, 8), None),),
        notes={
            "dropout": "it draws its own pattern",
            "bias": "PyTorch's operator returns no gradient of it and leaves rows of -inf undefined",
            "window": "PyTorch's operator has no argument for it; the cudnn backend has",
            "documents": "the cudnn backend has them",
            "lengths": "the cudnn backend has them",
            "lse_grad": "cuDNN's backward has no input for it",
        },
    )

    def rank(self, problem: Problem, machine: Machine) -> float:
        """By the table in `_gpu`."""
        return _gpu.rank(self.name, machine)

    def unavailable(self, machine: Machine) -> str | None:
        """No GPU, no package, or neither."""
        if machine.version("cudnn") is None and _gpu.no_gpu(machine) is None:
            return "cuDNN is not installed"
        return _gpu.no_gpu(machine) or super().unavailable(machine)

    def reasons(self, problem: Problem, machine: Machine) -> list[str]:
        """The limits, then what they cannot say."""
        reasons = limit_reasons(self.limits, problem, machine)
        reasons += _gpu.hip_reasons(problem, machine) + _gpu.size_reasons(problem)
        if problem.device == "cuda":
            reasons += _cudnn_rules.reasons(problem, machine, oldest=(9, 0), plain=True)
        for name, size in (("batch", problem.batch), ("heads", problem.heads)):
            if size > 65535:
                reasons.append(f"{name}={size} (max 65535)")
        capability = machine.compute_capability
        if (
            capability is not None
            and capability[0] == 9
            and problem.q_len == 1
            and "backward" in problem.features
        ):
            reasons.append(
                "gradients for one query on compute capability 9.x (NaN where the log-sum-exp is far below 0: cudnn-frontend "
                "issue 1072; the cudnn backend asks with a padding mask)"
            )
        if problem.deterministic and "backward" in problem.features:
            reasons.append(
                "deterministic gradients (PyTorch's operator does not ask cuDNN for them; the cudnn backend does)"
            )
        return reasons

    def forward(self, problem: Problem, operands: Operands) -> Result:
        """Attention by ``aten::_cudnn_attention_forward``."""
        q, k, v = operands.heads_first()
        out, lse, *_ = OPS._cudnn_attention_forward(
            q, k, v, None, None, None, problem.q_len, problem.kv_len, True, 0.0, "causal" in problem.mask.kinds, False,
            scale=operands.scale,
        )  # fmt: skip
        lse = lse.reshape(problem.batch, problem.heads, problem.q_len)
        return Result(*_gpu.settle(out.transpose(1, 2), lse, None))

    def backward(
        self, problem: Problem, operands: Operands, result: Result, grad_out: Tensor, grad_lse: Tensor | None
    ) -> Gradients:
        """Gradients by ``aten::_cudnn_attention_backward``."""
        q, k, v = operands.heads_first()
        grad = _layout.heads_first(grad_out, problem.layout)
        out = result.out.transpose(1, 2)
        if grad.stride() != out.stride():  # cuDNN is told one layout for both
            grad = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device=out.device).copy_(
                grad
            )
        seed = torch.zeros((), dtype=torch.int64, device=q.device)  # not read without dropout
        grads = OPS._cudnn_attention_backward(
            grad, q, k, v, out, result.lse.contiguous(), seed, seed, None, None, None, problem.q_len, problem.kv_len, 0.0,
            "causal" in problem.mask.kinds, scale=operands.scale,
        )  # fmt: skip
        dq, dk, dv = (_layout.restore(grad.transpose(1, 2), problem.layout) for grad in grads)
        return dq, dk, dv, None, None, None


BACKEND = TorchCudnn()

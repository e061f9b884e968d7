"""`cudnn`: cuDNN's attention through nvidia-cudnn-frontend: windows, lengths, documents, a bias, ALiBi, sinks, paged
keys.

Source of the limits: `_cudnn_rules`, `_cudnn_score_rules`. How it is called: `_cudnn_graph`, and `_cudnn_paged` for
    paged keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from undivided import _layout
from undivided._machine import Machine
from undivided._problem import Operands, Problem
from undivided._result import Result, lse_dtype
from undivided.backends import _cudnn_graph, _cudnn_paged, _cudnn_rules, _cudnn_score_rules, _cudnn_scores, _gpu
from undivided.backends._base import Backend, Gradients, Limits, limit_reasons
from undivided.backends._cudnn_graph import Call


class Cudnn(Backend):
    """cuDNN through its own frontend."""

    name = "cudnn"
    family = "fused"
    summary = "cuDNN's attention through nvidia-cudnn-frontend: windows, lengths, documents, bias, ALiBi, sinks, pages"
    how_to_get = "pip install nvidia-cudnn-frontend, and cuDNN 9"
    limits = Limits(
        devices=frozenset({"cuda"}),
        dtypes=_gpu.HALF,
        head_dim_multiple=8,
        masks=frozenset({"causal", "window", "lengths", "q_lengths", "documents", "padded"}),
        alignments=frozenset({"top_left", "bottom_right"}),
        features=frozenset("backward bias bias_grad alibi sinks sinks_grad paged gqa lse value_dim".split()),
        compute_capability=((8, 0), (12, 1)),
        # 1.14: the band arguments of the Python interface
        packages=(("cudnn_frontend", (1, 14), None),),
        notes={
            "dropout": "it draws its own pattern",
            "alibi_grad": "cuDNN's slopes are its own",
            "softcap": "only as a graph of one's own",
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
            reasons += _cudnn_score_rules.reasons(problem, machine)
            if "paged" in problem.features:
                return reasons + _cudnn_paged.reasons(problem, machine)
            reasons += _cudnn_rules.reasons(problem, machine)
        if "lengths" in problem.mask.kinds and problem.q_len == 1:
            reasons.append(
                "per-sequence lengths for one query (what lies beyond them would be cleared in a copy of the cache)"
            )
        sizes = (problem.qk_dim, problem.v_dim)
        frontend = machine.version("cudnn_frontend")
        large = "backward" in problem.features and min(sizes) > 192 and (machine.compute_capability or (0,))[0] == 10
        if large and frontend is not None and frontend < (1, 24):
            reasons.append("head_dim=256 with gradients on compute capability 10.x (nvidia-cudnn-frontend from 1.24)")
        return reasons

    def only_when_asked(self, problem: Problem, machine: Machine) -> str | None:
        """Paged keys: one kernel of ours has less to start than what it takes to keep garbage out of cuDNN's."""
        if "paged" in problem.features:
            return "computes each last page apart, in a dozen small operations; ask with backend='cudnn'"
        return None

    def forward(self, problem: Problem, operands: Operands) -> Result:
        """Attention by a forward graph."""
        if operands.pages is not None:
            return _cudnn_paged.forward(problem, operands)
        call = Call.of(problem, operands, _cudnn_scores.extra(problem, operands))
        out = torch.empty(*call.q.shape[:-1], problem.v_dim, dtype=call.q.dtype, device=call.q.device)
        stats = call.empty_stats(lse_dtype(problem.dtype))
        tensors = {"q": call.q, "k": call.k, "v": call.v, "o": out, "stats": stats}
        call.run("forward", _cudnn_graph.forward_graph, tensors)
        if call.packed:
            out, stats = out.unsqueeze(0), stats.unsqueeze(0).transpose(1, 2)
        return Result(*_cudnn_scores.settle(problem, operands, out, stats))

    def backward(
        self, problem: Problem, operands: Operands, result: Result, grad_out: Tensor, grad_lse: Tensor | None
    ) -> Gradients:
        """Gradients by a backward graph."""
        call = Call.of(problem, operands, _cudnn_scores.extra(problem, operands)).for_backward()
        out, grad = result.out, _layout.canonical(grad_out, problem.layout)
        if _gpu.has_rows_without_keys(problem):
            grad = _gpu.clear_rows(grad, operands.normal_form(problem))
        stats = _cudnn_scores.statistics(operands, result)
        dsinks = _cudnn_scores.sink_gradient(operands, result, grad) if "sinks_grad" in problem.features else None
        if call.packed:
            out, grad, stats = out[0], grad[0], stats[0].transpose(0, 1)
        tensors = {"q": call.q, "k": call.k, "v": call.v, "o": out.contiguous(), "stats": stats.contiguous()}
        tensors["do"] = grad.contiguous()
        # ragged gradients are written for real tokens only: the rest starts, and stays, at 0
        grads = {f"d{name}": torch.zeros(tensors[name].shape, dtype=out.dtype, device=out.device) for name in "qkv"}
        wants_bias = {"dbias": torch.zeros_like(call.extra["bias"])} if "bias_grad" in problem.features else {}
        call.run("backward", _cudnn_graph.backward_graph, tensors | grads | wants_bias)
        dq, dk, dv = (_layout.restore(g.unsqueeze(0) if call.packed else g, problem.layout) for g in grads.values())
        return dq, dk, dv, wants_bias.get("dbias"), dsinks, None


BACKEND = Cudnn()

"""`cudnn`: cuDNN's attention through nvidia-cudnn-frontend: windows, lengths, documents, a bias, ALiBi, sinks, paged
keys.

The limits and their sources: `cudnn_rules`, `score_rules`. The calls: `graph`, and `paged` for paged keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from undivided.arguments import layout
from undivided.arguments.tensors import materialise
from undivided.backends._base import Backend, Gradients, Limits, limit_reasons
from undivided.backends.cudnn import graph, paged, score_rules, scores
from undivided.backends.cudnn.graph import CudnnCall
from undivided.backends.shared import cudnn_rules, gpu_rules
from undivided.backends.shared.empty_rows import clear_rows, has_rows_without_keys
from undivided.backends.shared.flash_attn_arguments import in_callers_layout
from undivided.machine import Machine
from undivided.request.call import Call
from undivided.request.problem import Problem
from undivided.request.request import Tensors
from undivided.request.result import Result, lse_dtype


class Cudnn(Backend):
    """cuDNN through its own frontend."""

    name = "cudnn"
    family = "fused"
    summary = "cuDNN's attention through nvidia-cudnn-frontend: windows, lengths, documents, bias, ALiBi, sinks, pages"
    how_to_get = "pip install nvidia-cudnn-frontend, and cuDNN 9"
    limits = Limits(
        devices=frozenset({"cuda"}),
        dtypes=gpu_rules.HALF,
        head_dim_multiple=8,
        masks=frozenset({"causal", "window", "lengths", "q_lengths", "documents", "padded"}),
        alignments=frozenset({"top_left", "bottom_right"}),
        features=frozenset("backward bias bias_grad alibi sinks sinks_grad paged gqa lse value_dim".split()),
        compute_capability=((8, 0), (12, 1)),
        # 1.14: the band arguments of the Python interface
        packages=(("cudnn_frontend", (1, 14), None),),
        notes={
            "dropout": "it draws its own pattern",
            "alibi_grad": "cuDNN computes the slopes itself",
            "softcap": "cuDNN has it only in hand-built graphs",
            "lse_grad": "cuDNN's backward has no input for it",
        },
    )

    def unavailable(self, machine: Machine) -> str | None:
        """The reason if there is no GPU, no cuDNN or no usable version of its frontend; otherwise None."""
        return cudnn_rules.unavailable(machine) or super().unavailable(machine)

    def reasons(self, problem: Problem, machine: Machine) -> list[str]:
        """The limits, then the rules that they cannot express."""
        reasons = limit_reasons(self.limits, problem, machine)
        reasons += gpu_rules.hip_reasons(problem, machine) + gpu_rules.size_reasons(problem)
        if problem.device == "cuda":
            reasons += score_rules.reasons(problem, machine)
            if "paged" in problem.features:
                return reasons + paged.reasons(problem, machine)
            reasons += cudnn_rules.reasons(problem, machine)
        if "lengths" in problem.mask.kinds and problem.q_len == 1:
            reasons.append(
                "per-sequence lengths for one query (the cache would be copied to clear what lies beyond them)"
            )
        sizes = (problem.qk_dim, problem.v_dim)
        frontend = machine.version("cudnn_frontend")
        large = "backward" in problem.features and min(sizes) > 192 and (machine.compute_capability or (0,))[0] == 10
        if large and frontend is not None and frontend < (1, 24):
            reasons.append("head_dim=256 with gradients on compute capability 10.x (nvidia-cudnn-frontend from 1.24)")
        return reasons

    def only_when_asked(self, problem: Problem, machine: Machine) -> str | None:
        """The reason for paged keys: keeping garbage out of cuDNN takes more launches than one kernel of ours."""
        if "paged" in problem.features:
            return "computes each last page separately, in a dozen small operations; request it with backend='cudnn'"
        return None

    def forward(self, call: Call, tensors: Tensors) -> Result:
        """Attention by a forward graph."""
        problem, tensors = call.problem, tensors.materialised()
        if call.pages is not None:
            return paged.forward(call, tensors).in_layout(problem.layout)
        cudnn_call = CudnnCall.from_call(call, tensors, scores.extra(call, tensors))
        out = torch.empty(*cudnn_call.q.shape[:-1], problem.v_dim, dtype=cudnn_call.q.dtype, device=cudnn_call.q.device)
        stats = cudnn_call.empty_stats(lse_dtype(problem.dtype))
        cudnn_call.run(graph.forward_graph, {"o": out, "stats": stats})
        if cudnn_call.packed:
            out, stats = out.unsqueeze(0), stats.unsqueeze(0).transpose(1, 2)
        return scores.correct_output(call, tensors, out, stats).in_layout(problem.layout)

    def backward(
        self, call: Call, tensors: Tensors, result: Result, grad_out: Tensor, grad_lse: Tensor | None
    ) -> Gradients:
        """Gradients by a backward graph."""
        problem, tensors = call.problem, tensors.materialised()
        cudnn_call = CudnnCall.from_call(call, tensors, scores.extra(call, tensors)).for_backward()
        result = result.canonical(problem.layout)
        out, grad = result.out, layout.canonical(materialise(grad_out), problem.layout)
        if has_rows_without_keys(problem):
            grad = clear_rows(grad, call.normal_form(tensors.q))
        stats = scores.statistics(tensors, result)
        dsinks = scores.sink_gradient(tensors, result, grad) if "sinks_grad" in problem.features else None
        if cudnn_call.packed:
            out, grad, stats = out[0], grad[0], stats[0].transpose(0, 1)
        buffers = {"o": out.contiguous(), "stats": stats.contiguous(), "do": grad.contiguous()}
        # cuDNN writes ragged gradients for real tokens only; all others must be 0
        new = torch.zeros if cudnn_call.lengths else torch.empty
        inputs = {"dq": cudnn_call.q, "dk": cudnn_call.k, "dv": cudnn_call.v}
        grads = {name: new(t.shape, dtype=out.dtype, device=out.device) for name, t in inputs.items()}
        bias_buffers = {"dbias": torch.zeros_like(cudnn_call.extra["bias"])} if "bias_grad" in problem.features else {}
        cudnn_call.run(graph.backward_graph, buffers | grads | bias_buffers)
        return [*in_callers_layout(call, grads.values()), bias_buffers.get("dbias"), dsinks, None]


BACKEND = Cudnn()

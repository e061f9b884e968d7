"""`triton`: our own GPU kernels, for every mask and feature. Without a GPU, tests run them under Triton's interpreter.

The kernels read the mask's row ranges, visit only tiles that hold an allowed pair, and skip mask arithmetic in full
tiles. Nothing here waits for the device. The kernels are in `undivided.kernels.triton`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from undivided.arguments import layout
from undivided.backends._base import ALL_FEATURES, ALL_MASK_KINDS, Backend, Gradients, Limits, Replay, limit_reasons
from undivided.backends.shared import gpu_rules
from undivided.backends.triton import chosen, forward, gradients, kept_launches
from undivided.backends.triton.blocks import all_blocks
from undivided.backends.triton.inputs import KernelInputs
from undivided.kernels.triton import config
from undivided.machine import Machine
from undivided.request.call import Call
from undivided.request.problem import Problem
from undivided.request.request import Tensors
from undivided.request.result import Result


class Triton(Backend):
    """Tiled attention on row ranges."""

    name = "triton"
    family = "flash"
    summary = "our Triton kernels: any mask, forward, backward and paged decoding"
    how_to_get = "pip install triton (torch for CUDA brings it)"
    limits = Limits(
        devices=frozenset({"cuda", "cpu"}),
        dtypes=frozenset({torch.float16, torch.bfloat16, torch.float32}),
        masks=ALL_MASK_KINDS,
        alignments=frozenset({"top_left", "bottom_right"}),
        features=ALL_FEATURES - {"strided"},
        batch_invariant=True,
        compute_capability=((8, 0), None),
        packages=(("triton", (3, 4), None),),
        notes={"strided": "its rows are contiguous"},
    )

    def unavailable(self, machine: Machine) -> str | None:
        """The reason if there is no GPU (unless Triton's interpreter is on) or no usable Triton; otherwise None."""
        if self.needs_gpu(machine):
            return "no GPU (on a CPU only under Triton's interpreter: TRITON_INTERPRET=1)"
        return super().unavailable(machine)

    def needs_gpu(self, machine: Machine) -> bool:
        """Whether there is no GPU, and Triton's interpreter is off."""
        return machine.compute_capability is None and not machine.hip and not config.is_interpreted()

    def reasons(self, problem: Problem, machine: Machine) -> list[str]:
        """The limits; on a CPU the interpreter must be on; pages have no gradient."""
        reasons = limit_reasons(self.limits, problem, machine) + gpu_rules.size_reasons(problem)
        if problem.device == "cpu" and not config.is_interpreted():
            reasons.append("device=cpu (only under Triton's interpreter: TRITON_INTERPRET=1)")
        if problem.batch_invariant and (evaluated := _evaluated(problem)):
            reasons.append(f"batch-invariant results with {evaluated}, whose pairs are added in an order of their own")
        if {"paged", "backward"} <= problem.features:
            reasons.append("no gradients with paged keys and values")
        return reasons

    def only_when_asked(self, problem: Problem, machine: Machine) -> str | None:
        """The reason on a CPU, where the interpreter is for tests; otherwise None."""
        return "runs under Triton's interpreter here, for tests" if problem.device == "cpu" else None

    def notes(self, call: Call, tensors: Tensors) -> list[str]:
        """Whether only the chosen blocks are computed."""
        return chosen.notes(call, tensors) if "blocks" in call.problem.mask.kinds else []

    def forward(self, call: Call, tensors: Tensors) -> Result:
        """One launch per block of rows, usually one in all, and one more if keys are split."""
        tensors = tensors.materialised()
        if (launches := kept_launches.find(call, tensors)) is not None:
            return launches.run(call, tensors)
        problem = call.problem
        if "blocks" in problem.mask.kinds and (result := chosen.forward(call, tensors, self.forward)) is not None:
            return result
        inputs = KernelInputs(call, tensors)
        shape = (problem.batch, problem.q_len, problem.heads, problem.v_dim)
        out_BSHD = layout.empty(problem.layout, shape, tensors.q)
        out = out_BSHD.transpose(1, 2)
        lse = torch.empty((problem.batch, problem.heads, problem.q_len), dtype=torch.float32, device=tensors.q.device)
        for rows in inputs.rows(reads_tree=True):
            launched = [
                forward.compute(inputs, rows, blocks, out[:, :, rows.span], lse[:, :, rows.span])
                for blocks in all_blocks(inputs, rows)
            ]
            if rows.span == slice(0, problem.q_len):
                kept_launches.keep(call, inputs, launched)
        return Result(out_BSHD, lse).in_layout(problem.layout)

    def replay(self, call: Call, tensors: Tensors) -> Replay | None:
        """The forward by kept launches, for calls that have them."""
        return kept_launches.replay(call, tensors, self.forward)

    def backward(
        self, call: Call, tensors: Tensors, result: Result, grad_out: Tensor, grad_lse: Tensor | None
    ) -> Gradients:
        """Three passes: over rows (dq, slopes), over keys (dk, dv), over pairs (bias)."""
        return gradients.gradients(call, tensors, result, grad_out, grad_lse)


def _evaluated(problem: Problem) -> str:
    """What the kernels read or evaluate for every pair, so that Triton's compiler chooses a layout for it; "" if none.

    A layout decides in which order a row is added, and depends on strides, which depend on the lengths of a call.
    """
    words = sorted(problem.mask.kinds & {"dense", "predicate", "tree", "blocks"})
    words += ["bias"] if problem.bias is not None else []
    words += ["two unions"] if [name for name, *_ in problem.mask.detail].count("global") > 1 else []
    return ", ".join(words)


BACKEND = Triton()

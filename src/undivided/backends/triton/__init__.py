"""`triton`: our own GPU kernels, for every mask and feature. Without a GPU they run under Triton's interpreter, for
tests.

The kernels read the mask's row ranges, visit only tiles that hold an allowed pair, and skip mask arithmetic where a
tile is full. Nothing here waits for the device. See `undivided.kernels.triton` for the kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from undivided.arguments import layout
from undivided.backends._base import ALL_FEATURES, ANY_PART, Backend, Gradients, Limits, limit_reasons
from undivided.backends.shared import gpu
from undivided.backends.triton.inputs import Inputs, Rows, processors, strides
from undivided.kernels.triton import config
from undivided.machine import Machine
from undivided.request.call import Call
from undivided.request.problem import Problem
from undivided.request.request import Tensors
from undivided.request.result import Result

MOST_DECODE_ROWS = 64
"""(query, head) rows a key/value head up to which they share each read of the keys, as in decoding."""
MOST_SPLITS = 32
"""Shares that the keys are cut into at most; each writes an fp32 part."""
KEYS_PER_SPLIT = 256
"""Fewer keys than this are not worth a program of their own."""


class Triton(Backend):
    """Tiled attention on row ranges."""

    name = "triton"
    family = "flash"
    summary = "our Triton kernels: any mask, forward, backward and paged decoding"
    how_to_get = "pip install triton (torch for CUDA brings it)"
    limits = Limits(
        devices=frozenset({"cuda", "cpu"}),
        dtypes=frozenset({torch.float16, torch.bfloat16, torch.float32}),
        masks=ANY_PART,
        alignments=frozenset({"top_left", "bottom_right"}),
        features=ALL_FEATURES - {"strided"},
        compute_capability=((8, 0), None),
        packages=(("triton", (3, 4), None),),
        notes={"strided": "its rows are contiguous"},
    )

    def rank(self, problem: Problem, machine: Machine) -> float:
        """By the table in `gpu`."""
        return gpu.rank(self.name, machine)

    def unavailable(self, machine: Machine) -> str | None:
        """No GPU, and no interpreter that stands for one."""
        if self.needs_gpu(machine):
            return "no GPU (on a CPU only under Triton's interpreter: TRITON_INTERPRET=1)"
        return super().unavailable(machine)

    def needs_gpu(self, machine: Machine) -> bool:
        """No GPU, and no interpreter that stands for one."""
        return machine.compute_capability is None and not machine.hip and not config.is_interpreted()

    def reasons(self, problem: Problem, machine: Machine) -> list[str]:
        """The limits; on a CPU the interpreter must be on; pages have no gradient."""
        reasons = limit_reasons(self.limits, problem, machine) + gpu.size_reasons(problem)
        if problem.device == "cpu" and not config.is_interpreted():
            reasons.append("device=cpu (only under Triton's interpreter: TRITON_INTERPRET=1)")
        if {"paged", "backward"} <= problem.features:
            reasons.append("no gradients with paged keys and values")
        return reasons

    def only_when_asked(self, problem: Problem, machine: Machine) -> str | None:
        """The interpreter is for tests."""
        return "runs under Triton's interpreter here, for tests" if problem.device == "cpu" else None

    def forward(self, call: Call, tensors: Tensors) -> Result:
        """One launch (and one that merges split keys) for every part of the rows; mostly there is one part."""
        problem = call.problem
        inputs = Inputs(call, tensors)
        shape = (problem.batch, problem.q_len, problem.heads, problem.v_dim)
        out_BSHD = layout.empty(problem.layout, shape, tensors.q)
        out = out_BSHD.transpose(1, 2)
        lse = torch.empty((problem.batch, problem.heads, problem.q_len), dtype=torch.float32, device=tensors.q.device)
        for rows in inputs.parts():
            _forward(inputs, rows, out[:, :, rows.span], lse[:, :, rows.span])
        return Result(out_BSHD, lse).in_layout(problem.layout)

    def backward(
        self, call: Call, tensors: Tensors, result: Result, grad_out: Tensor, grad_lse: Tensor | None
    ) -> Gradients:
        """Three passes: over rows (dq, slopes), over keys (dk, dv), over pairs (a bias)."""
        from undivided.backends.triton import gradients as _triton_backward

        return _triton_backward.gradients(Inputs(call, tensors), result, grad_out, grad_lse)


def _forward(inputs: Inputs, rows: Rows, out: Tensor, lse: Tensor) -> None:
    """out [B, H, R, Dv] and lse [B, H, R] of these rows."""
    from undivided.kernels.triton import forward

    problem = inputs.problem
    q, length = inputs.q[:, :, rows.span], rows.span.stop - rows.span.start
    heads_per_kv = problem.heads // problem.kv_heads
    decoding = length * heads_per_kv <= MOST_DECODE_ROWS and rows.span.start == 0
    group = heads_per_kv if decoding else 1
    tile = inputs.tile("decode" if decoding else "forward")
    blocks = -(-length * group // tile.block_m)
    switches = inputs.switches(rows)
    value_steps = -(-problem.v_dim // switches["VALUE_STEP"])
    programs = blocks * value_steps * (problem.heads // group) * problem.batch
    splits = _splits(problem.kv_len, programs, processors(q.device)) if decoding else 1
    parts, part_lses = out[None], lse[None]
    if splits > 1:
        parts = out.new_empty((splits, problem.batch, problem.heads, length, problem.v_dim), dtype=torch.float32)
        part_lses = lse.new_empty((splits, problem.batch, problem.heads, length))
    tables = inputs.tiles(tile.block_m, tile.block_n, group).rows
    first_block = rows.span.start // tile.block_m
    described = inputs.described(tile, inputs.k, inputs.v, tile.block_n) or (inputs.k, inputs.v)
    forward.forward_kernel[blocks * value_steps * splits, problem.heads // group, problem.batch](
        q=q,
        k=described[0],
        v=described[1],
        out=parts,
        lse=part_lses,
        sinks=inputs.sinks,
        pages=inputs.pages,
        tiles=tables[:, first_block:],
        tiles_b=tables.stride(0) if tables.shape[0] > 1 else 0,
        kv_heads=problem.kv_heads,
        value_steps=value_steps,
        **_strides(q=q, k=inputs.k, v=inputs.v),
        **_paging(inputs),
        out_z=parts.stride(0),
        out_b=parts.stride(1),
        out_h=parts.stride(2),
        out_s=parts.stride(3),
        lse_z=part_lses.stride(0),
        lse_b=part_lses.stride(1),
        lse_h=part_lses.stride(2),
        **inputs.pointers(rows),
        **(switches | {"SINKS": switches["SINKS"] and splits == 1}),
        GROUP=group,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BIAS=inputs.bias is not None,
        PAGE=problem.page_size or 0,
        SPLITS=splits,
        PLAIN=inputs.plain and not switches["DENSE"],
        TMA=described[0] is not inputs.k,
        CLEAN=inputs.clean,
        SPECIALISE=inputs.specialised(tile, described[0] is not inputs.k),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if splits > 1:
        forward.combine_kernel[(problem.batch * problem.heads * length,)](
            parts,
            part_lses,
            out,
            lse,
            inputs.sinks,
            parts.stride(0),
            problem.v_dim,
            part_lses.stride(0),
            *strides(out)[:3],
            problem.heads,
            length,
            V_DIM=problem.v_dim,
            WIDTH=max(16, 1 << (problem.v_dim - 1).bit_length()),
            SPLITS=splits,
            SINKS=switches["SINKS"],
        )


def _splits(kv_len: int, programs: int, processors: int) -> int:
    """Shares of the keys, a power of two: enough programs for two a processor, and enough keys for each."""
    wanted = min(2 * processors // programs, -(-kv_len // KEYS_PER_SPLIT), MOST_SPLITS)
    return 1 << max(wanted, 1).bit_length() - 1


def _strides(**tensors: Tensor) -> dict[str, int]:
    """name_b, name_h and name_s of [B, H, S, D] tensors."""
    return {
        f"{name}_{axis}": stride
        for name, tensor in tensors.items()
        for axis, stride in zip("bhs", tensor.stride()[:3], strict=True)
    }


def _paging(inputs: Inputs) -> dict[str, Any]:
    return dict(zip(("pages_b", "k_page", "v_page", "num_pages"), inputs.page_strides, strict=True))


BACKEND = Triton()

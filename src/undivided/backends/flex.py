"""`flex`: PyTorch's FlexAttention, compiled. It takes any mask: ranges, dense tensors and predicates alike.

Memory: the mask is passed as a `BlockMask` built from row ranges (O(S + tiles)), never as an S x S tensor, unless the
mask is itself dense. It compiles for seconds for every new set of sizes, so it runs only if it is requested by name.

On the CPU, FlexAttention has no backward and cannot return the log-sum-exp (torch/_inductor/kernel/flex/flex_cpu.py);
`Result.lse` is then `UNREAD`: `lse`, `sinks` and gradients are refused there.

Source: FlexAttention (Dong et al. 2024, arXiv:2412.05496); torch/nn/attention/flex_attention.py.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from undivided.arguments import layout
from undivided.backends._base import ORDINARY_MASK_KINDS, Backend, Gradients, Limits, limit_reasons
from undivided.backends.shared import gpu_rules
from undivided.backends.shared.empty_rows import clear_rows, fix_empty_rows, rows_without_keys
from undivided.backends.shared.kernel_inputs import clean_tensors
from undivided.backends.shared.leaves import leaf_gradients, make_leaves, recording
from undivided.machine import Machine
from undivided.masks import NormalForm
from undivided.masks.normal_form import DensePairs, IdPairs, PredicatePairs, RangePairs
from undivided.request.call import Call
from undivided.request.problem import Problem
from undivided.request.request import Tensors
from undivided.request.result import UNREAD, Result

_BLOCK = 128  # FlexAttention's own default: its kernels' tiles divide it
_MAX_SIZES = 1 << 10  # sets of sizes that torch.compile compiles per process; its default is 8

_CPU_REASONS = {
    "backward": "no support for gradients on the CPU (FlexAttention has no CPU backward)",
    "lse": "no support for the log-sum-exp returned on the CPU (FlexAttention's CPU kernel does not return it)",
}

Index = Tensor
MaskMod = Callable[[Index, Index, Index, Index], Tensor]
ScoreMod = Callable[[Tensor, Index, Index, Index, Index], Tensor]


class Flex(Backend):
    """FlexAttention through torch.compile."""

    name = "flex"
    family = "flex"
    summary = "PyTorch's FlexAttention, compiled for each shape: any mask"
    how_to_get = "part of PyTorch 2.9 and later; on a CPU it needs a C++ compiler at run time (apt install g++)"
    limits = Limits(
        devices=frozenset({"cpu", "cuda"}),
        dtypes=frozenset({torch.float16, torch.bfloat16, torch.float32}),
        masks=ORDINARY_MASK_KINDS,
        alignments=frozenset({"top_left", "bottom_right"}),
        features=frozenset(
            "backward bias bias_grad alibi alibi_grad softcap gqa value_dim lse lse_grad strided".split()
        ),
        compute_capability=((7, 5), None),
        packages=(("torch", (2, 9), None),),
        notes={
            "dropout": "FlexAttention has none",
            "sinks": "they would round the output twice",
            "paged": "pages would be gathered into a copy",
        },
    )

    def unavailable(self, machine: Machine) -> str | None:
        """The reason if no C++ compiler can build the CPU kernel, or PyTorch is too old; otherwise None."""
        missing = super().unavailable(machine)
        if missing is None and machine.compute_capability is None:
            missing = _no_compiler(machine)
        return missing

    def reasons(self, problem: Problem, machine: Machine) -> list[str]:
        """The limits, then the rules that they cannot express."""
        reasons = limit_reasons(self.limits, problem, machine) + gpu_rules.size_reasons(problem)
        if problem.device == "cpu":
            reasons += [reason for feature, reason in _CPU_REASONS.items() if feature in problem.features]
            reasons += [missing] if (missing := _no_compiler(machine)) else []
            if machine.isa == "AVX2" and problem.kv_len % 16 == 8:
                note = "FlexAttention's CPU kernel returns wrong rows then, torch 2.13"
                reasons.append(f"key length {problem.kv_len} on AVX2, which is 8 above a multiple of 16 ({note})")
        if problem.device == "cuda":
            reasons += gpu_rules.hip_reasons(problem, machine)
            if "triton" not in machine.packages:
                reasons.append("triton is not installed (torch.compile needs it on a GPU)")
            if problem.deterministic and problem.features & {"bias_grad", "alibi_grad"}:
                reasons.append("deterministic gradients of a bias or of ALiBi slopes (they are summed by atomics)")
        return reasons

    def only_when_asked(self, problem: Problem, machine: Machine) -> str | None:
        """The reason for every problem: compiling takes seconds for every new set of sizes."""
        return "compiles for seconds per shape; request it with backend='flex'"

    def forward(self, call: Call, tensors: Tensors) -> Result:
        """Attention by compiled FlexAttention."""
        problem, tensors = call.problem, tensors.materialised()
        # FlexAttention refuses tensors that require a gradient on the CPU, also under no_grad
        tensors = Tensors._make(None if tensor is None else tensor.detach() for tensor in tensors)
        form = call.normal_form(tensors.q)
        inputs, settings = _inputs(call, tensors, form), _settings(call, tensors, form)
        if problem.device == "cpu":
            out = _compiled()(*inputs, **settings).transpose(1, 2)
            return Result(fix_empty_rows(call, tensors, out, UNREAD).out, UNREAD).in_layout(problem.layout)
        out, lse = _with_lse(inputs, settings)
        return fix_empty_rows(call, tensors, out.transpose(1, 2), lse).in_layout(problem.layout)

    def backward(
        self, call: Call, tensors: Tensors, result: Result, grad_out: Tensor, grad_lse: Tensor | None
    ) -> Gradients:
        """Runs the forward again under autograd: FlexAttention has no backward that takes (out, lse)."""
        problem, tensors = call.problem, tensors.materialised()
        form = call.normal_form(tensors.q)
        leaves = Tensors._make(make_leaves(tensors, call.needs))
        with recording():
            out, lse = _with_lse(_inputs(call, leaves, form), _settings(call, leaves, form))
        outputs = [out]
        grads = [clear_rows(layout.canonical(grad_out, problem.layout), form).transpose(1, 2)]
        if grad_lse is not None:
            outputs.append(lse)
            grads.append(grad_lse.masked_fill(rows_without_keys(form), 0.0))
        return leaf_gradients(outputs, grads, leaves)


def bind_kernel(call: Call, tensors: Tensors) -> Callable[[], Tensor]:
    """A function that runs FlexAttention alone, on inputs and a block mask that are built here: -> [B, H, Sq, Dv]."""
    form = call.normal_form(tensors.q)
    inputs, settings = _inputs(call, tensors, form), _settings(call, tensors, form)
    return lambda: _compiled()(*inputs, **settings)


def _no_compiler(machine: Machine) -> str | None:
    """Why the CPU kernel cannot be compiled here; a described machine is assumed to have a compiler."""
    if not machine.probed and machine.device is not None:
        return None
    if sys.platform == "darwin":
        return "FlexAttention's CPU kernel does not run on macOS"
    if machine.isa and not machine.isa.startswith("AVX"):
        return f"instruction set {machine.isa} (FlexAttention's CPU kernel needs AVX2)"
    candidates = [name for name in (os.environ.get("CXX"), "g++", "clang++") if name]
    if not any(map(shutil.which, candidates)):
        return "no C++ compiler ($CXX, g++ or clang++) in PATH"
    return None


@functools.cache
def _compiled() -> Callable[..., Any]:
    """FlexAttention under torch.compile; a size that it cannot compile is an error and never runs uncompiled."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Any = torch.compile(flex_attention, fullgraph=True, dynamic=False)

    def call(*tensors: Tensor, **settings: Any) -> Any:
        limits = torch._dynamo.config.patch(recompile_limit=_MAX_SIZES, accumulated_recompile_limit=_MAX_SIZES)
        with limits, warnings.catch_warnings():
            # Inductor itself imports torch.jit (2.13), whose warning would be an error under `python -W error`
            for category in (DeprecationWarning, FutureWarning):  # the second from torch 2.14 on
                warnings.filterwarnings("ignore", message=".*torch.jit", category=category)
            return compiled(*tensors, **settings)

    return call


def _with_lse(tensors: tuple[Tensor, ...], settings: dict[str, Any]) -> tuple[Tensor, Tensor]:
    from torch.nn.attention.flex_attention import AuxRequest

    out, extra = _compiled()(*tensors, **settings, return_aux=AuxRequest(lse=True))
    return out, extra.lse


def _inputs(call: Call, tensors: Tensors, form: NormalForm) -> tuple[Tensor, ...]:
    """q, k, v as [B, H, S, D], without garbage: FlexAttention multiplies what it masks by 0."""
    return tuple(t.transpose(1, 2) for t in clean_tensors(call, tensors, form))


def _settings(call: Call, tensors: Tensors, form: NormalForm) -> dict[str, Any]:
    problem = call.problem
    return {
        "score_mod": _score_mod(call, tensors, form),
        "block_mask": None if call.mask.is_full else _block_mask(problem, form),
        "scale": call.scale,
        "enable_gqa": problem.heads != problem.kv_heads,
    }


def _block_mask(problem: Problem, form: NormalForm) -> Any:
    """The mask as FlexAttention takes it: which tiles hold allowed pairs, and a function that decides single pairs."""
    from torch.nn.attention.flex_attention import BlockMask

    tiles = form.tiles(_BLOCK, _BLOCK)
    full = tiles == 2
    full[..., problem.q_len // _BLOCK :, :] = False  # a tile that extends past the end is not full
    full[..., problem.kv_len // _BLOCK :] = False
    partial = (tiles > 0) & ~full
    return BlockMask.from_kv_blocks(
        *_key_tile_lists(partial),
        *_key_tile_lists(full),
        BLOCK_SIZE=_BLOCK,
        mask_mod=_mask_mod(form),
        seq_lengths=(problem.q_len, problem.kv_len),
    )


def _key_tile_lists(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """(number, indices) of the key tiles of each row of tiles, int32; the indices are in order, padded with others."""
    order = tiles.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return tiles.sum(-1, dtype=torch.int32), order.to(torch.int32).contiguous()


def _mask_mod(form: NormalForm) -> MaskMod:
    """The pairs as a function of indices that torch.compile can follow."""
    mods = [_range_mod(form.ranges), *map(_extra_mod, form.extras)]
    if len(mods) == 1:
        return mods[0]

    def every(b: Index, h: Index, i: Index, j: Index) -> Tensor:
        allowed = mods[0](b, h, i, j)
        for mod in mods[1:]:
            allowed = allowed & mod(b, h, i, j)
        return allowed

    return every


def _range_mod(ranges: Tensor) -> MaskMod:
    one_batch, two = ranges.shape[0] == 1, ranges.shape[-1] == 4
    # `contiguous` would return views of one buffer for a single row, and Inductor's CPU kernel confuses those
    columns = [column.clone(memory_format=torch.contiguous_format) for column in ranges.unbind(-1)]

    def first(b: Index, h: Index, i: Index, j: Index) -> Tensor:
        b = b * 0 if one_batch else b
        return (j >= columns[0][b, i]) & (j < columns[1][b, i])

    def either(b: Index, h: Index, i: Index, j: Index) -> Tensor:
        b0 = b * 0 if one_batch else b
        return first(b, h, i, j) | ((j >= columns[2][b0, i]) & (j < columns[3][b0, i]))

    return either if two else first


def _predicate_mod(extra: PredicatePairs) -> MaskMod:
    """The predicate; it gets the index of a real token in place of that of a padding token, as in `PredicatePairs`."""
    fn, rows, keys = extra.fn, extra.rows, extra.keys
    if rows is None and keys is None:
        return fn

    def real(b: Index, h: Index, i: Index, j: Index) -> Tensor:
        return fn(b, h, i if rows is None else _broadcast(rows, b, i), j if keys is None else _broadcast(keys, b, j))

    return real


def _extra_mod(extra: object) -> MaskMod:
    if isinstance(extra, RangePairs):
        return _range_mod(extra.ranges)
    if isinstance(extra, PredicatePairs):
        return _predicate_mod(extra)
    if isinstance(extra, DensePairs):
        return lambda b, h, i, j: _broadcast(extra.tensor, b, h, i, j)
    assert isinstance(extra, IdPairs)
    ids_q, ids_kv = extra.ids_q, extra.ids_kv

    def same(b: Index, h: Index, i: Index, j: Index) -> Tensor:
        mine = _broadcast(ids_q, b, i)
        return (mine == _broadcast(ids_kv, b, j)) & (mine >= 0)

    return same


def _broadcast(tensor: Tensor, *indices: Index) -> Tensor:
    """``tensor[indices]``, where the index of a broadcast axis is 0."""
    return tensor[tuple(index * 0 if size == 1 else index for size, index in zip(tensor.shape, indices, strict=True))]


def _score_mod(call: Call, tensors: Tensors, form: NormalForm) -> ScoreMod | None:
    """Softcap, then ALiBi, then the bias; None if the call has none of them."""
    softcap, slopes, bias = call.softcap, tensors.alibi_slopes, tensors.bias
    if softcap is None and slopes is None and bias is None:
        return None
    if slopes is not None:
        anchor = form.q_position + form.shift
        keys, sequence, slopes = form.kv_position, form.q_sequence, slopes.float()

    def modified(score: Tensor, b: Index, h: Index, i: Index, j: Index) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if slopes is not None:
            slope = slopes[h] if slopes.dim() == 1 else slopes[_broadcast(sequence, b, i), h]
            score = score - slope * (_broadcast(anchor, b, i) - _broadcast(keys, b, j)).abs()
        if bias is not None:
            score = score + _broadcast(bias, b, h, i, j)
        return score

    return modified


BACKEND = Flex()

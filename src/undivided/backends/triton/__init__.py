"""`triton`: our own GPU kernels, for every mask and feature. Without a GPU, tests run them under Triton's interpreter.

The kernels read the mask's row ranges, visit only tiles that hold an allowed pair, and skip mask arithmetic in full
tiles. Nothing here waits for the device. The kernels are in `undivided.kernels.triton`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from undivided.arguments import layout
from undivided.backends._base import ALL_FEATURES, ANY_PART, Backend, Gradients, Limits, limit_reasons
from undivided.backends.shared import gpu
from undivided.backends.triton import chosen, invariant, packs, plans
from undivided.backends.triton.descriptors import without_tensor
from undivided.backends.triton.inputs import Inputs, Rows, axis_strides, processors, strides
from undivided.backends.triton.launches import Launch, launch
from undivided.kernels.triton import config
from undivided.machine import Machine
from undivided.request.call import Call
from undivided.request.problem import Problem
from undivided.request.request import Tensors
from undivided.request.result import Result

MAX_DECODE_ROWS = 64
"""Up to this many (query, head) rows per key/value head share one tile, and with it each read of the keys
(decoding)."""
MAX_DECODE_QUERIES = 4
"""Up to this many queries are decoded even if all heads of a key/value head have more rows: as many heads as fit share
a tile (DeepSeek V3 has 128 heads over one)."""
MAX_SHORT = 16
"""Queries of a document that is decoded in a pack. With more, tiles of 16 rows would read keys more often than tiles of
64 rows of each head."""
MAX_SPLITS = 32
"""Upper limit of split-KV; each split writes an fp32 part."""
KEYS_PER_SPLIT = 256
"""A split with fewer keys costs more than it saves."""


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
        batch_invariant=True,
        compute_capability=((8, 0), None),
        packages=(("triton", (3, 4), None),),
        notes={"strided": "its rows are contiguous"},
    )

    def rank(self, problem: Problem, machine: Machine) -> float:
        """By the table in `gpu`."""
        return gpu.rank(self.name, problem, machine)

    def unavailable(self, machine: Machine) -> str | None:
        """Without a GPU, unless Triton's interpreter is on."""
        if self.needs_gpu(machine):
            return "no GPU (on a CPU only under Triton's interpreter: TRITON_INTERPRET=1)"
        return super().unavailable(machine)

    def needs_gpu(self, machine: Machine) -> bool:
        """Whether there is no GPU, and Triton's interpreter is off."""
        return machine.compute_capability is None and not machine.hip and not config.is_interpreted()

    def reasons(self, problem: Problem, machine: Machine) -> list[str]:
        """The limits; on a CPU the interpreter must be on; pages have no gradient."""
        reasons = limit_reasons(self.limits, problem, machine) + gpu.size_reasons(problem)
        if problem.device == "cpu" and not config.is_interpreted():
            reasons.append("device=cpu (only under Triton's interpreter: TRITON_INTERPRET=1)")
        if problem.batch_invariant and (evaluated := _evaluated(problem)):
            reasons.append(f"batch-invariant results with {evaluated}, whose pairs are added in an order of their own")
        if {"paged", "backward"} <= problem.features:
            reasons.append("no gradients with paged keys and values")
        return reasons

    def only_when_asked(self, problem: Problem, machine: Machine) -> str | None:
        """The interpreter is for tests."""
        return "runs under Triton's interpreter here, for tests" if problem.device == "cpu" else None

    def notes(self, call: Call, tensors: Tensors) -> list[str]:
        """Whether only the chosen blocks are computed."""
        return chosen.notes(call, tensors) if "blocks" in call.problem.mask.kinds else []

    def forward(self, call: Call, tensors: Tensors) -> Result:
        """One launch per block of rows, usually one in all, and one more if keys are split."""
        known = plans.find(call, tensors)
        if known is not None:
            return known.run(call, tensors)
        problem = call.problem
        if "blocks" in problem.mask.kinds and (result := chosen.forward(call, tensors, self.forward)) is not None:
            return result
        inputs = Inputs(call, tensors)
        shape = (problem.batch, problem.q_len, problem.heads, problem.v_dim)
        out_BSHD = layout.empty(problem.layout, shape, tensors.q)
        out = out_BSHD.transpose(1, 2)
        lse = torch.empty((problem.batch, problem.heads, problem.q_len), dtype=torch.float32, device=tensors.q.device)
        for rows in inputs.parts():
            launched = [
                _forward(inputs, rows, blocks, out[:, :, rows.span], lse[:, :, rows.span])
                for blocks in _all_blocks(inputs, rows)
            ]
            if rows.span == slice(0, problem.q_len):
                plans.keep(call, inputs, launched)
        return Result(out_BSHD, lse).in_layout(problem.layout)

    def backward(
        self, call: Call, tensors: Tensors, result: Result, grad_out: Tensor, grad_lse: Tensor | None
    ) -> Gradients:
        """Three passes: over rows (dq, slopes), over keys (dk, dv), over pairs (bias)."""
        from undivided.backends.triton import gradients as _triton_backward

        return _triton_backward.gradients(Inputs(call, tensors), result, grad_out, grad_lse)


def _evaluated(problem: Problem) -> str:
    """What the kernels read or evaluate for every pair, so that Triton's compiler chooses a layout for it; "" if none.

    A layout decides in which order a row is added, and depends on strides, which depend on the lengths of a call.
    """
    words = sorted(problem.mask.kinds & {"dense", "predicate", "tree", "blocks"})
    words += ["bias"] if problem.bias is not None else []
    words += ["two unions"] if [name for name, *_ in problem.mask.detail].count("global") > 1 else []
    return ", ".join(words)


class _Blocks(NamedTuple):
    """How a launch divides its work: `number` blocks of rows, of `group` heads per query, and `splits` parts of keys.

    steps: of columns. runs: the tiles of each block. places: of the blocks, None if they follow one another.
    """

    tile: config.Config
    steps: config.Steps
    group: int
    number: int
    splits: int
    runs: Tensor
    places: Tensor | None


def _forward(inputs: Inputs, rows: Rows, blocks: _Blocks, out: Tensor, lse: Tensor) -> plans.Plan | None:
    """Compute out [B, H, R, Dv] and lse [B, H, R] of these blocks. Returns what a repeated call needs; None under
    Triton's interpreter."""
    from undivided.kernels.triton import forward

    problem = inputs.problem
    tile, steps, group, number, splits, runs, places = blocks
    q, length = inputs.q[:, :, rows.span], rows.span.stop - rows.span.start
    value_steps = -(-problem.v_dim // steps.values)
    parts, part_lses = out[None], lse[None]
    if splits > 1:
        heads, per_head = (problem.heads, length) if places is None else (problem.heads // group, number * tile.block_m)
        parts = out.new_empty((splits, problem.batch, heads, per_head, problem.v_dim), dtype=torch.float32)
        part_lses = lse.new_empty((splits, problem.batch, heads, per_head))
    descriptors = inputs.descriptors(tile, inputs.k, inputs.v, tile.block_n)
    tensors = {
        "q": q,
        "k": inputs.k,
        "v": inputs.v,
        "out": parts,
        "lse": part_lses,
        "tiles": runs,
        **inputs.pointers(rows),
        **inputs.forward_only(),
    }
    if places is not None:
        tensors["places"] = places
    latent = inputs.values_are_keys and steps.first == steps.values == problem.v_dim and descriptors is None
    latent = latent and not problem.batch_invariant  # whether v is a part of k would decide on the order of sums
    # what lies between two documents is not between keys of one block of a pack
    of_pack = places is not None and not problem.batch_invariant and not inputs.always_masked
    clean = min(inputs.clean, 1) if of_pack else inputs.clean

    def others() -> dict[str, Any]:
        switches = inputs.switches(rows)
        return {
            "tiles_b": strides(runs)[0],
            "places_b": 0 if places is None else strides(places)[0],
            "value_steps": value_steps,
            **axis_strides(q=q, k=inputs.k, v=inputs.v),
            **_paging(inputs),
            **inputs.scale_strides(tensors),
            "out_z": parts.stride(0),
            "out_b": parts.stride(1),
            "out_h": parts.stride(2),
            "out_s": parts.stride(3),
            "lse_z": part_lses.stride(0),
            "lse_b": part_lses.stride(1),
            "lse_h": part_lses.stride(2),
            **inputs.placeholders(forward.forward_kernel, tensors),
            **inputs.pointer_strides(tensors),
            **switches,
            "SINKS": switches["SINKS"] and splits == 1,
            "DIM_STEP": steps.first,
            "MORE_STEP": steps.more,
            "VALUE_STEP": steps.values,
            "LATENT": latent,
            "GROUP": group,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "BIAS": inputs.bias is not None,
            "PAGE": problem.page_size or 0,
            "SPLITS": splits,
            "PLAIN": inputs.plain and not switches["DENSE"],
            "TMA": descriptors is not None,
            "CLEAN": clean,
            "PLACES": places is not None,
            "INVARIANT": problem.batch_invariant,
            "SPECIALISE": inputs.uses_warp_specialisation(tile, descriptors is not None),
            "num_warps": tile.warps,
            "num_stages": inputs.stages(tile),
        }

    launched = launch(
        forward.forward_kernel,
        (number * value_steps * splits, problem.heads // group, problem.batch),
        (*inputs.facts(rows), tile, steps, group, splits, places is not None, descriptors is not None, latent),
        tensors,
        others,
        None if descriptors is None else dict(zip("kv", descriptors, strict=True)),
    )
    combined = _combine(inputs, blocks, parts, part_lses, out, lse) if splits > 1 else None
    if launched is None:
        return None
    kept = {name: tensor for name, tensor in tensors.items() if name in ("tiles", "ranges", "places")}
    described = None if descriptors is None else (*map(without_tensor, descriptors),)
    return plans.Plan(launched, combined, parts.shape, kept, described)


def _all_blocks(inputs: Inputs, rows: Rows) -> list[_Blocks]:
    """The blocks of each launch that these rows need."""
    if not inputs.problem.batch_invariant and packs.applies(inputs.call, inputs.form):
        return _blocks_of_documents(inputs)
    return [_blocks(inputs, rows)]


def _blocks(inputs: Inputs, rows: Rows) -> _Blocks:
    problem, length = inputs.problem, rows.span.stop - rows.span.start
    if problem.batch_invariant:
        tile, group = inputs.tile("forward"), problem.heads // problem.kv_heads
        blocks = invariant.blocks(
            inputs.form if inputs.masked else None, problem, rows.span, tile, group, inputs.q.device
        )
        return _Blocks(tile, _steps(problem, "forward"), group, blocks.number, 1, blocks.runs, blocks.places)
    few = length * problem.heads <= MAX_DECODE_ROWS * problem.kv_heads or length <= MAX_DECODE_QUERIES
    decoding = few and rows.span.start == 0
    group = _heads_of_a_tile(problem, length) if decoding else 1
    name = "decode" if decoding else "forward"
    tile, steps = inputs.tile(name), _steps(problem, name)
    count = -(-length * group // tile.block_m)
    programs = count * -(-problem.v_dim // steps.values) * (problem.heads // group) * problem.batch
    splits = _splits(problem.kv_len, programs, processors(inputs.q.device)) if decoding else 1
    runs = inputs.tiles(tile.block_m, tile.block_n, group).rows
    return _Blocks(tile, steps, group, count, splits, runs[:, rows.span.start // tile.block_m :], None)


def _blocks_of_documents(inputs: Inputs) -> list[_Blocks]:
    """The blocks of long documents and those of short ones, or of one kind if that is known (see `packs`)."""
    problem = inputs.problem
    assert problem.documents is not None
    group = _heads_of_a_tile(problem, MAX_DECODE_QUERIES)
    short = min(MAX_DECODE_ROWS // group, MAX_SHORT)
    longest = problem.documents[1]
    if longest is not None and longest <= short:
        return [_blocks_of_some(inputs, "decode", group, 0, None)]
    return [_blocks_of_some(inputs, "forward", 1, short + 1, None), _blocks_of_some(inputs, "decode", group, 0, short)]


def _blocks_of_some(inputs: Inputs, name: str, group: int, shortest: int, longest: int | None) -> _Blocks:
    """The blocks, for the tile sizes of a pass, of the documents of `shortest` to `longest` queries."""
    problem, form = inputs.problem, inputs.form
    assert form is not None and problem.documents is not None
    number, _, longest_kv = problem.documents
    tile, steps, splits = inputs.tile(name), _steps(problem, name), 1
    blocks = packs.blocks(form, problem.q_len, tile, group, inputs.always_masked, shortest, longest)
    if name == "decode":
        keys = min(longest_kv or problem.kv_len, -(-problem.kv_len // number))
        programs = number * -(-problem.v_dim // steps.values) * (problem.heads // group)
        splits = _splits(keys, programs, processors(inputs.q.device))
    return _Blocks(tile, steps, group, blocks.places.shape[1], splits, blocks.runs, blocks.places)


def _heads_of_a_tile(problem: Problem, queries: int) -> int:
    """How many heads of a key/value head share a tile of so many queries: all, or the largest part that fits."""
    heads = problem.heads // problem.kv_heads
    return max(n for n in range(1, heads + 1) if heads % n == 0 and (n == 1 or n * queries <= MAX_DECODE_ROWS))


def _steps(problem: Problem, name: str) -> config.Steps:
    """The steps of columns of a pass."""
    few_bytes = problem.dtype.itemsize == 2 and problem.quantized is None
    return config.column_steps(problem.qk_dim, problem.v_dim, name == "decode" and few_bytes)


def _combine(
    inputs: Inputs, blocks: _Blocks, parts: Tensor, part_lses: Tensor, out: Tensor, lse: Tensor
) -> Launch | None:
    """Merge the parts [splits, B, H, R, Dv] and their lse [splits, B, H, R] into out and lse; sinks enter here."""
    from undivided.kernels.triton import forward

    splits, batch, heads, length, v_dim = parts.shape
    tensors = {"parts": parts, "part_lses": part_lses, "out": out, "lse": lse}
    if blocks.places is not None:
        tensors["places"] = blocks.places
    if inputs.sinks is not None:
        tensors["sinks"] = inputs.sinks
    return launch(
        forward.combine_kernel,
        (batch * heads * length, 1, 1),
        (blocks.tile.block_m, blocks.group),
        tensors,
        lambda: {
            **inputs.placeholders(forward.combine_kernel, tensors),
            "part_z": parts.stride(0),
            "part_row": v_dim,
            "lse_z": part_lses.stride(0),
            **dict(zip(("out_b", "out_h", "out_s"), strides(out), strict=False)),
            **dict(zip(("lse_b", "lse_h"), strides(lse), strict=False)),
            "heads": heads,
            "q_len": length,
            "V_DIM": v_dim,
            "WIDTH": max(16, 1 << (v_dim - 1).bit_length()),
            "SPLITS": splits,
            "SINKS": inputs.sinks is not None,
            "PLACES": blocks.places is not None,
            "BLOCK_M": blocks.tile.block_m,
            "GROUP": blocks.group,
        },
    )


def _splits(kv_len: int, programs: int, processors: int) -> int:
    """Number of splits of the keys, a power of two: up to two programs per processor, with enough keys in each."""
    splits = min(2 * processors // programs, -(-kv_len // KEYS_PER_SPLIT), MAX_SPLITS)
    return 1 << max(splits, 1).bit_length() - 1


def _paging(inputs: Inputs) -> dict[str, Any]:
    return dict(zip(("pages_b", "k_page", "v_page", "num_pages"), inputs.page_strides, strict=True))


BACKEND = Triton()

"""The forward of the `triton` backend: the launch of its kernel, and of the merge if keys are split."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from undivided.backends.triton import invariant
from undivided.backends.triton.blocks import LaunchBlocks
from undivided.backends.triton.inputs import KernelInputs, axis_strides, strides
from undivided.backends.triton.kept_launches import ForwardLaunch, KeptLaunch
from undivided.backends.triton.launches import ALIGNMENT, Launch, launch
from undivided.backends.triton.rows import Rows
from undivided.masks import NormalForm

MAX_ROWS_OF_WORDS = 32
"""Rows of a block for which words of quantised numbers are read."""
MIN_WORDS = 16
"""Words per row, at least: Triton multiplies no smaller tiles."""
MAX_TOGETHER = 8
"""Pieces of a row that the merge loads at once."""


def compute(inputs: KernelInputs, rows: Rows, blocks: LaunchBlocks, out: Tensor, lse: Tensor) -> ForwardLaunch | None:
    """What the next such call needs, after out [B, H, R, Dv] and lse [B, H, R] of these blocks are computed; None under
    Triton's interpreter."""
    return _Forward(inputs, rows, blocks, out, lse).run()


class _Forward:
    def __init__(self, inputs: KernelInputs, rows: Rows, blocks: LaunchBlocks, out: Tensor, lse: Tensor) -> None:
        self.inputs, self.problem, self.rows, self.blocks = inputs, inputs.problem, rows, blocks
        self.out, self.lse = out, lse
        self.in_pieces = inputs.problem.batch_invariant and blocks.splits > 1
        self.partials, self.partial_lses = (out[None], lse[None]) if blocks.splits == 1 else self._empty_partials()
        self.descriptors = inputs.descriptors(blocks.tile, k=inputs.k, v=inputs.v)
        self.value_steps = -(-self.problem.v_dim // blocks.steps.values)

    def run(self) -> ForwardLaunch | None:
        from undivided.kernels.triton.forward import forward_kernel

        problem, blocks, tensors = self.problem, self.blocks, self._tensors()
        launched = launch(
            forward_kernel,
            (blocks.number * self.value_steps * blocks.splits, problem.heads // blocks.group, problem.batch),
            self._facts(),
            tensors,
            lambda: self._others(forward_kernel, tensors),
            self.descriptors,
        )
        merged = None
        if blocks.splits > 1:
            merged = self._merge_pieces() if self.in_pieces else self._merge_splits()
        if launched is None:
            return None
        kept = KeptLaunch.from_launch(launched, tensors, self.descriptors)
        return ForwardLaunch(kept, merged, self.partials.shape, self._tensors_of())

    def _tensors_of(self) -> Callable[[NormalForm], dict[str, Tensor]] | None:
        """`ForwardLaunch.tensors_of`. The function keeps nothing of this call alive."""
        if (tile_ranges_of := self.blocks.tile_ranges_of) is None:
            return None
        return lambda form: {"tiles": tile_ranges_of(form), "ranges": form.table}

    def _empty_partials(self) -> tuple[Tensor, Tensor]:
        """Memory for the results of each split of the keys: [splits, B, H, R, Dv] and [splits, B, H, R], fp32. Rows are
        those of the call, or in a pack those of its blocks. Of pieces: [pieces, B, G, pairs, Dv], and largest scores
        and sums of weights, [2, pieces, B, G, pairs]."""
        problem, blocks = self.problem, self.blocks
        heads, rows = self.out.shape[1:3]
        if self.in_pieces:
            sizes = invariant.pieces(problem), problem.batch, heads // blocks.group, rows * blocks.group
            return self.lse.new_empty((*sizes, problem.v_dim)), self.lse.new_empty((2, *sizes))
        if blocks.places is not None:
            heads, rows = problem.heads // blocks.group, blocks.number * blocks.tile.block_m
        shape = blocks.splits, problem.batch, heads, rows
        return self.out.new_empty((*shape, problem.v_dim), dtype=torch.float32), self.lse.new_empty(shape)

    def _tensors(self) -> dict[str, Tensor]:
        inputs, places = self.inputs, self.blocks.places
        return {
            "q": inputs.q[:, :, self.rows.span],
            "k": self._keys(inputs.k),
            "v": self._keys(inputs.v),
            "out": self.partials,
            "lse": self.partial_lses,
            "tiles": self.blocks.tile_ranges,
            **inputs.pointers(self.rows),
            **inputs.forward_only(),
            **({} if places is None else {"places": places}),
        }

    def _facts(self) -> tuple[Any, ...]:
        blocks = self.blocks
        of_blocks = blocks.tile, blocks.steps, blocks.group, blocks.splits, blocks.places is not None
        return (*self.inputs.facts(self.rows), *of_blocks, bool(self.descriptors), self._latent, self._words)

    def _others(self, kernel: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """The arguments of the kernel besides its tensors, and the options of its compilation."""
        inputs, problem, blocks = self.inputs, self.problem, self.blocks
        partials, partial_lses, steps = self.partials, self.partial_lses, blocks.steps
        switches = inputs.switches(self.rows)
        return {
            "tiles_b": strides(blocks.tile_ranges)[0],
            "places_b": 0 if blocks.places is None else strides(blocks.places)[0],
            "value_steps": self.value_steps,
            **axis_strides(**{name: tensors[name] for name in "qkv"}),
            **self._page_strides(tensors),
            **inputs.scale_strides(tensors),
            **self._tree(tensors),
            **dict(zip(("out_z", "out_b", "out_h", "out_s"), partials.stride(), strict=False)),
            **dict(zip(("lse_z", "lse_b", "lse_h"), partial_lses.stride()[-4:], strict=False)),
            "pieces": invariant.pieces(problem) if self.in_pieces else 0,  # others need not compile for each number
            **inputs.placeholders(kernel, tensors),
            **inputs.pointer_strides(tensors),
            **switches,
            "SINKS": switches["SINKS"] and blocks.splits == 1,
            "DIM_STEP": steps.first,
            "MORE_STEP": steps.more,
            "VALUE_STEP": steps.values,
            "LATENT": self._latent,
            "WORDS": self._words,
            "GROUP": blocks.group,
            "BLOCK_M": blocks.tile.block_m,
            "BLOCK_N": blocks.tile.block_n,
            "BIAS": inputs.bias is not None,
            "PAGE": problem.page_size or 0,
            "SPLITS": blocks.splits,
            "PLAIN": inputs.plain and not switches["DENSE"],
            "TMA": bool(self.descriptors),
            "CLEAN": self._clean,
            "PLACES": blocks.places is not None,
            "INVARIANT": problem.batch_invariant,
            "PIECE": invariant.piece(),
            "SPECIALISE": inputs.uses_warp_specialisation(blocks.tile, bool(self.descriptors)),
            "num_warps": blocks.tile.warps,
            "num_stages": inputs.stages(blocks.tile),
        }

    def _keys(self, numbers: Tensor) -> Tensor:
        """Keys or values as the kernel reads them."""
        return numbers.view(torch.int16) if self._words else numbers

    def _page_strides(self, tensors: dict[str, Tensor]) -> dict[str, int]:
        if self.inputs.pages is None:
            return {"pages_b": 0, "k_page": 0, "v_page": 0, "num_pages": 0}
        pages_b = 0 if self.problem.packed else self.inputs.pages.stride(0)
        k, v = tensors["k"], tensors["v"]
        return {"pages_b": pages_b, "k_page": k.stride(0), "v_page": v.stride(0), "num_pages": k.shape[0]}

    @functools.cached_property
    def _words(self) -> int:
        """The numbers in each 16-bit word, if quantised keys and values are read as words (`load_pairs` and
        `load_nibbles` in `kernels.triton.words`); otherwise 0.

        Blocks of many rows are multiplied by other instructions, which read numbers from shared memory in any case. In
        batch-invariant calls never: it decides in which order numbers are added.
        """
        inputs, problem, blocks = self.inputs, self.problem, self.blocks
        if problem.quantized is None or problem.dtype.itemsize != 2 or problem.batch_invariant:
            return 0
        many = blocks.tile.block_m > MAX_ROWS_OF_WORDS or blocks.steps.first < problem.qk_dim
        numbers = 4 if problem.quantized == "int4" else 2
        few_columns = min(blocks.steps.first, blocks.steps.values) < MIN_WORDS * numbers
        return 0 if many or few_columns or not all(map(_has_words, (inputs.k, inputs.v))) else numbers

    def _tree(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """The arguments of a draft tree."""
        if self.inputs.tree is None:
            return {"ancestors_b": 0, "ancestors_q": 0, "tree_first_b": 0, "nodes": 0, "TREE": False}
        ancestors, first = tensors["ancestors"], tensors["tree_first"]
        return {
            "ancestors_b": strides(ancestors)[0],
            "ancestors_q": ancestors.stride(1),
            "tree_first_b": strides(first)[0],
            "nodes": ancestors.shape[2],
            "TREE": True,
        }

    @property
    def _latent(self) -> bool:
        """Whether values are read from the tile of keys that they are a part of. In batch-invariant calls never: it
        would decide in which order numbers are added."""
        inputs, problem, steps = self.inputs, self.problem, self.blocks.steps
        one_step = steps.first == steps.values == problem.v_dim
        return inputs.values_are_keys and one_step and not self.descriptors and not problem.batch_invariant

    @property
    def _clean(self) -> int:
        """As `KernelInputs.clean`; what lies between two documents is not between keys of one block of a pack."""
        inputs = self.inputs
        one_document = self.blocks.places is not None and not self.problem.batch_invariant
        one_range = not inputs.always_masked and "global" not in self.problem.mask.kinds
        return min(inputs.clean, 1) if one_document and one_range else inputs.clean

    def _merge_splits(self) -> Launch | None:
        """Merge the partial results into out and lse; sinks enter here."""
        from undivided.kernels.triton.merging import combine_kernel

        inputs, blocks = self.inputs, self.blocks
        _, batch, heads, rows, _ = self.partials.shape
        tensors = {"partials": self.partials, "partial_lses": self.partial_lses, "out": self.out, "lse": self.lse}
        if blocks.places is not None:
            tensors["places"] = blocks.places
        if inputs.sinks is not None:
            tensors["sinks"] = inputs.sinks
        return launch(
            combine_kernel,
            (batch * heads * rows, 1, 1),
            (blocks.tile.block_m, blocks.group),
            tensors,
            lambda: {
                **self._others_of_merge(combine_kernel, tensors),
                "partial_z": self.partials.stride(0),
                "partial_row": self.problem.v_dim,
                "lse_z": self.partial_lses.stride(0),
                "heads": heads,
                "q_len": rows,
                "SPLITS": blocks.splits,
                "PLACES": blocks.places is not None,
                "BLOCK_M": blocks.tile.block_m,
            },
        )

    def _merge_pieces(self) -> Launch | None:
        """Merge the pieces of a batch-invariant call into out and lse, in their order."""
        from undivided.kernels.triton.merging import merge_pieces_kernel

        inputs = self.inputs
        number, batch, groups, rows, _ = self.partials.shape
        tops, totals = self.partial_lses
        tensors = {"pieces": self.partials, "tops": tops, "totals": totals, "out": self.out, "lse": self.lse}
        if inputs.sinks is not None:
            tensors["sinks"] = inputs.sinks
        return launch(
            merge_pieces_kernel,
            (batch * groups * rows, 1, 1),
            (self.blocks.group,),
            tensors,
            lambda: {
                **self._others_of_merge(merge_pieces_kernel, tensors),
                "piece_z": self.partials.stride(0),
                "row_z": tops.stride(0),
                "rows": rows,
                "groups": groups,
                "number": number,
                "TOGETHER": min(1 << (number - 1).bit_length(), MAX_TOGETHER),
            },
        )

    def _others_of_merge(self, kernel: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """The other arguments that both merges have."""
        v_dim = self.problem.v_dim
        return {
            **self.inputs.placeholders(kernel, tensors),
            **dict(zip(("out_b", "out_h", "out_s"), strides(self.out), strict=False)),
            **dict(zip(("lse_b", "lse_h"), strides(self.lse), strict=False)),
            "V_DIM": v_dim,
            "WIDTH": max(16, 1 << (v_dim - 1).bit_length()),
            "SINKS": self.inputs.sinks is not None,
            "GROUP": self.blocks.group,
        }


def _has_words(numbers: Tensor) -> bool:
    """Whether every row of bytes consists of 16-bit words. Launches are remembered by the alignment that decides it."""
    even = (*numbers.stride()[:-1], numbers.shape[-1], numbers.storage_offset())
    return numbers.stride(-1) == 1 and not any(n % 2 for n in even) and numbers.data_ptr() % ALIGNMENT == 0

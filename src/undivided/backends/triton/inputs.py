"""The arguments of the Triton kernels: views, strides, the mask's tables, positions, switches.

Legend: B batch, H query heads, N key/value heads, S sequence (Sq queries, Sk keys), D head size.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from undivided.arguments import layout
from undivided.arguments.tensors import batch_stride
from undivided.backends.shared.alibi import row_slopes
from undivided.backends.triton import descriptors, masked_keys, tables
from undivided.backends.triton.rows import Rows, rows_of
from undivided.kernels import philox
from undivided.kernels.triton import config
from undivided.masks import NormalForm
from undivided.quantization import FORMAT_CODES
from undivided.request.call import Call
from undivided.request.problem import Problem
from undivided.request.request import Tensors

POINTERS = {
    "ranges": torch.int32,
    "bias": torch.float32,
    "dense": torch.float32,
    "slopes": torch.float32,
    "seed": torch.int64,
    "row_at": torch.float32,
    "key_at": torch.float32,
    "sequence": torch.float32,
    "position": torch.float32,
    "k_scale": torch.float32,
    "v_scale": torch.float32,
    "sinks": torch.float32,
    "pages": torch.int32,
    "places": torch.int32,
    "ancestors": torch.uint8,
    "tree_first": torch.int32,
    "factor": torch.float32,
    "grad_lse": torch.float32,
    "dslope": torch.float32,
}
"""The pointers of the kernels that not every call has, with the dtypes of their placeholders."""

_MOVE_ON = frozenset({"causal", "window", "documents", "lengths", "q_lengths"})
"""Kinds of mask whose ranges never move back from row to row; rows without keys are at the ends."""


@functools.cache
def architecture(device: torch.device) -> str:
    """ "sm90", "gfx942", or "interpreter" on the CPU."""
    if device.type == "cpu":
        return "interpreter"
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm{properties.major}{properties.minor}"


@functools.cache
def processors(device: torch.device) -> int:
    """The number of streaming multiprocessors; 8 on the CPU, so that decoding splits keys there too."""
    return 8 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count


def precision(problem: Problem) -> str:
    """The precision of products: "tf32" for fp32 if PyTorch's matrix products may use it, else "ieee"."""
    return "tf32" if problem.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 else "ieee"


@functools.cache
def _placeholder(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(1, dtype=dtype, device=device)


def axis_strides(**tensors: Tensor) -> dict[str, int]:
    """The arguments name_b, name_h and name_s of [B, H, S, D] tensors."""
    return {
        f"{name}_{axis}": stride
        for name, tensor in tensors.items()
        for axis, stride in zip("bhs", tensor.stride()[:3], strict=True)
    }


def strides(tensor: Tensor) -> tuple[int, ...]:
    """The strides, with 0 for axes of length 1, so that broadcast axes are read in place."""
    return tuple(0 if n == 1 else s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def as_bytes_of_fp8(k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
    """k and v; numbers of 8 bits with an exponent as the bytes that the kernels convert."""
    if problem.quantized in ("fp8_e4m3", "fp8_e5m2"):
        return k.view(torch.uint8), v.view(torch.uint8)
    return k, v


def fp32_in_order(sinks: Tensor) -> Tensor:
    """The sinks as the kernels read them: fp32, without gaps."""
    return sinks.detach().float().contiguous()


def scale_rows(scale: Tensor, problem: Problem) -> Tensor:
    """The scales of keys or values, of int4 with those of a token's groups side by side."""
    return scale.contiguous() if problem.quantized == "int4" and scale.stride(-1) != 1 else scale


class KernelInputs:
    """The inputs of one problem, for every kernel. Keeps its tensors alive until the launches are queued."""

    def __init__(self, call: Call, tensors: Tensors) -> None:
        problem = call.problem
        self.call, self.problem, self.tensors = call, problem, tensors
        self.q = layout.heads_first(tensors.q, problem.layout)
        self.pages: Tensor | None = None
        if call.pages is None:
            self.k = layout.heads_first(tensors.k, problem.layout)
            self.v = layout.heads_first(tensors.v, problem.layout)
        else:  # pools [pages, page_size, N, D]: a key's row is found through the table
            self.k, self.v = tensors.k.transpose(1, 2), tensors.v.transpose(1, 2)
            self.pages = call.pages.contiguous()
        self.k, self.v = as_bytes_of_fp8(self.k, self.v, problem)
        needs_positions = problem.features & {"alibi", "dropout"}
        form = None
        if needs_positions or not call.mask.is_full:
            form = call.normal_form(tensors.q)
        self.form: NormalForm | None = form
        self.masked = not call.mask.is_full
        self.tree = None if form is None else form.tree
        self.columns = form.ranges.shape[-1] if form is not None and self.masked else 0
        self.ranges = self.q if form is None else form.table
        self.bias = None
        if tensors.bias is not None:
            self.bias = tensors.bias.detach().expand(-1, -1, problem.q_len, problem.kv_len)
        self.slopes = None
        if tensors.alibi_slopes is not None:
            assert form is not None
            self.slopes = row_slopes(tensors.alibi_slopes.detach().float(), problem, form)
        self.sinks = None if tensors.sinks is None else fp32_in_order(tensors.sinks)

    def _seed(self, seed: int | Tensor) -> Tensor:
        """The seed as int64 [1], created on the device: copying a number there would wait for it."""
        if isinstance(seed, Tensor):
            return seed.to(device=self.q.device, dtype=torch.int64).reshape(1)
        return torch.full((1,), seed, dtype=torch.int64, device=self.q.device)

    @property
    def always_masked(self) -> bool:
        """Whether no tile can skip the mask: a bias may hold -inf, a dense mask any pattern."""
        return self.bias is not None or (self.form is not None and not self.form.exact)

    def rows(self, reads_tree: bool = False) -> Iterator[Rows]:
        """The blocks of rows of `rows_of`."""
        return rows_of(self.problem, self.form if self.masked else None, reads_tree)

    def tiles(self, block_m: int, block_n: int, columns: bool = False) -> tables.Tables:
        """The mask's tables for these tile sizes."""
        problem = self.problem
        return tables.cached_tables(
            self.form if self.masked else None,
            problem.q_len,
            problem.kv_len,
            block_m,
            block_n,
            self.q.device,
            always_masked=self.always_masked,
            columns=columns,
        )

    def pointers(self, rows: Rows) -> dict[str, Tensor]:
        """The tensors of mask, bias, slopes and dropout that this call has, for these rows."""
        form, tensors = self.form, {}
        if self.columns:
            tensors["ranges"] = self.ranges
        if self.bias is not None:
            tensors["bias"] = self.bias[:, :, rows.span]
        if rows.dense is not None:
            dense = rows.dense.view(torch.uint8)
            tensors["dense"] = dense.expand(-1, -1, rows.span.stop - rows.span.start, self.problem.kv_len)
        if self.slopes is not None:
            tensors["slopes"] = self.slopes
        if self.call.dropout_p > 0:
            assert self.call.dropout_seed is not None
            tensors["seed"] = self._seed(self.call.dropout_seed)
        if form is not None and self.problem.features & {"alibi", "dropout"}:
            tensors["key_at"] = form.kv_position.contiguous()
            tensors["position"] = form.q_position.contiguous()
            tensors["row_at"] = (form.q_position + form.shift).contiguous()
            tensors["sequence"] = form.sequence_number.contiguous()
        return tensors

    def pointer_strides(self, pointers: Mapping[str, Tensor]) -> dict[str, int]:
        """The strides of the tensors of `pointers`, as arguments; 0 for those that the call does not have."""
        arguments = {}
        for name in ("ranges", "row_at", "key_at", "sequence", "position"):
            tensor = pointers.get(name)
            arguments[f"{name}_b"] = batch_stride(tensor) if tensor is not None and tensor.dim() > 1 else 0
        for name, axes in (("bias", "bhqk"), ("dense", "bhqk"), ("slopes", "bhq")):
            tensor = pointers.get(name)
            if tensor is None:
                steps: Sequence[int] = (0,) * len(axes)
            else:
                steps = tensor.stride() if name == "slopes" else strides(tensor)
            arguments |= {f"{name}_{axis}": step for axis, step in zip(axes, steps, strict=True)}
        return arguments

    def forward_only(self) -> dict[str, Tensor]:
        """The tensors of this call that only the forward reads: sinks, block table, draft tree, scales of quantised
        numbers."""
        optional = {"sinks": self.sinks, "pages": self.pages}
        if self.tree is not None and self.form is not None:
            optional |= {"ancestors": self.tree.ancestors.view(torch.uint8), "tree_first": self.tree.first}
        tensors = {name: tensor for name, tensor in optional.items() if tensor is not None}
        for name, scale in (("k_scale", self.call.k_scale), ("v_scale", self.call.v_scale)):
            if scale is not None:
                tensors[name] = scale_rows(scale, self.problem)
        return tensors

    def scale_strides(self, tensors: Mapping[str, Tensor]) -> dict[str, int]:
        """How quantised keys and values are stored and converted, and the strides of their scales, as arguments."""
        name = architecture(self.q.device)
        capability = int(name.removeprefix("sm")) if name.startswith("sm") and self.problem.quantized else 0
        arguments = {"FORMAT": FORMAT_CODES[self.problem.quantized], "PTX": capability}
        for name in ("k_scale", "v_scale"):
            step_b = step_h = step_s = 0
            if name in tensors:
                axes = layout.STRIDE_GETTERS["bshd" if self.call.pages is not None else self.problem.layout]
                step_b, step_h, step_s = axes(tensors[name].stride())
            # the first axis of a pool has the pages
            names = (f"{name}_{axis}" for axis in ("b", "h", "s", "page"))
            arguments |= dict(zip(names, (step_b, step_h, step_s, step_b), strict=True))
        return arguments

    def placeholders(self, kernel: Any, arguments: Mapping[str, Any]) -> dict[str, Tensor]:
        """For each pointer of a kernel that the call does not have, a tensor that the kernel does not read."""
        missing = [name for name in kernel.arg_names if name in POINTERS and name not in arguments]
        return {name: _placeholder(POINTERS[name], self.q.device) for name in missing}

    def facts(self, rows: Rows) -> tuple[Hashable, ...]:
        """What decides the arguments of a launch, besides its tile sizes and what `launches` reads of its tensors."""
        call, problem, form = self.call, self.problem, self.form
        of_form: tuple[Hashable, ...] = ()
        if form is not None:
            of_form = form.exact, form.first_head, form.key_index is None, form.row_index is None
        return (
            problem,
            call.scale,
            call.softcap,
            call.dropout_p,
            self.columns,
            rows.span.start,
            self.clean,
            of_form,
            precision(problem),
        )

    def switches(self, rows: Rows) -> dict[str, Any]:
        """Sizes, scalars, and compile-time switches."""
        call, problem = self.call, self.problem
        dropout = 0
        if call.dropout_p > 0:
            dropout = 2 if self._keys_stand_in_order() else 1
        return {
            "kv_len": problem.kv_len,
            "q_len": rows.span.stop - rows.span.start,
            "first_row": rows.span.start,
            "scale": call.scale,
            "softcap": call.softcap or 0.0,
            "threshold": philox.threshold(call.dropout_p),
            "survivor": philox.survivor_scale(call.dropout_p),
            "dropout_head": 0 if self.form is None else self.form.first_head,
            "HEADS_PER_KV": problem.heads // problem.kv_heads,
            "QK_DIM": problem.qk_dim,
            "V_DIM": problem.v_dim,
            "DIM_STEP": config.column_step(problem.qk_dim),
            "VALUE_STEP": config.column_step(problem.v_dim),
            "COLUMNS": self.columns,
            "DENSE": rows.dense is not None,
            "ALIBI": self.slopes is not None,
            "SOFTCAP": call.softcap is not None,
            "SINKS": self.tensors.sinks is not None,
            "DROPOUT": dropout,
            "PRECISION": precision(problem),
        }

    @property
    def plain(self) -> bool:
        """Whether scores are just ``scale * q k`` with a positive scale."""
        return not self.problem.features & {"alibi", "softcap"} and self.bias is None and self.call.scale > 0

    @property
    def values_are_keys(self) -> bool:
        """Whether v is the first columns of k in memory, as in latent attention. Quantised, each has its own scales."""
        k, v = self.k, self.v
        same = k.data_ptr() == v.data_ptr() and k.stride() == v.stride()
        return same and self.problem.quantized is None

    @property
    def clean(self) -> int:
        """Which keys the kernels replace by 0: see `masked_keys.replaced`."""
        if not self.masked and self.bias is None:
            return 0
        return masked_keys.replaced(self.call, self.columns, self.bias is not None)

    @property
    def gapless(self) -> bool:
        """Whether the rows that see a whole key tile are contiguous: one range per row, which never moves back."""
        form = self.form
        if form is None or not self.masked:
            return True
        return self.columns == 2 and form.row_index is None and self.problem.mask.kinds <= _MOVE_ON

    def _keys_stand_in_order(self) -> bool:
        """Whether key j of the tensor is position j of its sequence, so that one draw serves eight neighbours."""
        moved = self.problem.mask.kinds & {"documents", "document_ids", "starts", "padded"}
        return not moved and (self.form is None or self.form.key_index is None) and not self.problem.packed

    def descriptors(self, tile: config.Config, **looped: Tensor) -> dict[str, Any]:
        """The two tensors [B, H, S, D] that a pass loops over (k and v, or q and the gradient) as tensor descriptors of
        tiles, which TMA loads whole, with zeros beyond the last row. Empty if the tile sizes do not use descriptors or
        TMA cannot read these tensors (CUDA driver API, cuTensorMapEncodeTiled)."""
        problem = self.problem
        whole = all(config.column_step(dim) == dim for dim in (problem.qk_dim, problem.v_dim))
        if not tile.descriptors or problem.page_size is not None or problem.quantized is not None or not whole:
            return {}
        if problem.batch_invariant:  # whether TMA can read them depends on where they lie in memory
            return {}
        found = {name: descriptors.row_descriptor(tensor, tile.block_n) for name, tensor in looped.items()}
        return {} if None in found.values() else found

    def uses_warp_specialisation(self, tile: config.Config, has_descriptors: bool) -> bool:
        """Whether loads, products and softmax run on separate warps (warp specialisation).

        Only if the tile sizes request it, all tiles are loaded by descriptors, scores are just ``scale * q k`` and no
        key is replaced by 0: Triton 3.7 fails to compile some other loops.
        """
        plain = self.plain and not self.always_masked and not self.problem.features & {"dropout", "sinks"}
        return tile.specialise and has_descriptors and plain and self.clean == 0

    def stages(self, tile: config.Config) -> int:
        """Stages of Triton's pipeline, which shares them between the load of a page's number and what depends on it.
        AMD GPUs have less shared memory, and were not measured."""
        shared = self.problem.page_size is not None and not architecture(self.q.device).startswith("gfx")
        return 2 * tile.stages - 1 if shared else tile.stages

    def tile(self, name: str) -> config.Config:
        """The tile sizes of a pass."""
        problem = self.problem
        size = max(problem.qk_dim, problem.v_dim)
        itemsize: float = problem.dtype.itemsize
        if name == "decode" and problem.quantized and itemsize == 2:
            itemsize = 0.5 if problem.quantized == "int4" else 1
        tile = config.config(name, itemsize, size, architecture(self.q.device))
        # dequantised keys and values need registers too
        more_values = self.always_masked or bool(problem.features & {"dropout", "quantized"})
        # the pass over keys has two accumulators, and no registers for a second value per pair
        more_values = more_values or (name == "keys" and bool(problem.features & {"alibi", "softcap"}))
        return config.with_fewer_pairs(tile) if more_values else tile

    def with_rows(self, tile: config.Config, rows: int) -> config.Config:
        """The tile sizes of decoding for so many rows per key/value head; fp32 has no registers for more of them."""
        if self.problem.dtype.itemsize > 2:
            return tile
        dim = max(self.problem.qk_dim, self.problem.v_dim)
        return config.for_rows(tile, rows, dim, architecture(self.q.device))

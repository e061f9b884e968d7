"""The backward of the `triton` backend: launches of its gradient kernels."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from undivided.arguments import layout
from undivided.arguments.tensors import batch_stride, empty_rows_like, materialise, with_contiguous_rows
from undivided.backends._base import Gradients
from undivided.backends.shared.alibi import sum_of_sequences
from undivided.backends.triton import kept_launches, tables
from undivided.backends.triton.inputs import KernelInputs, axis_strides
from undivided.backends.triton.launches import launch
from undivided.backends.triton.rows import Rows
from undivided.kernels.triton.config import Config, column_step
from undivided.request.call import Call
from undivided.request.request import Tensors
from undivided.request.result import Result, sink_factor

DELTA_PAIRS = 4096
"""Numbers of the gradient that a program of `delta_kernel` reads: 32 for each of its 128 threads."""


def gradients(call: Call, tensors: Tensors, result: Result, grad_out: Tensor, grad_lse: Tensor | None) -> Gradients:
    """Gradients of (q, k, v, bias, sinks, alibi_slopes); None if ``call.needs`` is False for one."""
    tensors, grad_out = tensors.materialised(), materialise(grad_out)
    launches = kept_launches.find_gradients(call, tensors, result, grad_out) if grad_lse is None else None
    if launches is not None:
        return launches.run(call, tensors, result, grad_out)
    return _Backward(KernelInputs(call, tensors), result, grad_out, grad_lse).run()


class _Backward:
    def __init__(self, inputs: KernelInputs, result: Result, grad_out: Tensor, grad_lse: Tensor | None) -> None:
        problem = inputs.problem
        self.inputs, self.problem = inputs, problem
        self.needs = inputs.call.needs
        self.launches: list[kept_launches.KeptLaunch | None] = []  # those that ran; None under Triton's interpreter
        self.result, self.grad_out = result, grad_out
        self.g = with_contiguous_rows(layout.heads_first(grad_out, problem.layout))
        self.lse = result.lse.contiguous()
        self.out = with_contiguous_rows(layout.heads_first(result.out, problem.layout))
        self.delta = self._delta()
        self.grad_lse = None if grad_lse is None else materialise(grad_lse).float().contiguous()
        self.factor = None
        if inputs.sinks is not None:
            self.factor = sink_factor(self.lse, inputs.sinks).contiguous()
        self.row_slopes = torch.zeros_like(self.delta) if self.needs[5] else None

    def _launch(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        facts: tuple[Hashable, ...],
        tensors: Mapping[str, Tensor],
        others: Callable[[], Mapping[str, Any]],
        descriptors: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        launched = launch(kernel, grid, facts, tensors, others, descriptors)
        kept = None if launched is None else kept_launches.KeptLaunch.from_launch(launched, tensors, descriptors)
        self.launches.append(kept)

    def _delta(self) -> Tensor:
        """The sum of gradient times output of every row, fp32 [B, H, Sq]."""
        from undivided.kernels.triton import backward

        out = self.out
        batch, heads, length, v_dim = out.shape
        delta = torch.empty((batch, heads, length), dtype=torch.float32, device=out.device)
        width = max(16, 1 << (v_dim - 1).bit_length())
        block = max(DELTA_PAIRS // width, 1)
        self._launch(
            backward.delta_kernel,
            (-(-length // block), heads, batch),
            (),
            {"g": self.g, "out": out, "delta": delta},
            lambda: {
                **axis_strides(g=self.g, out=out),
                "heads": heads,
                "q_len": length,
                "V_DIM": v_dim,
                "WIDTH": width,
                "BLOCK": block,
            },
        )
        return delta

    def run(self) -> list[Tensor | None]:
        tensors, blocks = self.inputs.tensors, list(self.inputs.rows())
        dq = empty_rows_like(tensors.q) if self.needs[0] or self.needs[5] else None
        # if the rows are computed in several launches, the sums over rows are kept in fp32
        dtype = torch.float32 if len(blocks) > 1 else None
        dk = empty_rows_like(tensors.k, dtype).zero_() if self.needs[1] or self.needs[2] else None
        dv = empty_rows_like(tensors.v, dtype).zero_() if self.needs[1] or self.needs[2] else None
        dbias = self._empty_bias() if self.needs[3] else None
        for rows in blocks:
            if dq is not None:
                self._rows(rows, layout.heads_first(dq, self.problem.layout))
            if dk is not None and dv is not None:
                dk_BHSD, dv_BHSD = (layout.heads_first(t, self.problem.layout) for t in (dk, dv))
                self._keys(rows, dk_BHSD, dv_BHSD, add=len(blocks) > 1)
            if dbias is not None:
                self._pairs(rows, dbias)
        self._keep(blocks)
        gradients = (dq, dk, dv, self._bias(dbias), self._sinks(), self._slopes())
        return [
            None if gradient is None or tensor is None or not needed else gradient.to(tensor.dtype)
            for gradient, tensor, needed in zip(gradients, tensors, self.needs, strict=True)
        ]

    def _keep(self, blocks: Sequence[Rows]) -> None:
        """Keep the launches for the next such call, if they read the tensors of this one and not copies of them."""
        copied = self.g.data_ptr() != self.grad_out.data_ptr() or self.out.data_ptr() != self.result.out.data_ptr()
        if len(blocks) == 1 and self.grad_lse is None and self.lse is self.result.lse and not copied:
            kept_launches.keep_gradients(self.inputs.call, self.inputs, self.result, self.grad_out, self.launches)

    def _tensors(self, rows: Rows, block_m: int, block_n: int) -> dict[str, Tensor]:
        """The tensors of all three passes; q, g and the tables begin at the first of these rows."""
        inputs = self.inputs
        optional = {"factor": self.factor, "grad_lse": self.grad_lse}
        return {
            "q": inputs.q[:, :, rows.span],
            "k": inputs.k,
            "v": inputs.v,
            "g": self.g[:, :, rows.span],
            "lse": self.lse,
            "delta": self.delta,
            "tiles": inputs.tiles(block_m, block_n).rows[:, rows.span.start // block_m :],
            **{name: tensor for name, tensor in optional.items() if tensor is not None},
            **inputs.pointers(rows),
        }

    def _others(
        self, kernel: Any, rows: Rows, tensors: dict[str, Tensor], tile: Config, block_m: int, block_n: int
    ) -> dict[str, Any]:
        """The other arguments that all three passes have."""
        return {
            "tiles_b": batch_stride(tensors["tiles"]),
            "heads": self.problem.heads,
            "row_values": self.problem.q_len,
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "GRAD_LSE": self.grad_lse is not None,
            "num_warps": tile.warps,
            "num_stages": tile.stages,
            **self.inputs.placeholders(kernel, tensors),
            **axis_strides(**{name: tensors[name] for name in "qkvg"}),
            **self.inputs.pointer_strides(tensors),
            **self.inputs.switches(rows),
        }

    def _facts(self, rows: Rows, *more: Hashable) -> tuple[Hashable, ...]:
        return (*self.inputs.facts(rows), *more)

    def _rows(self, rows: Rows, dq: Tensor) -> None:
        from undivided.kernels.triton import backward

        tile, problem = self.inputs.tile("rows"), self.problem
        tensors = self._tensors(rows, tile.block_m, tile.block_n)
        descriptors = self.inputs.descriptors(tile, k=tensors["k"], v=tensors["v"])
        steps = -(-problem.qk_dim // column_step(problem.qk_dim))
        dq = dq[:, :, rows.span]
        blocks = -(-dq.shape[2] // tile.block_m)
        self._launch(
            backward.rows_kernel,
            (blocks * steps, problem.heads, problem.batch),
            self._facts(rows, tile, bool(descriptors), self.row_slopes is None),
            {**tensors, "dq": dq} | ({} if self.row_slopes is None else {"dslope": self.row_slopes}),
            lambda: {
                **self._others(backward.rows_kernel, rows, tensors, tile, tile.block_m, tile.block_n),
                "steps": steps,
                **axis_strides(dq=dq),
                "BIAS": self.inputs.bias is not None,
                "CLEAN": self.inputs.clean,
                "TMA": bool(descriptors),
                "WITH_SLOPES": self.row_slopes is not None,
                "SPECIALISE": self.inputs.uses_warp_specialisation(tile, bool(descriptors)),
            },
            descriptors,
        )

    def _keys(self, rows: Rows, dk: Tensor, dv: Tensor, add: bool) -> None:
        from undivided.kernels.triton import backward

        problem, tile = self.problem, self.inputs.tile("keys")
        block_m, block_n = tile.block_n, tile.block_m  # a program keeps keys and visits rows
        tensors = self._tensors(rows, block_m, block_n)
        descriptors = self.inputs.descriptors(tile, q=tensors["q"], g=tensors["g"])
        steps = max(-(-dim // column_step(dim)) for dim in (problem.qk_dim, problem.v_dim))
        whole = rows.span == slice(0, problem.q_len)
        tiles = self.inputs.tiles(block_m, block_n, columns=whole)
        columns = tiles.columns
        if columns is None:  # not all rows: the table of these rows' blocks, numbered from 0
            first, last = rows.span.start // block_m, -(-rows.span.stop // block_m)
            columns = tables.column_table(tiles.rows[:, first:last], -(-problem.kv_len // block_n))
        for with_k, with_v in ((True, False), (False, True)) if tile.split_gradients else ((True, True),):
            arguments = {
                "steps": steps,
                "ADD": add,
                "WITH_K": with_k,
                "WITH_V": with_v,
                "BIAS": self.inputs.bias is not None,
                "GAPLESS": whole and self.inputs.gapless,
                "CLEAN": self.inputs.clean,
                "TMA": bool(descriptors),
            }

            def others(columns: Tensor = columns, arguments: dict[str, Any] = arguments) -> dict[str, Any]:
                return {
                    **self._others(backward.keys_kernel, rows, tensors, tile, block_m, block_n),
                    "columns_b": batch_stride(columns),
                    **axis_strides(dk=dk, dv=dv),
                    **arguments,
                }

            self._launch(
                backward.keys_kernel,
                (columns.shape[1] * steps, problem.kv_heads, problem.batch),
                self._facts(rows, tile, *arguments.values()),
                {**tensors, "dk": dk, "dv": dv, "columns": columns},
                others,
                descriptors,
            )

    def _empty_bias(self) -> Tensor:
        """fp32 zeros [b, h, Sq, Sk], b and h as in the bias; axes of queries or keys are summed afterwards if
        broadcast."""
        bias = self.inputs.tensors.bias
        assert bias is not None
        return bias.new_zeros((*bias.shape[:2], self.problem.q_len, self.problem.kv_len), dtype=torch.float32)

    def _pairs(self, rows: Rows, dbias: Tensor) -> None:
        from undivided.kernels.triton import backward

        problem, tile = self.problem, self.inputs.tile("rows")
        tensors = self._tensors(rows, tile.block_m, tile.block_n)
        own = dbias[:, :, rows.span]
        self._launch(
            backward.pairs_kernel,
            (-(-problem.kv_len // tile.block_n), -(-own.shape[2] // tile.block_m), dbias.shape[0] * dbias.shape[1]),
            self._facts(rows, tile),
            {**tensors, "dbias": own},
            lambda: {
                **self._others(backward.pairs_kernel, rows, tensors, tile, tile.block_m, tile.block_n),
                "dbias_b": own.stride(0),
                "dbias_h": own.stride(1),
                "dbias_q": own.stride(2),
                "own_batch": dbias.shape[0],
                "own_heads": dbias.shape[1],
                "batches": problem.batch,
            },
        )

    def _bias(self, dbias: Tensor | None) -> Tensor | None:
        bias = self.inputs.tensors.bias
        return None if dbias is None or bias is None else dbias.sum_to_size(bias.shape)

    def _sinks(self) -> Tensor | None:
        if not self.needs[4] or self.factor is None:
            return None
        return kept_launches.sink_gradient(self.lse, self.factor, self.delta)

    def _slopes(self) -> Tensor | None:
        slopes, rows = self.inputs.tensors.alibi_slopes, self.row_slopes
        if slopes is None or rows is None:
            return None
        if slopes.dim() == 1:
            return rows.sum((0, 2))
        assert self.inputs.form is not None
        return sum_of_sequences(rows, slopes, self.inputs.form)

"""Our own CPU kernel: C++ with SIMD behind a C ABI (`undivided.kernels.cpu`).

The kernel takes any strides with a unit last one, reads ranges of keys for every row (the mask's normal form), and computes
what they allow and nothing else. What ranges cannot say goes to it as a boolean tensor, in blocks of query rows, so that
memory stays O(S * block). Sizes, strides and ranges are checked here, before the kernel runs: it trusts them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from undivided import _layout
from undivided._machine import Machine
from undivided._problem import Operands, Problem
from undivided._result import Result
from undivided.backends._base import ANY_PART, Backend, Gradients, Limits, limit_reasons
from undivided.kernels import cpu
from undivided.masks._intervals import DensePairs, NormalForm

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

MASK_PAIRS = 1 << 24
"""Entries of a mask evaluated at once where ranges are not enough: 16 MiB of bool."""

FEWEST_ROWS = 32
"""Query rows of such a block at least: a panel of the widest instruction set."""

TINY = 1 << 17
"""Multiply-adds of a plain fp32 problem below which torch_flash comes first. Measured on Zen 4 (one thread, a whole call):
at 1x4x16x64 (2^17) 30 us against 27, at 1x8x32x64 (2^20) 51 against 60; bf16 and grouped heads are never slower."""

_PACK = cpu.RECORD.pack
_SIZE = cpu.RECORD.size
# what the record holds where there is none: pointers, then strides
_NO_RANGES: tuple[int, ...] = (0, 0, 2, 0, 0, 0)
_NO_BIAS: tuple[int, ...] = (0,) * 6
_NO_DENSE: tuple[int, ...] = (0,) * 5
_NO_SLOPES: tuple[int, ...] = (0,) * 8
_NO_PAGES: tuple[int, ...] = (0,) * 4
_NOTHING_ELSE = (0, *_NO_BIAS, *_NO_DENSE, *_NO_SLOPES)
_BANDS = frozenset({"causal", "window"})
"""Masks that are one band for every sequence: the kernel works out their ranges itself, in no time and no memory."""
_EXTRAS = frozenset({"bias", "alibi", "sinks"})


class Native(Backend):
    """Tiled attention with query rows in the vector lanes."""

    name = "native"
    family = "flash"
    summary = "our C++ kernel: SIMD, any mask, threads of PyTorch's OpenMP"
    how_to_get = cpu.HOW_TO_GET
    limits = Limits(
        devices=frozenset({"cpu"}),
        dtypes=frozenset(DTYPES),
        masks=ANY_PART,
        alignments=frozenset({"top_left", "bottom_right"}),
        features=frozenset(
            {"bias", "alibi", "softcap", "sinks", "gqa", "value_dim", "lse", "paged", "flipped"}
        ),
        notes={
            "backward": "no backward yet",
            "dropout": "not yet",
            "strided": "its rows are contiguous",
        },
    )

    def rank(self, problem: Problem, machine: Machine) -> float:
        """First on the CPU, but for what is so small that calling PyTorch's operator costs less than ours."""
        return 25 if _is_tiny(problem) else 10

    def unavailable(self, machine: Machine) -> str | None:
        """Not built, or not loadable. A described machine is taken to have it."""
        if not machine.probed:
            return None
        library = cpu.load()
        return library if isinstance(library, str) else None

    def reasons(self, problem: Problem, machine: Machine) -> list[str]:
        """The limits, and whether the library is there."""
        reasons = limit_reasons(self.limits, problem, machine)
        if problem.device == "cpu" and (missing := self.unavailable(machine)) is not None:
            reasons.append(missing)
        return reasons

    def forward(self, problem: Problem, operands: Operands) -> Result:
        """One call of the kernel; one for every block of rows where the mask is more than ranges."""
        q, k, v = _kernel_views(operands)
        out_BSHD = _new_output(problem, operands)
        out = out_BSHD.transpose(1, 2)
        lse = torch.empty((problem.batch, problem.heads, problem.q_len), dtype=torch.float32)
        plain = not problem.features & _EXTRAS
        if plain and (problem.mask.kinds <= _BANDS or operands.normal_form(problem).exact):
            _forward(problem, operands, q, k, v, out, lse)
            return Result(out_BSHD, lse)
        normal = None if operands.mask.is_full else operands.normal_form(problem)
        call = _Call(problem, operands, (q, k, v, out, lse))
        if normal is None or normal.exact:
            call.run(normal)
        elif len(normal.extras) == 1 and isinstance(dense := normal.extras[0], DensePairs):
            call.run(normal, dense.tensor)
        else:
            step = max(MASK_PAIRS // max(problem.batch * problem.heads * problem.kv_len, 1), FEWEST_ROWS)
            everything = slice(None)
            for start in range(0, problem.q_len, step):
                rows = slice(start, min(start + step, problem.q_len))
                allowed = normal.allowed(everything, rows, slice(0, problem.kv_len), everything)
                call.run(normal, allowed, rows)
        return Result(out_BSHD, lse)

    def backward(
        self, problem: Problem, operands: Operands, result: Result, grad_out: Tensor, grad_lse: Tensor | None
    ) -> Gradients:
        """Refused by `reasons`."""
        raise NotImplementedError


def _is_tiny(problem: Problem) -> bool:
    if problem.dtype != torch.float32 or problem.heads != problem.kv_heads:
        return False
    if problem.mask.kinds and (problem.mask.kinds != {"causal"} or problem.align == "bottom_right"):
        return False
    # lengths by power of two, as `Backend.reasons` may look at them
    pairs = (
        problem.batch * problem.heads << (problem.q_len - 1).bit_length() << (problem.kv_len - 1).bit_length()
    )
    return pairs * (problem.qk_dim + problem.v_dim) <= TINY


def _kernel_views(operands: Operands) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, H, Sq, Dk]; k and v [B, N, Sk, D], or the pools of a paged cache as they are, [pages, N, page_size, D]."""
    if operands.pages is None:
        return operands.heads_first()
    q = _layout.heads_first(operands.q, operands.layout)
    return q, operands.k.transpose(1, 2), operands.v.transpose(1, 2)


def _band(problem: Problem) -> tuple[int, int]:
    """Query row i sees keys [i + first, i + last)."""
    left, right, far = problem.mask.left, problem.mask.right, problem.q_len + problem.kv_len
    shift = problem.kv_len - problem.q_len if problem.align == "bottom_right" else 0
    first = shift - (far if left is None else min(left, far))
    last = shift + 1 + (far if right is None else min(right, far))
    return first, last


def _new_output(problem: Problem, operands: Operands) -> Tensor:
    """[B, Sq, H, Dv], contiguous in the caller's layout."""
    q = operands.q
    if problem.v_dim == problem.qk_dim and q.is_contiguous():
        return _layout.canonical(torch.empty_like(q), problem.layout)
    return _layout.empty(problem.layout, (problem.batch, problem.q_len, problem.heads, problem.v_dim), q)


def _record(
    problem: Problem, operands: Operands, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    *rest: int,
) -> bytes:  # fmt: skip
    """The C record; `rest` are its fields from ranges on."""
    q_b, q_h, q_s, _ = q.stride()
    k_b, k_h, k_s, _ = k.stride()
    v_b, v_h, v_s, _ = v.stride()
    out_b, out_h, out_s, _ = out.stride()
    lse_b, lse_h, _ = lse.stride()
    return _PACK(
        _SIZE, DTYPES[problem.dtype], problem.batch, problem.heads, problem.kv_heads, q.shape[2],
        problem.kv_len, problem.qk_dim, problem.v_dim, cpu.threads(torch.get_num_threads()),
        operands.scale, operands.softcap or 0.0,
        q.data_ptr(), q_b, q_h, q_s, k.data_ptr(), k_b, k_h, k_s, v.data_ptr(), v_b, v_h, v_s,
        out.data_ptr(), out_b, out_h, out_s, lse.data_ptr(), lse_b, lse_h, *rest,
    )  # fmt: skip


def _forward(
    problem: Problem, operands: Operands, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> None:
    """The call that most problems need: ranges or nothing, no extras."""
    if operands.mask.is_full:
        ranges = _NO_RANGES
    elif problem.mask.kinds <= _BANDS:
        ranges = (0, 0, 2, 1, *_band(problem))
    else:
        allowed = operands.normal_form(problem).table  # held by the operands until the end
        ranges = (allowed.data_ptr(), _batch_stride(allowed), allowed.shape[2], 0, 0, 0)
    _table, pages = _pages(operands)
    library = cpu.load()
    assert not isinstance(library, str)
    library.forward(_record(problem, operands, q, k, v, out, lse, *ranges, *pages, *_NOTHING_ELSE))


def _pages(operands: Operands) -> tuple[Tensor | None, tuple[int, ...]]:
    """The record's fields, and the block table that they point to, to be held until the call returns."""
    if operands.pages is None:
        return None, _NO_PAGES
    # in thd the sequences' rows follow one another, as their keys do
    table, pool = operands.pages.contiguous(), operands.k
    return table, (table.data_ptr(), table.shape[1], pool.shape[1], pool.shape[0])


class _Call:
    """The kernel's arguments, and calls of it for all query rows or some. q, k, v, out are [B, H, S, D], lse [B, H, Sq]."""

    def __init__(
        self, problem: Problem, operands: Operands, tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
    ) -> None:
        library = cpu.load()
        assert isinstance(library, cpu.Library)
        self.library, self.problem, self.operands, self.tensors = library, problem, operands, tensors
        self.sinks = self.bias = self.slopes = None
        self.table, self.pages = _pages(operands)
        if operands.sinks is not None:
            self.sinks = operands.sinks.detach().float().contiguous()
        if operands.bias is not None:
            bias = operands.bias.detach()
            bias = bias if bias.dtype in DTYPES else bias.float()
            self.bias = bias.expand(problem.batch, problem.heads, problem.q_len, problem.kv_len)
        if operands.alibi_slopes is not None:
            self.slopes, self.row_position, self.key_position = _alibi(problem, operands)

    def run(self, normal: NormalForm | None, dense: Tensor | None = None, rows: slice | None = None) -> None:
        """Compute these rows (all if None); dense is their mask, broadcastable to [B, H, rows, Sk]."""
        problem, operands = self.problem, self.operands
        q, k, v, out, lse = self.tensors
        if rows is not None:
            q, out, lse = q[:, :, rows], out[:, :, rows], lse[:, :, rows]
        q_len = q.shape[2]
        ranges, bias, pairs, slopes = _NO_RANGES, _NO_BIAS, _NO_DENSE, _NO_SLOPES
        # every tensor that is pointed to is held by a name until the call returns
        if normal is not None:
            table = normal.ranges.clamp(
                0, problem.kv_len
            ).contiguous()  # inside the keys, whatever the mask says
            part = table if rows is None else table[:, rows]
            ranges = (part.data_ptr(), _batch_stride(part), part.shape[2], 0, 0, 0)
        if self.bias is not None:
            some = self.bias if rows is None else self.bias[:, :, rows]
            bias = (some.data_ptr(), DTYPES[some.dtype], *some.stride())
        if dense is not None:
            dense = dense.expand(problem.batch, problem.heads, q_len, problem.kv_len)
            pairs = (dense.data_ptr(), *dense.stride())
        if self.slopes is not None:
            few = slice(None) if rows is None else rows
            slope, at = self.slopes[:, :, few], self.row_position[:, few]
            slopes = (
                slope.data_ptr(), *slope.stride(), at.data_ptr(), _batch_stride(at),
                self.key_position.data_ptr(), _batch_stride(self.key_position),
            )  # fmt: skip
        sinks = 0 if self.sinks is None else self.sinks.data_ptr()
        record = _record(
            problem, operands, q, k, v, out, lse, *ranges, *self.pages, sinks, *bias, *pairs, *slopes
        )
        self.library.forward(record)


def _alibi(problem: Problem, operands: Operands) -> tuple[Tensor, Tensor, Tensor]:
    """(slope of every row [B, H, Sq], i' + d of every row [B|1, Sq], j' of every key [B|1, Sk])."""
    assert operands.alibi_slopes is not None
    normal = operands.normal_form(problem)
    slopes = operands.alibi_slopes.detach().float()
    if slopes.dim() == 1:
        of_rows = slopes[None, :, None]
    else:
        of_rows = slopes[normal.q_sequence.clamp(0, slopes.shape[0] - 1).long()].transpose(1, 2)
    of_rows = of_rows.expand(problem.batch, problem.heads, problem.q_len)
    return of_rows, (normal.q_position + normal.shift).contiguous(), normal.kv_position.contiguous()


def _batch_stride(table: Tensor) -> int:
    """Of a [B|1, ..] table; 0 where it is broadcast."""
    return table.stride(0) if table.shape[0] > 1 else 0


BACKEND = Native()

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
from undivided._result import UNREAD, Result
from undivided.backends import _native_backward
from undivided.backends._base import ALL_FEATURES, ANY_PART, Backend, Gradients, Limits, limit_reasons
from undivided.backends._native_call import DTYPES, STRIDES, Call, is_plain, pages_of, plain_record
from undivided.kernels import cpu

TINY = 1 << 17
"""Multiply-adds of a plain fp32 problem below which torch_flash comes first. Measured on Zen 4 (one thread, a whole call):
at 1x4x16x64 (2^17) 30 us against 27, at 1x8x32x64 (2^20) 51 against 60; bf16 and grouped heads are never slower."""

TINY_RECORDED = 1 << 20
"""The same where a backward follows. Both together on Granite Rapids, one thread: at 1x1x64x128 (2^20) 182 us against 166, at
1x1x128x64 (2^21) 229 against 225, at 1x8x33x32 (rounded up 2^21) 193 against 233."""

SHORT_RECORDED = {torch.float32: 8, torch.bfloat16: 4, torch.float16: 4}
"""Plain sequences of so many tokens at most are left to torch_flash where a backward follows, however many: a head of the
kernel's gradients costs microseconds. Backward, same machine, 8 x 32 heads of D = 128, ours over PyTorch's: fp32 2.5 at 4
tokens, 1.4 at 7, 0.7 at 16; bf16 5.3 at 1, 1.7 at 2, 1.2 at 4, 0.3 at 8."""


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
        features=ALL_FEATURES - {"strided"},
        notes={"strided": "its rows are contiguous"},
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
        answer, lse = self.answer(problem, operands)
        return Result(_layout.canonical(answer, problem.layout), lse)

    def answer(self, problem: Problem, operands: Operands) -> tuple[Tensor, Tensor]:
        """As `forward`, without the views that a plain problem has no use for."""
        library = cpu.load()
        assert isinstance(library, cpu.Library)
        out, lse = _new_output(problem, operands), UNREAD
        if problem.lse_is_read:
            lse = torch.empty((problem.batch, problem.heads, problem.q_len), dtype=torch.float32)
        if is_plain(problem, operands):
            _table, pages = pages_of(operands)
            strides = STRIDES[problem.layout](out.stride())
            library.forward(plain_record(problem, operands, out, strides, lse, pages))
            return out, lse
        out_BHSD = _layout.heads_first(out, problem.layout)
        call = Call(problem, operands, (*_kernel_views(operands), out_BHSD, lse), paged=True)
        for rows in call.slices():
            library.forward(call.record(rows))
        return out, lse

    def backward(
        self, problem: Problem, operands: Operands, result: Result, grad_out: Tensor, grad_lse: Tensor | None
    ) -> Gradients:
        """One call of the kernel, or one for every block of rows, whose parts are summed in fp32."""
        return _native_backward.backward(
            problem, operands, result.out, "bshd", result.lse, grad_out, grad_lse
        )

    def gradients(
        self, problem: Problem, operands: Operands, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None
    ) -> Gradients:  # fmt: skip
        """As `backward`, without a view of out."""
        return _native_backward.backward(problem, operands, out, problem.layout, lse, grad_out, grad_lse)


def _is_tiny(problem: Problem) -> bool:
    if problem.heads != problem.kv_heads:
        return False
    if problem.mask.kinds and (problem.mask.kinds != {"causal"} or problem.align == "bottom_right"):
        return False
    recorded = "backward" in problem.features
    if recorded and max(problem.q_len, problem.kv_len) <= SHORT_RECORDED.get(problem.dtype, 0):
        return True
    if problem.dtype != torch.float32:
        return False
    # lengths by power of two, as `Backend.reasons` may look at them
    pairs = (
        problem.batch * problem.heads << (problem.q_len - 1).bit_length() << (problem.kv_len - 1).bit_length()
    )
    return pairs * (problem.qk_dim + problem.v_dim) <= (TINY_RECORDED if recorded else TINY)


def _kernel_views(operands: Operands) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, H, Sq, Dk]; k and v [B, N, Sk, D], or the pools of a paged cache as they are, [pages, N, page_size, D]."""
    if operands.pages is None:
        return operands.heads_first()
    q = _layout.heads_first(operands.q, operands.layout)
    return q, operands.k.transpose(1, 2), operands.v.transpose(1, 2)


def _new_output(problem: Problem, operands: Operands) -> Tensor:
    """In the caller's layout, contiguous."""
    q = operands.q
    if problem.v_dim == problem.qk_dim and q.is_contiguous():
        return torch.empty_like(q)
    return q.new_empty((*q.shape[:-1], problem.v_dim))


BACKEND = Native()

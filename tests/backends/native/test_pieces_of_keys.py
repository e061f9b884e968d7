"""batch_invariant=True with more keys than one piece: threads share the pieces of a row, which changes no bit."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import levels
import pytest
import torch
from invariance import MASKS, WAYS, Sequences
from native_oracle import needs_library
from torch import Tensor

import undivided
from undivided import masks
from undivided.kernels import cpu
from undivided.masks import Mask
from undivided.quantization import FORMATS, Format, quantize

pytestmark = needs_library

PIECE = 2048
"""As kPieceKeys in kernels/cpu/abi/tuning.h."""
TOKENS = 2 * PIECE + 500
CAUSAL = masks.causal("bottom_right")
LONG: dict[str, Mask] = {
    "causal": CAUSAL,
    "window over two pieces": masks.window(PIECE + 100, 0, "bottom_right"),
    "window and global keys": masks.window(300, 0, "bottom_right") | masks.sinks(5),
}
ENDS = [(1, TOKENS), (1, PIECE), (1, PIECE + 1), (2, PIECE + 1), (4, 2 * PIECE + 2), (13, TOKENS), (64, 2 * PIECE + 30),
        (200, TOKENS), (700, 2 * PIECE), (5, 40)]  # fmt: skip
"""New tokens, and the number of keys of the sequence with them."""
SIZES = (2, 1, 16, 16)
SOME_WAYS = ["in a batch", "after padding", "in a pack", "in another layout", "in chunks", "in pages of 128"]


class Case:
    """A long sequence, and its result in one prefill of one thread."""

    def __init__(self, mask: Mask, dtype: torch.dtype, format: Format | None = None, **options: Any) -> None:
        torch.manual_seed(0)
        heads, kv_heads, dim = 4, 2, 32
        self.q = torch.randn(1, TOKENS, heads, dim).to(dtype) * 3
        self.k, self.v = (torch.randn(1, TOKENS, kv_heads, dim).to(dtype) for _ in range(2))
        self.scales: dict[str, Tensor] = {}
        if format is not None:
            (self.k, k_scale), (self.v, v_scale) = quantize(self.k, format), quantize(self.v, format)
            self.scales = {"k_scale": k_scale, "v_scale": v_scale}
        self.options: dict[str, Any] = {"mask": mask, "layout": "bshd", **options}

    def last(self, new: int, end: int, **more: Any) -> tuple[Tensor, Tensor]:
        """The output and the log-sum-exp of the last tokens of the first ``end``."""
        options = {"batch_invariant": True, "backend": "native", **self.options, **more}
        scales: dict[str, Any] = {name: scale[:, :end] for name, scale in self.scales.items()}
        tensors = self.q[:, end - new : end], self.k[:, :end], self.v[:, :end]
        out, lse = undivided.attention(*tensors, return_lse=True, **scales, **options)
        return out, lse


def _running(threads: int, level: str | None = None) -> AbstractContextManager[None]:
    """As `levels.running`, by default at the level of this process."""
    if level is not None:
        return levels.running(level, threads)
    library = cpu.load()
    assert isinstance(library, cpu.Library)
    return levels.running_library(library, threads)


def _check(case: Case, level: str | None = None) -> None:
    with _running(1, level):
        whole, whole_lse = case.last(TOKENS, TOKENS)
    for threads in (1, 2, 7):
        with _running(threads, level):
            for new, end in ((TOKENS, TOKENS), *ENDS):
                out, lse = case.last(new, end)
                assert torch.equal(out, whole[:, end - new : end]), (threads, new, end)
                assert torch.equal(lse, whole_lse[..., end - new : end]), (threads, new, end)


@pytest.mark.parametrize("mask", LONG)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_have_the_same_bits_however_many_threads_share_their_keys(dtype: torch.dtype, mask: str) -> None:
    _check(Case(LONG[mask], dtype, sinks=torch.tensor([0.5, -1.0, 20.0, 0.0])))


@pytest.mark.parametrize("format", FORMATS)
def test_so_have_they_over_quantised_keys(format: Format) -> None:
    _check(Case(CAUSAL, torch.bfloat16, format, softcap=20.0))


@pytest.mark.parametrize("level", levels.parameters())
def test_so_have_they_on_every_level(level: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        _check(Case(CAUSAL, dtype), level)


@pytest.mark.parametrize("threads", [1, 5])
@pytest.mark.parametrize("way", SOME_WAYS)
def test_the_bits_are_those_of_each_sequence_alone(way: str, threads: int) -> None:
    with _running(1):
        s = Sequences(MASKS["causal"], torch.bfloat16, SIZES, [3, TOKENS, PIECE + 1], 900)
    with _running(threads):
        s.check(WAYS[way](s))


def test_head_sizes_without_pieces_have_the_same_bits() -> None:
    """Pieces are written in vectors of 16 numbers."""
    torch.manual_seed(0)
    q, k, v = torch.randn(1, TOKENS, 2, 24), torch.randn(1, TOKENS, 1, 24), torch.randn(1, TOKENS, 1, 24)
    options: dict[str, Any] = {"layout": "bshd", "mask": CAUSAL, "batch_invariant": True, "backend": "native"}
    whole = undivided.attention(q, k, v, **options)
    for threads in (1, 4):
        with _running(threads):
            assert torch.equal(undivided.attention(q[:, -3:], k, v, **options), whole[:, -3:])


@pytest.mark.parametrize("mask", LONG)
def test_the_result_is_right(mask: str) -> None:
    case = Case(LONG[mask], torch.float32, sinks=torch.tensor([0.5, -1.0, 20.0, 0.0]))
    for new in (1, 300):
        report = undivided.verify(
            case.q[:, -new:], case.k, case.v, batch_invariant=True, backends=["native"], gradients=False, **case.options
        )
        assert report.ok, report
        assert report.backends == ("native",)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_only_a_later_row_of_a_draft_sees_does_not_reach_the_earlier_ones(dtype: torch.dtype) -> None:
    """The keys of the later rows are in another piece than most, where the earlier rows have a weight of 0 for them."""
    case, end = Case(CAUSAL, dtype), PIECE + 4
    clean = case.last(4, end)[0]
    case.v[:, end - 3], case.v[:, end - 2] = torch.nan, torch.inf
    drafts = case.last(4, end)[0]
    assert torch.equal(drafts[:, 0], clean[:, 0])
    for row in range(4):
        alone = case.last(1, end - 3 + row)[0]
        assert torch.equal(drafts[:, row].nan_to_num(7.0), alone[:, 0].nan_to_num(7.0))
    assert drafts[:, 1:].isnan().all()
